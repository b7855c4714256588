"""EAGLE-3 heads as others publish them: their drafts by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from helpers.blocks import DAMAGED
from helpers.calls import unchanged
from helpers.models import BATCH, ROW, VOCABULARY, tiny_llama
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from helpers.watched import watched
from hf_selfspec import MTP, FixedLength, SelfSpec, SettingError
from hf_selfspec.batch import Draft, Text
from hf_selfspec.modules.mtp import MtpHead

LAYERS, HEADS, KV_HEADS = (2, 4, 5), 4, 2
THETA = 5000.0


def published(folder: Path, model: PreTrainedModel, size: int = 40, **changed: Any) -> dict[str, torch.Tensor]:
    """Writes a random head for a model, with ``size`` draft tokens, in the original format; returns its tensors."""
    torch.manual_seed(1)
    width, vocabulary, inner = model.config.hidden_size, model.config.vocab_size, 48
    shapes = {"fc": (width, 3 * width), "norm": (width,), "lm_head": (size, width)}
    block = {"q_proj": width, "k_proj": width // 2, "v_proj": width // 2}
    shapes |= {f"midlayer.self_attn.{name}": (rows, 2 * width) for name, rows in block.items()}
    shapes |= {f"midlayer.mlp.{name}": (inner, width) for name in ("gate_proj", "up_proj")}
    shapes |= {"midlayer.self_attn.o_proj": (width, width), "midlayer.mlp.down_proj": (width, inner)}
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
        "vocab_size": vocabulary, "draft_vocab_size": size, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": THETA,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@torch.no_grad()
def by_hand(
    tensors: dict[str, torch.Tensor], embedded: torch.Tensor, states: torch.Tensor, norm_before_residual: bool
) -> torch.Tensor:
    """States ``[s, d]`` that leave the layer for embeddings and states ``[s, d]``, by the paper's definition."""
    weights = {name.removeprefix("midlayer.").removesuffix(".weight"): value for name, value in tensors.items()}

    def normed(name: str, values: torch.Tensor) -> torch.Tensor:
        return weights[name] * values * (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    s, width = states.shape
    size = width // HEADS
    entered = torch.cat([normed("input_layernorm", embedded), normed("hidden_norm", states)], dim=-1)
    q, k, v = (
        (entered @ weights[f"self_attn.{name}_proj"].T).view(s, -1, size).transpose(0, 1) for name in ("q", "k", "v")
    )
    angles = torch.arange(s)[:, None] / THETA ** (torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(values: torch.Tensor) -> torch.Tensor:
        moved = torch.complex(*values.chunk(2, dim=-1)) * turn
        return torch.cat([moved.real, moved.imag], dim=-1)

    k, v = (values.repeat_interleave(HEADS // KV_HEADS, 0) for values in (turned(k), v))
    attended = scaled_dot_product_attention(turned(q), k, v, is_causal=True).transpose(0, 1).reshape(s, width)
    residual = normed("hidden_norm", states) if norm_before_residual else states
    states = residual + attended @ weights["self_attn.o_proj"].T
    inner = normed("post_attention_layernorm", states)
    gate = silu(inner @ weights["mlp.gate_proj"].T) * (inner @ weights["mlp.up_proj"].T)
    return states + gate @ weights["mlp.down_proj"].T


@torch.no_grad()
def drafted_by_hand(
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
    text: torch.Tensor,
    count: int,
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> list[int]:
    """The tokens that a head drafts after a text ``[s]``, without caches."""
    layer_states = model.model(text[None, :-1], output_hidden_states=True).hidden_states
    entered = torch.cat([layer_states[layer][0] for layer in LAYERS], dim=-1) @ tensors["fc.weight"].T
    tokens = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    for _ in range(count):
        embeddings = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
        left = by_hand(tensors, embeddings[text[1:]], entered, norm_before_residual)[-1]
        last = left * (left.square().mean() + 1e-5).rsqrt() * tensors["norm.weight"]
        text = torch.cat([text, tokens[(tensors["lm_head.weight"] @ last).argmax()][None]])
        entered = torch.cat([entered, (last if norm_output else left)[None]])
    return text[-count:].tolist()


@pytest.mark.every_run(".*residual.*-one row|.*output.*-batch")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("settings", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=str)
def test_drafts_are_those_of_the_original_head(settings: dict[str, bool], inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(8, factor=0.5)
    tensors, lengths = published(tmp_path, model, **settings), []
    if settings:  # these heads have embeddings of their own
        tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, model.config.hidden_size)
        torch.save(tensors, tmp_path / "pytorch_model.bin")

    def check(text: Text, draft: Draft) -> None:
        for row, length in enumerate(draft.lengths):
            before = text.ids[row, int(inputs["attention_mask"][row].argmax()) : text.lengths[row]]
            expected = drafted_by_hand(model, tensors, before, 3, **settings)[:length]
            assert draft.tokens[row, :length].tolist() == expected
            lengths.append(length)

    plain = model.generate(**inputs, max_new_tokens=12)
    spec = SelfSpec(watched(MTP.from_eagle3(tmp_path), check), FixedLength(3))
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, assistant=spec), plain)
    assert max(lengths) == 3


@pytest.mark.slow
def test_drawn_tokens_have_the_models_distribution(tmp_path: Path) -> None:
    model = tiny_vocabulary()
    published(tmp_path, model, size=model.config.vocab_size - 1)
    changed_weights(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(0.1))  # else few are accepted
    spec = SelfSpec(MTP.from_eagle3(tmp_path, [1, 2, 3]), FixedLength(3))
    check_exact(sample(spec, model), exact_joint(model, []))


def test_a_saved_head_drafts_alike(tmp_path: Path) -> None:
    """In our own format it keeps its vocabulary, its settings and the layers that it reads."""
    model = tiny_llama(8, factor=0.5)
    published(tmp_path, model)
    source = MTP.from_eagle3(tmp_path, (1, 2, 6))
    assert isinstance(source.head, MtpHead)
    source.head.save_pretrained(tmp_path / "saved")
    texts: list[list[Any]] = []
    for each in (source, MTP(tmp_path / "saved")):
        drafts: list[Any] = []
        spec = SelfSpec(watched(each, lambda _, draft, kept=drafts: kept.append(draft.tokens.tolist())), FixedLength(3))
        with unchanged(model):
            model.generate(**BATCH, max_new_tokens=12, assistant=spec)
        texts.append(drafts)
    assert texts[0] == texts[1]
    SelfSpec(each).save_pretrained(tmp_path / "spec")
    assert SelfSpec.from_pretrained(tmp_path / "spec").draft == each


def changed_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(tensors)
    torch.save(tensors, folder / "pytorch_model.bin")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "two layers": ({"num_hidden_layers": 2}, "not served: 2 layers"),
    "other layers": ({"model_type": "gemma2"}, "not served: layers of gemma2"),
    "norms before fc": ({"fc_norm": True, "norm_before_fc": True}, "not served: fc_norm, norm_before_fc"),
    "layers in two ways": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, "in two ways"),
    "other widths": ({"hidden_size": 32}, "size mismatch"),
    "no widths": ({"hidden_size": "wide"}, "holds no EAGLE-3 head"),
}


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(8)
    for config, message in CONFIGS.values():
        published(tmp_path, model, **config)
        with pytest.raises(SettingError, match=message):
            MTP.from_eagle3(tmp_path)
    for change, message in DAMAGED.values():
        published(tmp_path, model)
        changed_weights(tmp_path, change)
        with pytest.raises(SettingError, match=message):
            MTP.from_eagle3(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(SettingError, match="cut short"):
        MTP.from_eagle3(tmp_path)
    with pytest.raises(SettingError, match=r"has no config\.json"):
        MTP.from_eagle3(tmp_path / "..")
