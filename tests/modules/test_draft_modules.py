"""Parts of all kinds: they come back whole, are told apart, and load wherever a part is named."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.blocks import block_of
from helpers.calls import check_lossless
from helpers.fitted import heads_of
from helpers.models import ROW, VOCABULARY, tiny_llama
from helpers.processes import python
from hf_selfspec import (
    MTP,
    Adapter,
    Block,
    Cascade,
    DynamicExit,
    EarlyExit,
    EarlyExitAdapter,
    ExitHeads,
    LinearProbe,
    Lookup,
    MtpHead,
    ReducedHead,
    SelfSpec,
    SettingError,
    load_head,
)
from hf_selfspec.drafts.attached import source_of
from hf_selfspec.modules.block import BlockHead
from hf_selfspec.modules.draft_module import DraftModule, about
from hf_selfspec.tools.methods import read_spec

MODEL = tiny_llama(8, factor=0.5)
# For each kind one part, the SelfSpec of its folder, and what drafts with it where it is attached to a model.
PARTS: dict[type[DraftModule], tuple[Callable[[], Any], Any, Any]] = {
    Adapter: (lambda: Adapter(2, 64, 4, about=about(MODEL, {"steps": 3}, {})), SelfSpec.kangaroo, EarlyExitAdapter),
    BlockHead: (lambda: block_of(MODEL), lambda at: SelfSpec(Cascade([Lookup(), Block(at)])), Block),
    ExitHeads: (lambda: heads_of(MODEL, 0.5), SelfSpec.dssd, DynamicExit),
    LinearProbe: (
        lambda: LinearProbe(2, 64, about={"figures": None}),
        lambda at: SelfSpec.adaspeed(probe=at),
        None,
    ),
    MtpHead: (lambda: MtpHead.of(MODEL), SelfSpec.mtp, MTP),
    ReducedHead: (lambda: ReducedHead.of(range(9), VOCABULARY), None, None),  # no preset
}


@pytest.mark.parametrize("part_class", PARTS)
def test_any_part_is_loaded_anywhere(part_class: type[DraftModule], tmp_path: Path) -> None:
    """From its folder alone: by its class, as a part, for a command line, and attached to a model."""
    make, spec_of, source_class = PARTS[part_class]
    part, model = make(), copy.deepcopy(MODEL)
    part.save_pretrained(tmp_path)
    for loaded in (part_class.from_pretrained(tmp_path), DraftModule.from_pretrained(tmp_path)):
        assert type(loaded) is part_class
        assert loaded.about == part.about
        assert not loaded.training
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in part.state_dict().items())
    other = next(kind for kind in PARTS if kind is not part_class)
    with pytest.raises(SettingError, match=f"holds no {other.kind}"):
        other.from_pretrained(tmp_path)
    if spec_of is None:
        with pytest.raises(SettingError, match=r"holds a reduced head.*write SelfSpec\(EarlyExit\(8, "):
            read_spec(str(tmp_path))
    else:
        assert repr(read_spec(str(tmp_path))) == repr(spec_of(str(tmp_path)))
    if part_class in (LinearProbe, ReducedHead):
        with pytest.raises(SettingError, match=f"a {part_class.kind} drafts by itself for no model"):
            load_head(model, tmp_path)
    else:
        head = load_head(model, tmp_path)
        assert isinstance(source_of(head), source_class)
        check_lossless(model, SelfSpec(), 12, [ROW])
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_what_is_no_such_part_is_named(tmp_path: Path) -> None:
    LinearProbe(2, 64).save_pretrained(tmp_path)
    for wrong in (EarlyExitAdapter, DynamicExit, Block, lambda at: EarlyExit(2, at), SelfSpec.mtp):
        with pytest.raises(SettingError, match=r"holds a saved probe, and takes a "):
            wrong(tmp_path)
    for place in ("a" * 300, str(tmp_path / "config.json"), "no/such-part", str(tmp_path / "none")):
        with pytest.raises(SettingError, match="there is no saved part at"):
            EarlyExitAdapter(place)
    (tmp_path / "config.json").write_text('{"kind": "late"}')
    with pytest.raises(SettingError, match="import the module that defines it"):
        DraftModule.from_pretrained(tmp_path)


NOT_CALIBRATED = "is not one that fit_exit_heads has written"
CASES: list[tuple[type[DraftModule], tuple[str, ...], Any, str]] = [
    (Adapter, ("about",), "good", "cut short or changed"),
    (Adapter, ("colour",), "red", "colour"),
    (Adapter, ("hidden_size",), 128, r"cut short or changed .*size mismatch for .*\[64\].*\[128\]"),
    (Adapter, ("rope_theta",), "wide", "could not convert"),
    (Adapter, ("num_heads",), 5, "hidden_size must be a multiple of"),
    (Adapter, ("kind",), "probe", "that of 'probe'"),
    (ExitHeads, ("layers",), [3, 1], "exit layers from 1 on, in increasing order"),
    (ExitHeads, ("hidden_size",), 2**40, "size mismatch for"),  # before there is memory for it
    (LinearProbe, ("exit_layer",), None, "cut short or changed"),
    # These are read before anything is generated.
    (ExitHeads, ("about", "calibration", "thresholds"), {}, NOT_CALIBRATED),
    (ExitHeads, ("about", "calibration", "thresholds"), [["x"]], NOT_CALIBRATED),
    (ExitHeads, ("about", "calibration", "acceptance"), 3, NOT_CALIBRATED),
    (Adapter, ("about", "fingerprint", "num_layers"), "6", "a whole number"),
]


@pytest.mark.parametrize(("part_class", "keys", "value", "words"), CASES)
def test_junk_in_config(
    part_class: type[DraftModule], keys: tuple[str, ...], value: Any, words: str, tmp_path: Path
) -> None:
    """One error, with the file and the field."""
    make, spec_of, _ = PARTS[part_class]
    make().save_pretrained(tmp_path)
    content = inner = json.loads((tmp_path / "config.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    if len(keys) > 1:
        with pytest.raises(SettingError, match=words):
            MODEL.generate(**ROW, max_new_tokens=3, assistant=spec_of(tmp_path))
    else:
        with pytest.raises(SettingError, match=words) as error:
            part_class.from_pretrained(tmp_path)
        assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("inference", [False, True])
def test_names_tell_weights_apart(inference: bool) -> None:
    with torch.inference_mode(inference):
        part = PARTS[Adapter][0]()
        other = copy.deepcopy(part)
        assert repr(other) == repr(part)
        with pytest.raises(SettingError, match="one Lookup and different others"):
            Cascade([Lookup(), EarlyExitAdapter(part), EarlyExitAdapter(other)])
        with torch.no_grad():
            other.load_state_dict({name: value + 1 for name, value in part.state_dict().items()})
        assert repr(other) != repr(part)
        assert len(Cascade([Lookup(), EarlyExitAdapter(part), EarlyExitAdapter(other)]).sources) == 3
        other.load_state_dict(part.state_dict())
        assert repr(other) == repr(part)


def test_copies_on_other_devices_and_of_other_types_follow_the_weights() -> None:
    part, types = PARTS[Adapter][0](), (torch.float64, torch.bfloat16)
    cpu, meta, last = torch.device("cpu"), torch.device("meta"), part.output.weight
    assert part.on(meta) is part.on(meta) is not part.on(cpu) is part
    assert (part.norm.weight.is_meta, part.on(meta).norm.weight.is_meta) == (False, True)
    first = [part.on(cpu, dtype) for dtype in types]
    assert all(part.on(cpu, dtype) is copied for dtype, copied in zip(types, first, strict=True))
    with torch.no_grad():
        last.fill_(2.0)
    assert {part.on(cpu, dtype).output.weight.mean().item() for dtype in types} == {2.0}
    last.data = torch.full_like(last, 3.0)
    assert {part.on(cpu, dtype).output.weight.mean().item() for dtype in types} == {3.0}
    part.load_state_dict({name: torch.ones_like(value) for name, value in part.state_dict().items()}, assign=True)
    assert {part.on(cpu, dtype).output.weight.mean().item() for dtype in types} == {1.0}


LOADED = """
import sys
from hf_selfspec.modules.draft_module import DraftModule
assert "hf_selfspec.modules.linear_probe" not in sys.modules
print(type(DraftModule.from_pretrained(sys.argv[1])).__name__)
"""


def test_what_a_kind_loads(tmp_path: Path) -> None:
    """Its own class, before anything has used that, and where one that is derived from it has no kind of its own."""
    LinearProbe(2, 64).save_pretrained(tmp_path)
    assert python("-c", LOADED, tmp_path).stdout.split() == ["LinearProbe"]
    type("Variant", (LinearProbe,), {})
    assert type(DraftModule.from_pretrained(tmp_path)) is LinearProbe
