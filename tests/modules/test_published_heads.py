"""Heads as others publish them, EAGLE-3's and those of blocks: what they draft by hand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.cache_utils import DFlashCache

from helpers.architectures import build
from helpers.blocks import (
    CONFIGS,
    DAMAGED,
    HEADS,
    INNER,
    KV_HEADS,
    SIZE,
    THETA,
    block_of,
    context_of,
    logits_by_hand,
    normed,
    published,
    turned,
)
from helpers.calls import unchanged
from helpers.fitted import Recording
from helpers.models import BATCH, ROW, VOCABULARY, tiny_llama
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from helpers.watched import watched
from hf_selfspec import MTP, Block, FixedLength, SelfSpec, SettingError
from hf_selfspec.batch import Draft, Text

# The logits [n, r] of slots in which [n] tokens were drafted after a text [s].
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_logits(model: PreTrainedModel, folder: Path, inputs: Any, predict: Predict, tokens: torch.Tensor) -> None:
    """All slots of all blocks of a call have these logits, whatever was accepted before: from none to all of a block,
    whose first tokens are then replaced by the right ones."""
    plain, blocks, shown = model.generate(**inputs, max_new_tokens=16), list[int](), Recording(ends=False)

    def check(text: Text, draft: Draft) -> None:
        for row, length in enumerate(draft.lengths):
            if not length:
                continue
            before = text.ids[row, int(inputs["attention_mask"][row].argmax()) : text.lengths[row]]
            expected = predict(before, draft.tokens[row, :length])
            drafted_logits = torch.stack([logits[row] for _, logits, _ in shown.calls[:length]])
            torch.testing.assert_close(drafted_logits[:, tokens], expected, atol=1e-5, rtol=1e-5)
            right = plain[row, text.lengths[row] :][: (7 * len(blocks) + row) % (length + 1)]
            draft.tokens[row, : len(right)] = right
            blocks.append(length)
        shown.calls.clear()

    model(inputs["input_ids"], output_hidden_states=True)  # whose hooks transformers keeps
    source = Block(folder)
    spec = SelfSpec(watched(source, check), shown)
    with unchanged(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, assistant=spec), plain)
    assert spec.stats is not None
    assert max(blocks) == source.module.num_tokens
    assert 0.2 < spec.stats.acceptance_rate < 0.8
    assert 3 < spec.stats.draft_steps <= spec.stats.rounds  # one forward a block


@pytest.mark.every_run(".*-batch|dspark gated-one row")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_what_the_definition_predicts(name: str, inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    settings, tensors = published(tmp_path, model, **CONFIGS[name])
    size = settings["draft_vocab_size"]
    tokens = torch.arange(size) + tensors.get("d2t", torch.zeros(size, dtype=torch.long))
    check_logits(
        model, tmp_path, inputs, lambda text, drafted: logits_by_hand(model, settings, tensors, text, drafted), tokens
    )


@pytest.mark.every_run(".*-batch")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]], ids=str)
def test_blocks_are_those_of_transformers(kinds: list[str], inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=6, layer_types=kinds, block_size=5, mask_token_id=3, target_layer_ids=[1, 3, 5],
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    theirs.save_pretrained(tmp_path)

    @torch.no_grad()
    def predict(text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(text) - 1)
        block = torch.tensor([[int(text[-1]), *[3] * 4]])
        entered, places = context_of(model, text, [2, 4, 6])[None], torch.arange(len(text) + 4)[None]
        # The cache has another name in transformers 5.17.
        states = theirs(model.model.embed_tokens(block), entered, None, places, cache)
        expected: torch.Tensor = model.lm_head(states.last_hidden_state[0, 1 : 1 + len(drafted)])
        return expected

    check_logits(model, tmp_path, inputs, predict, torch.arange(VOCABULARY))


def published_eagle(folder: Path, model: PreTrainedModel, size: int = 40, **changed: Any) -> dict[str, torch.Tensor]:
    """Writes a random EAGLE-3 head with ``size`` draft tokens for a model, in the original format; returns its
    tensors."""
    torch.manual_seed(1)
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, 3 * width), "norm": (width,), "lm_head": (size, width)}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        shapes[f"midlayer.self_attn.{name}_proj"] = (heads * SIZE, 2 * width)
    shapes |= {"midlayer.self_attn.o_proj": (width, HEADS * SIZE), "midlayer.mlp.down_proj": (width, INNER)}
    shapes |= {f"midlayer.mlp.{name}_proj": (INNER, width) for name in ("gate", "up")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}": (width,) for name in norms}
    tensors = {
        f"{name}.weight": torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) / 4
        for name, shape in shapes.items()
    }
    tokens = torch.randperm(vocabulary)[:size].sort().values
    tensors["d2t"] = tokens - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "vocab_size": vocabulary, "draft_vocab_size": size, "hidden_size": width, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


@torch.no_grad()
def drafted_by_hand(
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
    layers: list[int],
    text: torch.Tensor,
    count: int,
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> list[int]:
    """The tokens that an EAGLE-3 head drafts after a text ``[s]`` by the paper's definition, without caches."""
    weights = {name.removeprefix("midlayer.").removesuffix(".weight"): value for name, value in tensors.items()}
    table = weights.get("embed_tokens", model.get_input_embeddings().weight)
    states, drafted = context_of(model, text, layers) @ weights["fc"].T, list[int]()
    for _ in range(count):
        s, before = len(states), normed(weights["hidden_norm"], states)
        entered = torch.cat([normed(weights["input_layernorm"], table[text[1:]]), before], dim=-1)
        q, k, v = ((entered @ weights[f"self_attn.{name}_proj"].T).view(s, -1, SIZE).transpose(0, 1) for name in "qkv")
        q, k = turned(q, torch.arange(s)), turned(k, torch.arange(s))
        k, v = (values.repeat_interleave(HEADS // KV_HEADS, 0) for values in (k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(s, -1)
        left = (before if norm_before_residual else states) + attended @ weights["self_attn.o_proj"].T
        inner = normed(weights["post_attention_layernorm"], left)
        gate = silu(inner @ weights["mlp.gate_proj"].T) * (inner @ weights["mlp.up_proj"].T)
        left = (left + gate @ weights["mlp.down_proj"].T)[-1]
        last = normed(weights["norm"], left)
        best = int((weights["lm_head"] @ last).argmax())
        drafted.append(best + int(weights["d2t"][best]))
        text = torch.cat([text, torch.tensor(drafted[-1:])])
        states = torch.cat([states, (last if norm_output else left)[None]])
    return drafted


@pytest.mark.every_run(".*residual.*-one row|.*output.*-batch")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("settings", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=str)
def test_drafts_of_eagle_are_what_the_definition_predicts(settings: Any, inputs: Any, tmp_path: Path) -> None:
    """Also after a save in our own format."""
    model, layers = tiny_llama(8, factor=0.5), [1, 2, 6] if settings else [2, 4, 5]
    tensors, lengths = published_eagle(tmp_path, model, **settings), list[int]()
    if settings:  # these heads have embeddings of their own, and a file of the older kind
        tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, model.config.hidden_size)
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()

    def check(text: Text, draft: Draft) -> None:
        for row, length in enumerate(draft.lengths):
            before = text.ids[row, int(inputs["attention_mask"][row].argmax()) : text.lengths[row]]
            expected = drafted_by_hand(model, tensors, layers, before, 3, **settings)[:length]
            assert draft.tokens[row, :length].tolist() == expected
            lengths.append(length)

    source = MTP.from_eagle3(tmp_path, layers if settings else ())
    source.module.save_pretrained(tmp_path / "saved")
    plain = model.generate(**inputs, max_new_tokens=12)
    for each in (source, MTP(tmp_path / "saved")):
        lengths.clear()
        spec = SelfSpec(watched(each, check), FixedLength(3))
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, assistant=spec), plain)
        assert max(lengths) == 3


@pytest.mark.slow
def test_drawn_tokens_have_the_models_distribution(tmp_path: Path) -> None:
    model = tiny_vocabulary()
    published_eagle(tmp_path, model, size=model.config.vocab_size - 1)
    changed_weights(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(0.1))  # else few are accepted
    spec = SelfSpec(MTP.from_eagle3(tmp_path, [1, 2, 3]), FixedLength(3))
    check_exact(sample(spec, model), exact_joint(model, []))


def changed_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


_LAYER = "transformer_layer_config"
# What writes a head of each kind, what reads it, and what of its config is not served.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Path], Any], list[tuple[dict[str, Any], str]]]] = {
    "block": (
        published,
        Block,
        [
            ({"speculators_model_type": "dflash2"}, "not served: dflash2"),
            ({"speculators_model_type": "eagle3"}, r"MTP\.from_eagle3: .* not served: 2 layers"),
            ({"speculators_model_type": "dspark", "markov_head_type": "lstm"}, "served: a Markov head of type lstm"),
            ({_LAYER: {"model_type": "gemma2"}}, "not served: layers of gemma2"),
            ({_LAYER: {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "positions of type dynamic"),
            ({_LAYER: {"intermediate_size": 32}, "block_size": 5}, "size mismatch"),
            ({"target_hidden_size": 32}, "not served: target_hidden_size"),
            ({"mask_token_id": None}, "has no mask_token_id"),
            ({"aux_hidden_state_layer_ids": None}, "holds no block head, or one whose"),
            ({"block_size": 1}, "block_size must be"),
        ],
    ),
    "EAGLE-3": (
        published_eagle,
        MTP.from_eagle3,
        [
            ({"num_hidden_layers": 2}, "not served: 2 layers"),
            ({"model_type": "gemma2"}, "not served: layers of gemma2"),
            ({"fc_norm": True, "norm_before_fc": True}, "not served: fc_norm, norm_before_fc"),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, "in two ways"),
            ({"hidden_size": 32}, "size mismatch"),
            ({"hidden_size": "wide"}, "holds no EAGLE-3 head"),
        ],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_served_is_refused(kind: str, tmp_path: Path) -> None:
    (write, read, configs), model = KINDS[kind], tiny_llama(8)
    for change, message in configs:
        write(tmp_path, model)
        config = json.loads((tmp_path / "config.json").read_text())
        of_layer = {_LAYER: config[_LAYER] | change[_LAYER]} if _LAYER in change else {}
        (tmp_path / "config.json").write_text(json.dumps(config | change | of_layer))
        with pytest.raises(SettingError, match=message):
            read(tmp_path)
    for damage, message in DAMAGED.values():
        write(tmp_path, model)
        changed_weights(tmp_path, damage)
        with pytest.raises(SettingError, match=message):
            read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(SettingError, match="cut short"):
        read(tmp_path)


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    """Before a mask token is looked up, which on a GPU would be the end of the process."""
    outside = [
        (f"mask_token_id {token}, and a vocabulary of 97", {"mask_token_id": token}, tiny_llama()) for token in (-1, 97)
    ]
    for message, settings, model in (
        ("a vocabulary of 97", {}, tiny_llama(vocabulary=90)),
        (r"before layers \[1, 3, 5\], and the model has 5", {"layers": (1, 3, 5)}, tiny_llama(5)),
        ("width 64, and the model has 32", {}, build("llama", num_hidden_layers=8)),
        (r"before layers \[-1, 3, 5\], and the model has 6", {"layers": (-1, 3, 5)}, tiny_llama()),
        *outside,
    ):
        spec = SelfSpec(Block(block_of(tiny_llama(), **settings)))
        with unchanged(model), pytest.raises(SettingError, match=message):
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, assistant=spec)
    published(tmp_path, model)
    (tmp_path / "config.json").write_text('{"dflash_config": {}, "model_type": "qwen3"}')
    with pytest.raises(SettingError, match="of which `speculators convert` makes"):
        Block(tmp_path)
