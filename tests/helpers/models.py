"""Models for tests: tiny, built from configs, with layers that matter less the deeper they are."""

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 97
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def damp(model: PreTrainedModel, layers: torch.nn.ModuleList, start: int, factor: float) -> None:
    """Makes the layers from ``start`` on contribute less, so that drafts are sometimes right."""
    with torch.no_grad():
        for layer in list(layers)[start:]:
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(factor)


def tiny_llama(layers: int = 6, seed: int = 0, vocabulary: int = VOCABULARY, factor: float = 0.3) -> LlamaForCausalLM:
    """A Llama with grouped queries whose upper half is damped; no end-of-text token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **SPECIAL_TOKENS,
    )
    model = LlamaForCausalLM(config).eval()
    damp(model, model.model.layers, layers // 2, factor)
    return model


def tiny_gpt2(positions: int = 32) -> GPT2LMHeadModel:
    """A GPT-2 with this many learned positions, upper half damped; no end-of-text token."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=6,
        n_head=4,
        n_positions=positions,
        initializer_range=0.25,
        tie_word_embeddings=False,
        **SPECIAL_TOKENS,
    )
    model = GPT2LMHeadModel(config).eval()
    damp(model, model.transformer.h, 3, 0.5)
    return model


def ragged_batch(
    lengths: tuple[int, ...] = (4, 9, 6), vocabulary: int = VOCABULARY, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


ROW, BATCH = ragged_batch((12,), seed=11), ragged_batch()


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One character per token."""
    characters = ["<pad>", "<s>", *(chr(token + 30) for token in range(2, VOCABULARY))]
    core = Tokenizer(models.BPE({character: token for token, character in enumerate(characters)}, [], unk_token="<s>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", padding_side="left")


def tiny_t5() -> T5ForConditionalGeneration:
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config).eval()


def tiny_rwkv() -> RwkvForCausalLM:
    return RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2)).eval()
