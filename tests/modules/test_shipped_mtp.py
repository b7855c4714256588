"""MTP layers that ship with a model: tiny checkpoints with them, under the names that published ones have."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_selfspec
from helpers.architectures import build
from helpers.blocks import published
from helpers.calls import check_lossless, unchanged
from helpers.models import BATCH, ROW, tiny_llama
from hf_selfspec import (
    MTP,
    FixedLength,
    MtpFormat,
    MtpHead,
    SelfSpec,
    SelfSpecError,
    SettingError,
    load_head,
    load_mtp,
)
from hf_selfspec.modules import shipped

WIDTH, LAYERS = 32, 4
_DEEPSEEK = {
    "embedding_norm": "model.layers.4.enorm", "state_norm": "model.layers.4.hnorm",
    "projection": "model.layers.4.eh_proj", "norm": "model.layers.4.shared_head.norm", "block": "model.layers.4",
}  # fmt: skip
_QWEN = {
    "embedding_norm": "mtp.pre_fc_norm_embedding", "state_norm": "mtp.pre_fc_norm_hidden", "projection": "mtp.fc",
    "norm": "mtp.norm", "block": "mtp.layers.0",
}  # fmt: skip
_FINAL = _DEEPSEEK | {"norm": "model.layers.4.final_layernorm"}


@dataclass(frozen=True)
class Family:
    """How a family's checkpoints name the parts, and what makes a tiny model of it from one of the architectures."""

    names: dict[str, str]
    like: str = ""  # its architecture; the family's own by default
    kinds: tuple[str, ...] = ()  # the model's own layers, and that of the MTP layer
    own: str = "full_attention"
    changes: dict[str, Any] = field(default_factory=dict)


_HYBRID = ("linear_attention", "full_attention") * 2
_WINDOWED = ("full_attention", "sliding_attention") * 2
_SPARSE = {"mlp_layer_types": ["dense", *["sparse"] * 4]}
_MTP_TYPES = {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"], "sliding_window": 8}
FAMILIES = {
    "deepseek_v3": Family(_DEEPSEEK),
    "deepseek_v32": Family(_DEEPSEEK),
    "glm_moe_dsa": Family(_DEEPSEEK, changes={"indexer_types": ["full", "shared", *["full"] * 3]}),
    "glm4_moe": Family(_DEEPSEEK),
    "glm4_moe_lite": Family(_DEEPSEEK, "deepseek_v3", changes=_SPARSE),
    "sarvam_moe": Family(_DEEPSEEK, "glm4_moe"),
    "sarvam_mla": Family(_DEEPSEEK, "deepseek_v3"),
    "hy_v3": Family(_FINAL, "qwen3_moe", changes=_SPARSE | {"num_shared_experts": 1}),
    "bailing_hybrid": Family(_FINAL, kinds=_HYBRID, changes=_SPARSE),
    "mellum": Family(_QWEN, "qwen3_moe", _WINDOWED, "sliding_attention", _SPARSE | _MTP_TYPES),
    "exaone_moe": Family(
        _QWEN, "qwen3_moe", _WINDOWED, changes={"mlp_layer_types": [*["sparse"] * 4, "dense"], "sliding_window": 8}
    ),
    "qwen3_next": Family(_QWEN, kinds=_HYBRID),
    "qwen3_5_text": Family(_QWEN, kinds=_HYBRID),
    "qwen3_5_moe_text": Family(_QWEN, kinds=_HYBRID),
}


def with_layer(name: str, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A checkpoint of four layers with an MTP layer, loaded, and the model whose fifth layer the MTP layer's block is,
    of which it was made: so expert weights and all else are saved as the model's own are."""
    family = FAMILIES[name]
    changes = family.changes | ({"layer_types": [*family.kinds, family.own]} if family.kinds else {})
    whole = build(family.like or name, num_hidden_layers=LAYERS + 1, model_type=name, **changes)
    whole.save_pretrained(folder)
    names, tensors = family.names, {}
    for key, value in load_file(folder / "model.safetensors").items():
        tensors[key.replace(f"model.layers.{LAYERS}.", f"{names['block']}.")] = value
    torch.manual_seed(3)
    for part in ("embedding_norm", "state_norm", "norm"):
        tensors[f"{names[part]}.weight"] = torch.rand(WIDTH) + 0.5
    tensors[f"{names['projection']}.weight"] = torch.randn(WIDTH, 2 * WIDTH) / 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(whole.config)
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None) is not None:
            setattr(config, kinds, getattr(config, kinds)[:LAYERS])
    config.num_hidden_layers, config.num_nextn_predict_layers = LAYERS, 1
    config.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    return model, whole


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    head, states = load_mtp(model), model.model(ids).last_hidden_state[:, :-1]
    embedded, places = model.get_input_embeddings()(ids[:, 1:]), torch.arange(1, ids.shape[1])[None]
    logits: torch.Tensor = model.lm_head(head(embedded, states, places))
    return logits


@torch.no_grad()
def by_hand(model: PreTrainedModel, whole: PreTrainedModel, folder: Path, name: str, ids: torch.Tensor) -> torch.Tensor:
    """The same logits from the file's norms and projection and the larger model's last layer."""
    names, weights = FAMILIES[name].names, load_file(folder / "model.safetensors")

    def normed(part: str, values: torch.Tensor) -> torch.Tensor:
        norm = type(model.model.norm)(WIDTH, eps=model.config.rms_norm_eps)
        norm.load_state_dict({"weight": weights[f"{names[part]}.weight"]})
        output: torch.Tensor = norm(values)
        return output

    states = normed("state_norm", model.model(ids).last_hidden_state[:, :-1])
    embedded = normed("embedding_norm", model.get_input_embeddings()(ids[:, 1:]))
    entered = torch.cat([embedded, states], -1) @ weights[f"{names['projection']}.weight"].T
    places = torch.arange(1, ids.shape[1])[None]
    s = entered.shape[1]
    ahead = torch.arange(s)[None] - torch.arange(s)[:, None]
    visible = (ahead <= 0) & (ahead > -(8 if FAMILIES[name].own == "sliding_attention" else s))
    mask = torch.zeros(s, s).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    more = (FAMILIES[name].own,) if name == "mellum" else ()
    rotary = whole.model.rotary_emb(entered, places.expand(3, 1, s) if name.startswith("qwen3_5") else places, *more)
    left = whole.model.layers[LAYERS](entered, attention_mask=mask, position_ids=places, position_embeddings=rotary)
    logits: torch.Tensor = model.lm_head(normed("norm", left[0] if isinstance(left, tuple) else left))
    return logits


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("deepseek_v3", "mellum", "qwen3_next") else pytest.mark.slow) for n in FAMILIES],
)
def test_layers_of_a_family(name: str, tmp_path: Path) -> None:
    """Logits are those of the definition."""
    model, whole = with_layer(name, tmp_path)
    ids = ROW["input_ids"]
    assert torch.allclose(own_logits(model, ids), by_hand(model, whole, tmp_path, name, ids), atol=1e-5)
    with unchanged(model):
        check_lossless(model, SelfSpec(MTP(), FixedLength(3)), 8)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "exaone_moe"])
def test_a_head_is_exported_as_the_models_own_checkpoint_has_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "deepseek_v3":
        monkeypatch.setitem(shipped._FORMATS, name, MtpFormat(state_first=True))
    model, _ = with_layer(name, tmp_path / "model")
    SelfSpec.mtp(load_mtp(model)).export_draft(tmp_path / "out", model)
    shipped_tensors = load_file(tmp_path / "model" / "model.safetensors")
    names = tuple(f"{begin}." for begin in FAMILIES[name].names.values())
    shipped_tensors = {key: value for key, value in shipped_tensors.items() if key.startswith(names)}
    exported = load_file(tmp_path / "out" / "model-mtp.safetensors")
    assert exported.keys() == shipped_tensors.keys()
    assert all(torch.equal(exported[key], value) for key, value in shipped_tensors.items())


def test_other_heads_are_no_draft_of_engines(tmp_path: Path) -> None:
    model = tiny_llama()
    for spec, words in (
        (SelfSpec.mtp(MtpHead.of(model)), "engines take MTP layers in the format"),
        (SelfSpec.mtp(), "cannot be exported.*from its own checkpoint"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            spec.export_draft(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def llama_with_layer(folder: Path, second: bool = False) -> PreTrainedModel:
    """A Llama with MTP layers under DeepSeek's names, as those of any type are looked for."""
    whole = tiny_llama(layers=LAYERS + 2, factor=0.5)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in (LAYERS, LAYERS + 1) if second else (LAYERS,):
        for part in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.{layer}.{part}.weight"] = torch.ones(64)
        tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.cat([torch.eye(64), torch.eye(64)], 1) / 2
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole.config.num_hidden_layers = LAYERS
    whole.config.save_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model


@pytest.mark.machine("verification_is_free")
def test_layers_are_loaded_once_and_freed_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by two threads; attached, they draft in every cascade."""
    model, loads = llama_with_layer(tmp_path, second=True), []
    assert check_lossless(model, SelfSpec(), 12, [ROW])[0].draft_steps == 0
    load = shipped.load_layers
    monkeypatch.setattr(shipped, "load_layers", lambda *args: loads.append(args) or load(*args))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(load_mtp, [model, model])
    for spec in (SelfSpec.mtp(), SelfSpec()):
        assert check_lossless(model, spec, 12, [ROW])[0].draft_steps > 0
    assert first is second is load_mtp(model)
    assert len(first.layers) == 2
    assert len(loads) == 1
    freed = weakref.ref(first)
    loads.clear()
    del first, second, model
    gc.collect()
    assert freed() is None


def test_layers_that_ship_do_not_replace_another_head(tmp_path: Path) -> None:
    """``MTP()`` drafts with them, and what was attached goes on to draft in every cascade."""
    model, _ = with_layer("deepseek_v3", tmp_path / "model")
    (tmp_path / "head").mkdir()
    published(tmp_path / "head", model, (1, 2))
    block = load_head(model, tmp_path / "head")
    for _ in range(2):
        assert check_lossless(model, SelfSpec(MTP(), FixedLength(2)), 4, [ROW])[0].draft_steps
        assert shipped.attached_head(model) is block
    assert shipped.shipped_mtp(model) is shipped.shipped_mtp(model)
    assert load_mtp(model) is shipped.attached_head(model)


def test_names_can_be_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_FORMATS", {})
    model = llama_with_layer(tmp_path)
    expected = own_logits(model, ROW["input_ids"])
    renamed, tensors = tmp_path / "renamed", load_file(tmp_path / "model.safetensors")
    model.save_pretrained(renamed)
    state_first = tensors["model.layers.4.eh_proj.weight"].chunk(2, 1)[::-1]
    tensors["model.layers.4.eh_proj.weight"] = torch.cat(state_first, 1)
    renamed_tensors = {key.replace("model.layers.4.", "next.0."): value for key, value in tensors.items()}
    save_file(renamed_tensors, renamed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match=r"there is no model\.layers\.4\.eh_proj\.weight"):
        load_mtp(model, renamed)
    names = {part: name.replace("model.layers.4", "next.{n}") for part, name in _DEEPSEEK.items()}
    names["block"] += "."
    with pytest.raises(SettingError, match=r"takes an MtpFormat, whose block has \{n\} or \{l\}"):
        hf_selfspec.register_mtp_format("llama", MtpFormat(block="mtp.block."))
    hf_selfspec.register_mtp_format("llama", MtpFormat(**names, state_first=True))
    load_mtp(model, renamed)
    assert torch.allclose(own_logits(model, ROW["input_ids"]), expected, atol=1e-6)


def test_what_has_no_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    with pytest.raises(SettingError, match="was not loaded from a checkpoint"):
        model.generate(**BATCH, max_new_tokens=4, assistant=SelfSpec(MTP()))
    with pytest.raises(SettingError, match=r"there is no model\.safetensors"):
        load_mtp(model, tmp_path)
    # A checkpoint without layers is looked at once.
    model.save_pretrained(tmp_path)
    model, loads = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), []
    load = shipped.load_layers
    monkeypatch.setattr(shipped, "load_layers", lambda *args: loads.append(args) or load(*args))
    for _ in range(2):
        with pytest.raises(
            SettingError, match=r"has no MTP layers of LlamaForCausalLM: there is no model\.layers\.6\.eh"
        ):
            model.generate(**ROW, max_new_tokens=4, assistant=SelfSpec(MTP()))
    assert len(loads) == 1
    freed = weakref.ref(model)
    loads.clear()
    del model
    gc.collect()
    assert freed() is None


_UP = "model.layers.4.mlp.up_proj"
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({f"{_UP}.bias": torch.ones(64)}, r"layers\.4\.mlp\.up_proj\.bias, for which LlamaForCausalLM has no"),
    ({f"{_UP}.weight": torch.full((2, 2), torch.nan)}, r"up_proj\.weight with values that are not"),
    ({f"{_UP}.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, r"up_proj\.weight in float8_e4m3fn"),
    ({f"{_UP}.weight": torch.ones(2, 2)}, r"up_proj\.weight of shape \[2, 2\], and the model takes"),
    ({"model.layers.4.enorm.weight": torch.ones(3)}, r"enorm\.weight of shape \[3\], and the model"),
)
INDEXES = {
    "{": r"index\.json was cut short",
    "[]": r"index\.json was cut short",
    '{"weight_map": {"a": 3}}': r"index\.json was cut short",
    '{"weight_map": {"a": "b.safetensors"}}': r"index\.json names b\.safetensors, which is not there",
}


def test_wrong_weights_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    model, file = llama_with_layer(tmp_path), tmp_path / "model.safetensors"
    tensors, content = load_file(file), file.read_bytes()
    for changes, message in WRONG:
        save_file(tensors | changes, file, metadata={"format": "pt"})
        with pytest.raises(SettingError, match=message):
            load_mtp(model)
    file.write_bytes(content[:-64])
    with pytest.raises(SettingError, match=r"model\.safetensors was cut short"):
        load_mtp(model)
    for index, message in INDEXES.items():
        (tmp_path / "model.safetensors.index.json").write_text(index, "utf-8")
        with pytest.raises(SettingError, match=message):
            load_mtp(model)
