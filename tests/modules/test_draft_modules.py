"""Parts of all kinds: they come back whole, are told apart, and load wherever a part is named."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import hf_selfspec
from helpers.blocks import published
from helpers.calls import check_lossless
from helpers.fitted import heads_of
from helpers.models import ROW, VOCABULARY, tiny_llama
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
from hf_selfspec.modules import draft_module
from hf_selfspec.modules.block import BlockHead
from hf_selfspec.modules.draft_module import DraftModule, about
from hf_selfspec.tools.methods import read_spec

MODEL = tiny_llama(8, factor=0.5)
# For each kind one part, the SelfSpec of its folder, and what drafts with it where it is attached to a model.
PARTS: dict[type[DraftModule], tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    Adapter: (
        lambda: Adapter(2, 64, 4, about=about(MODEL, {"steps": 3}, {})),
        SelfSpec.kangaroo,
        EarlyExitAdapter,
    ),
    BlockHead: (lambda: block(), lambda at: SelfSpec(Cascade([Lookup(), Block(at)])), Block),
    ExitHeads: (lambda: heads_of(MODEL, 0.5), SelfSpec.dssd, DynamicExit),
    LinearProbe: (lambda: LinearProbe(2, 64, True, about={"figures": None}), SelfSpec.adaspeed, None),
    MtpHead: (lambda: MtpHead.of(MODEL), SelfSpec.mtp, MTP),
    ReducedHead: (lambda: ReducedHead.of(range(9), VOCABULARY), None, None),  # type: ignore[dict-item]  # no preset
}


def block() -> BlockHead:
    with TemporaryDirectory() as folder:
        published(Path(folder), MODEL, (1, 3, 5))
        return BlockHead.load(folder)


@pytest.mark.parametrize("part_class", PARTS)
def test_any_part_is_loaded_anywhere(part_class: type[DraftModule], tmp_path: Path) -> None:
    """From its folder alone: by its class, as a part, for a command line, and attached to a model."""
    make, spec_of, source_class = PARTS[part_class]
    part, model = make(), copy.deepcopy(MODEL)
    part.save_pretrained(tmp_path)
    for loaded in (part_class.from_pretrained(tmp_path), DraftModule.load(tmp_path)):
        assert type(loaded) is part_class
        assert loaded.about == part.about
        assert not loaded.training
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in part.state_dict().items())
    other = next(kind for kind in PARTS if kind is not part_class)
    with pytest.raises(SettingError, match=f"holds no {other.kind}"):
        other.load(tmp_path)
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


def test_a_part_of_another_kind_is_named(tmp_path: Path) -> None:
    LinearProbe(2, 64).save_pretrained(tmp_path)
    for wrong in (EarlyExitAdapter, DynamicExit, Block, lambda at: EarlyExit(2, at), SelfSpec.mtp):
        with pytest.raises(SettingError, match=r"holds a saved probe, and takes a "):
            wrong(tmp_path)
    for place in ("a" * 300, str(tmp_path / "config.json"), "no/such-part", str(tmp_path / "none")):
        with pytest.raises(SettingError, match="there is no saved part at"):
            EarlyExitAdapter(place)


CASES: list[tuple[type[DraftModule], tuple[Any, ...], Any, str]] = [
    (Adapter, ("about",), "good", "cut short or changed"),
    (Adapter, ("colour",), "red", "colour"),
    (Adapter, ("hidden_size",), 128, r"cut short or changed .*size mismatch for .*\[64\].*\[128\]"),
    (Adapter, ("rope_theta",), "wide", "could not convert"),
    (Adapter, ("num_heads",), 5, "hidden_size must be a multiple of"),
    (Adapter, ("kind",), "probe", "that of 'probe'"),
    (ExitHeads, ("layers",), [3, 1], "exit layers from 1 on, in increasing order"),
    (LinearProbe, ("exit_layer",), None, "cut short or changed"),
]


@pytest.mark.parametrize(("part_class", "keys", "value", "words"), CASES)
def test_junk_in_config(
    part_class: type[DraftModule], keys: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    """One error at load, with the file and the field."""
    changed(tmp_path, PARTS[part_class][0](), keys, value)
    with pytest.raises(SettingError, match=words) as error:
        part_class.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def changed(folder: Path, part: DraftModule, keys: tuple[Any, ...], value: Any) -> None:
    """A saved part with one value of its config.json replaced."""
    part.save_pretrained(folder)
    content = inner = json.loads((folder / "config.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / "config.json").write_text(json.dumps(content))


def test_junk_in_a_calibration_is_one_error(tmp_path: Path) -> None:
    """Where its thresholds are read, before anything is generated; so is a fingerprint of another model."""
    heads = heads_of(MODEL, 0.5)
    for table, value in (("thresholds", {}), ("thresholds", {"entropy": [["x"]]}), ("acceptance", 3), ("metric", None)):
        changed(tmp_path, heads, ("about", "calibration", table), value)
        with pytest.raises(SettingError, match="is not one that calibrate_exit_heads has written"):
            SelfSpec.dssd(tmp_path)
    changed(tmp_path, PARTS[Adapter][0](), ("about", "fingerprint", "num_layers"), "6")
    with pytest.raises(SettingError, match="a whole number"):
        MODEL.generate(**ROW, max_new_tokens=3, assistant=SelfSpec.kangaroo(tmp_path))


def test_nothing_large_is_made_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights tell how large a part is before there is memory for what its settings want."""
    changed(tmp_path, PARTS[ExitHeads][0](), ("hidden_size",), 2**20)
    made: list[torch.Tensor] = []
    linear = torch.nn.Linear.__init__

    def watched(self: torch.nn.Linear, *args: Any, **options: Any) -> None:
        linear(self, *args, **options)
        made.append(self.weight)

    monkeypatch.setattr(torch.nn.Linear, "__init__", watched)
    with pytest.raises(SettingError, match="size mismatch for"):
        ExitHeads.load(tmp_path)
    assert made
    assert all(weight.is_meta for weight in made)


@pytest.mark.parametrize("inference", [False, True])
def test_names_tell_weights_apart(inference: bool) -> None:
    with torch.inference_mode(inference):
        part = PARTS[Adapter][0]()
        other = copy.deepcopy(part)
        assert repr(other) == repr(part)
        with torch.no_grad():
            other.load_state_dict({name: value + 1 for name, value in part.state_dict().items()})
        assert repr(other) != repr(part)
        other.load_state_dict(part.state_dict())
        assert repr(other) == repr(part)


def test_copies_on_other_devices_and_of_other_types_follow_the_weights() -> None:
    part, types = PARTS[Adapter][0](), (torch.float64, torch.bfloat16)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert part.on(meta) is part.on(meta) is not part.on(cpu) is part
    assert (part.norm.weight.is_meta, part.on(meta).norm.weight.is_meta) == (False, True)
    first = [part.on(cpu, dtype) for dtype in types]
    assert all(part.on(cpu, dtype) is copied for dtype, copied in zip(types, first, strict=True))
    with torch.no_grad():
        part.output.weight.fill_(2.0)  # the last of its parameters, in place
    assert {part.on(cpu, dtype).output.weight.mean().item() for dtype in types} == {2.0}
    part.output.weight.data = torch.full_like(part.output.weight, 3.0)
    assert {part.on(cpu, dtype).output.weight.mean().item() for dtype in types} == {3.0}
    part.load_state_dict({name: torch.ones_like(value) for name, value in part.state_dict().items()}, assign=True)
    assert {part.on(cpu, dtype).output.weight.mean().item() for dtype in types} == {1.0}


def test_a_variant_without_a_kind_of_its_own_loads_nothing_else(tmp_path: Path) -> None:
    PARTS[Adapter][0]().save_pretrained(tmp_path)

    class Variant(Adapter):
        def __init__(self) -> None:
            super().__init__(2, 64, 4)

    assert type(DraftModule.load(tmp_path)) is Adapter


def test_a_cascade_of_parts_that_differ_in_weights() -> None:
    source, other = (EarlyExitAdapter(Adapter(2, 64, 4)) for _ in range(2))
    assert len(Cascade([Lookup(), source, other]).sources) == 3
    with pytest.raises(SettingError, match="one Lookup and different others"):
        Cascade([Lookup(), source, source])


LATE = """
from hf_selfspec.modules.draft_module import DraftModule


class Late(DraftModule):
    kind = "late"
"""


def test_a_public_part_is_loaded_before_anything_has_used_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its export is all that loading by its kind needs."""
    monkeypatch.setattr(draft_module, "_formats", list(draft_module._formats))
    (tmp_path / "late_part.py").write_text(LATE)
    (tmp_path / "config.json").write_text('{"kind": "late"}')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match="import the module that defines it"):
        DraftModule.load(tmp_path)
    monkeypatch.setitem(hf_selfspec._MODULES, "Late", "late_part")
    monkeypatch.setattr(hf_selfspec, "__all__", [*hf_selfspec.__all__, "Late"])
    try:
        with pytest.raises(SettingError, match="give a folder that holds a saved late"):  # there are no weights
            DraftModule.load(tmp_path)
    finally:
        vars(hf_selfspec).pop("Late", None)
        sys.modules.pop("late_part", None)
