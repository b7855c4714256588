"""A random Llama whose greedy text is known, so that one call shows both how fast a way is and whether it is right.

The head maps the embedding of a token to the next one in a cycle through the vocabulary. Layers cost what those of a
trained model cost; what they add changes logits, but not their order, and no tokens are near a tie in any dtype.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

# Ids below are special tokens of many models, and prompts end with so many tokens of the cycle.
_SPECIAL, _END = 5, 32
# Weights of logits; of what blocks add, so that 64 of them add about as much as the embedding is; and of queries, which
# else would look at all keys alike, so that a lost one would change nothing.
_LOGITS, _ADDED, _SHARPER = 1 / 16, 0.1, 3.0


class KnownText:
    """The model, in bfloat16, and prompts with the text that follows; ``sizes`` are those of ``LlamaConfig``."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        config = LlamaConfig(**sizes, max_position_embeddings=16384, eos_token_id=None, pad_token_id=0)
        torch.manual_seed(0)
        with torch.device(device):
            self.model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._generator, self._begin = torch.Generator().manual_seed(0), 0  # of the next text, as each is remembered
        self.order = torch.randperm(config.vocab_size - _SPECIAL, generator=self._generator) + _SPECIAL
        with torch.no_grad():
            embedding, order = self.model.model.embed_tokens.weight.normal_(), self.order.to(device)
            self.model.lm_head.weight[order.roll(-1)] = embedding[order] * _LOGITS
            for layer in self.model.model.layers:
                layer.self_attn.q_proj.weight.mul_(_SHARPER)
                layer.self_attn.o_proj.weight.mul_(_ADDED)
                layer.mlp.down_proj.weight.mul_(_ADDED)

    def prompt(self, rows: int, width: int, repeated: int, new: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Prompts ``[rows, width]`` with a mask, and the ``new`` tokens of each row that follow, ``[rows, new]``.

        These are in the prompt in pieces of ``repeated`` tokens, between random ones, so that free drafts find about as
        many tokens a round; with 0 they find nothing.
        """
        lines, texts, count = [], [], _END + new + 2 * repeated
        for _ in range(rows):
            text = self.order[(self._begin + torch.arange(count)) % len(self.order)]
            noise = torch.randint(_SPECIAL, len(self.order), (width + count,), generator=self._generator)
            pieces = enumerate(text[_END:].split(repeated) if repeated else ())
            parts = [part for place, piece in pieces for part in (piece, noise[place : place + 1])]
            lines.append(torch.cat([noise[count:], *parts, text[:_END]])[-width:])
            texts.append(text[_END : _END + new])
            self._begin += count
        ids = torch.stack(lines).to(self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.stack(texts).to(ids.device)
