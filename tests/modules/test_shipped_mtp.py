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
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_selfspec
from helpers.architectures import build
from helpers.calls import check_lossless, unchanged
from helpers.fitted import adapter_of, mtp_of
from helpers.models import BATCH, ROW, tiny_llama
from hf_selfspec import MTP, FixedLength, MtpFormat, SelfSpec, SettingError, load_head, load_mtp
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
    "llama": Family(_DEEPSEEK),  # as those of any type are looked for
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


def with_layers(name: str, folder: Path, count: int = 1) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A checkpoint of four layers with MTP layers, loaded, and the model whose further layers are those of the MTP
    layers, of which it was made: so expert weights and all else are saved as the model's own are."""
    family = FAMILIES[name]
    changes = family.changes | ({"layer_types": [*family.kinds, family.own]} if family.kinds else {})
    whole = build(family.like or name, num_hidden_layers=LAYERS + count, model_type=name, **changes)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {key.replace(f"model.layers.{LAYERS}.", f"{family.names['block']}."): tensors[key] for key in tensors}
    torch.manual_seed(3)
    for layer in range(LAYERS, LAYERS + count):
        names = {
            part: at.replace(f"model.layers.{LAYERS}", f"model.layers.{layer}") for part, at in family.names.items()
        }
        for part in ("embedding_norm", "state_norm", "norm"):
            tensors[f"{names[part]}.weight"] = torch.rand(WIDTH) + 0.5
        tensors[f"{names['projection']}.weight"] = torch.randn(WIDTH, 2 * WIDTH) / 8
        if name == "llama":  # some have copies of the model's own
            tensors[f"{names['block']}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(whole.config)
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None) is not None:
            setattr(config, kinds, getattr(config, kinds)[:LAYERS])
    config.num_hidden_layers, config.num_nextn_predict_layers = LAYERS, count
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

    def normed(part: str, values: torch.Tensor) -> Any:
        return functional_call(model.model.norm, {"weight": weights[f"{names[part]}.weight"]}, values)

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


@pytest.mark.every_run("deepseek_v3|exaone_moe|llama|mellum|qwen3_next")
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_a_family(name: str, tmp_path: Path) -> None:
    """Logits are those of the definition."""
    model, whole = with_layers(name, tmp_path / "model")
    ids = ROW["input_ids"]
    assert torch.allclose(own_logits(model, ids), by_hand(model, whole, tmp_path / "model", name, ids), atol=1e-5)
    with unchanged(model):
        check_lossless(model, SelfSpec(MTP(), FixedLength(3)), 8)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints whose layers are read."""
    load, found = shipped.load_layers, list[str]()
    monkeypatch.setattr(shipped, "load_layers", lambda model, *how: found.append(how[0]) or load(model, *how))
    return found


@pytest.mark.machine("verification_is_free")
def test_layers_are_loaded_once_and_freed_with_the_model(tmp_path: Path, loads: list[str]) -> None:
    """Also by two threads; attached, they draft in every cascade."""
    model, _ = with_layers("llama", tmp_path, 2)
    assert check_lossless(model, SelfSpec(), 12, [ROW])[0].draft_steps == 0
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(load_mtp, [model, model])
    for spec in (SelfSpec.mtp(), SelfSpec()):
        assert check_lossless(model, spec, 12, [ROW])[0].draft_steps > 0
    assert first is second is load_mtp(model)
    assert (len(first.layers), len(loads)) == (2, 1)
    freed = weakref.ref(first)
    del first, second, model
    gc.collect()
    assert freed() is None


def test_layers_that_ship_do_not_replace_another_head(tmp_path: Path) -> None:
    """``MTP()`` drafts with them, and what was attached goes on to draft in every cascade."""
    model, _ = with_layers("llama", tmp_path)
    shipped.attach(model, adapter := adapter_of(model))
    for _ in range(2):
        assert check_lossless(model, SelfSpec(MTP(), FixedLength(2)), 4, [ROW])[0].draft_steps
        assert shipped.attached_head(model) is adapter
    assert shipped.shipped_mtp(model) is shipped.shipped_mtp(model)
    assert load_mtp(model) is shipped.attached_head(model)


def test_a_layer_of_speculators(tmp_path: Path) -> None:
    """It is attached with the weights that its checkpoint names as speculators 0.9 does, and drafts."""
    model, head = build("qwen3"), mtp_of(build("qwen3"))
    names = {"embedding_norm": "token_layernorm", "state_norm": "hidden_layernorm", "projection": "input_proj"}
    names |= {"decoder.norm": "final_layernorm", "decoder.layers.0": ""}
    tensors = dict[str, torch.Tensor]()
    for key, value in head.layers[0].state_dict().items():
        part = max((name for name in names if key.startswith(f"{name}.")), key=len)
        tensors[".".join(filter(None, ("mtp_layers.0", names[part], key[len(part) + 1 :])))] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}')
    kept, loaded = head.state_dict(), load_head(model, tmp_path).state_dict()
    assert kept.keys() == loaded.keys()
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)
    check_lossless(model, SelfSpec(), 8)


def test_names_can_be_registered(tmp_path: Path) -> None:
    """Whose projection takes the state first here."""
    model, _ = with_layers("llama", tmp_path)
    expected, tensors = own_logits(model, ROW["input_ids"]), load_file(tmp_path / "model.safetensors")
    tensors = {key.replace("model.layers.4.", "next.0."): value for key, value in tensors.items()}
    tensors["next.0.eh_proj.weight"] = torch.cat(tensors["next.0.eh_proj.weight"].chunk(2, 1)[::-1], 1)
    (tmp_path / "out").mkdir()
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    names = {part: name.replace("model.layers.4", "next.{n}") for part, name in _DEEPSEEK.items()}
    names["block"] += "."
    with pytest.raises(SettingError, match=r"takes an MtpFormat, whose block has \{n\} or \{l\}"):
        hf_selfspec.register_mtp_format("llama", MtpFormat(block="mtp.block."))
    try:
        hf_selfspec.register_mtp_format("llama", MtpFormat(**names, state_first=True))
        load_mtp(model, tmp_path / "out")
        assert torch.allclose(own_logits(model, ROW["input_ids"]), expected, atol=1e-6)
    finally:
        hf_selfspec.register_mtp_format("llama", MtpFormat())
    with pytest.raises(SettingError, match=r"there is no model\.layers\.4\.eh_proj\.weight"):
        load_mtp(model, tmp_path / "out")


def test_what_has_no_layers_is_refused(tmp_path: Path, loads: list[str]) -> None:
    """It is looked at once, and freed like others."""
    model = tiny_llama()
    with pytest.raises(SettingError, match="was not loaded from a checkpoint"):
        model.generate(**BATCH, max_new_tokens=4, assistant=SelfSpec(MTP()))
    with pytest.raises(SettingError, match=r"there is no model\.safetensors"):
        load_mtp(model, tmp_path)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    words = r"has no MTP layers of LlamaForCausalLM: there is no model\.layers\.6\.eh"
    for _ in range(2):
        with pytest.raises(SettingError, match=words):
            model.generate(**ROW, max_new_tokens=4, assistant=SelfSpec(MTP()))
    assert loads == [str(tmp_path)] * 2
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


_UP, _INDEX = "model.layers.4.mlp.up_proj", "model.safetensors.index.json"
# Tensors that a checkpoint has in place of its own, or what its index says, and what is told of it.
WRONG: tuple[tuple[dict[str, torch.Tensor] | str, str], ...] = (
    ({f"{_UP}.bias": torch.ones(64)}, r"layers\.4\.mlp\.up_proj\.bias, for which LlamaForCausalLM has no"),
    ({f"{_UP}.weight": torch.full((2, 2), torch.nan)}, r"up_proj\.weight with values that are not"),
    ({f"{_UP}.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, r"up_proj\.weight in float8_e4m3fn"),
    ({f"{_UP}.weight": torch.ones(2, 2)}, r"up_proj\.weight of shape \[2, 2\], and the model takes"),
    ({"model.layers.4.enorm.weight": torch.ones(3)}, r"enorm\.weight of shape \[3\], and the model"),
    ("{", r"index\.json was cut short"),
    ("[]", r"index\.json was cut short"),
    ('{"weight_map": {"a": 3}}', r"index\.json was cut short"),
    ('{"weight_map": {"a": "b.safetensors"}}', r"index\.json names b\.safetensors, which is not there"),
)


def test_wrong_weights_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    (model, _), file = with_layers("llama", tmp_path), tmp_path / "model.safetensors"
    tensors, content = load_file(file), file.read_bytes()
    file.write_bytes(content[:-64])
    with pytest.raises(SettingError, match=r"model\.safetensors was cut short"):
        load_mtp(model)
    for wrong, message in WRONG:
        if isinstance(wrong, str):
            (tmp_path / _INDEX).write_text(wrong, "utf-8")
        else:
            save_file(tensors | wrong, file, metadata={"format": "pt"})
        with pytest.raises(SettingError, match=message):
            load_mtp(model)
