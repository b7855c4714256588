"""Parts that come from files, or are built, with settings that are none."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from helpers.models import VOCABULARY, tiny_llama
from hf_selfspec import (
    Adapter,
    Cascade,
    EarlyExitAdapter,
    ExitHeads,
    LinearProbe,
    Lookup,
    SettingError,
)
from hf_selfspec.modules.draft_module import DraftModule, about

CALIBRATION = {
    "metric": "entropy",
    "epsilons": [0.5, 0.9],
    "tokens": 40,
    "thresholds": {
        "entropy": [[-1.0, None], [-2.5, -0.1]],
        "probability": [[0.2, 0.4], [0.6, 0.7]],
        "margin": [[0.1, 0.2], [0.3, None]],
    },
    "acceptance": {"entropy": [0.6, None], "probability": [None, None], "margin": [0.5, 0.95]},
    "auc": {"entropy": [0.7, None], "probability": [0.6, 0.5], "margin": [0.8, 0.9]},
}
PARTS: dict[type[DraftModule], Callable[[], DraftModule]] = {
    Adapter: lambda: Adapter(2, 64, 4, about=about(tiny_llama(), {"steps": 3}, {"last loss": 1.5})),
    ExitHeads: lambda: ExitHeads([1, 3], 64, VOCABULARY, about={"calibration": CALIBRATION}),
    LinearProbe: lambda: LinearProbe(2, 64, True, about={"figures": None}),
}


def changed(folder: Path, part: DraftModule, keys: tuple[Any, ...], value: Any) -> Path:
    """A saved part with one value of its config.json replaced."""
    part.save_pretrained(folder)
    content = inner = json.loads((folder / "config.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


CASES: list[tuple[type[DraftModule], tuple[Any, ...], Any, str]] = [
    (Adapter, ("about", "figures"), "good", r"Adapter\(about\)\['figures'\] must be a dict"),
    (Adapter, ("about", "fingerprint", "num_layers"), "6", r"\['fingerprint'\] must have .* a whole number"),
    (Adapter, ("colour",), "red", "colour"),
    (Adapter, ("hidden_size",), 128, r"cut short or changed .*size mismatch for .*\[64\].*\[128\]"),
    (Adapter, ("rope_theta",), math.nan, "config.json .*a number that is not finite"),
    (Adapter, ("num_heads",), 5, "hidden_size must be a multiple of"),
    (ExitHeads, ("layers",), [3, 1], "exit layers from 1 on, in increasing order"),
    (ExitHeads, ("about", "calibration", "thresholds", "entropy", 1, 0), "x", r"\['calibration'\] is not one that"),
    (LinearProbe, ("do_sample",), "yes", r"LinearProbe\(do_sample\) must be True or False, got 'yes'"),
]


@pytest.mark.parametrize(("module_class", "keys", "value", "words"), CASES)
def test_junk_in_config(
    module_class: type[DraftModule], keys: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    """One error at load, with the file and the field."""
    changed(tmp_path, PARTS[module_class](), keys, value)
    with pytest.raises(SettingError, match=words) as error:
        module_class.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_damaged_files(tmp_path: Path) -> None:
    PARTS[Adapter]().save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["norm.weight"][3] = float("nan")
    for file, content, words in (
        (weights, weights.read_bytes()[:200], "cut short or changed"),
        (weights, save(tensors), "weights that are not finite: norm.weight"),
        (config, b'{"exit_layer": 2,', "holds no saved adapter"),
        (config, b"[" * 600, "holds no saved adapter"),
    ):
        before = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(SettingError, match=words):
            Adapter.load(tmp_path)
        file.write_bytes(before)
    for place in ("a" * 300, str(config), "no/such-part", str(tmp_path / "none")):
        with pytest.raises(SettingError, match="there is no saved adapter at"):
            Adapter.load(place)


def test_nothing_large_is_made_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights tell how large a part is before there is memory for what its settings want."""
    changed(tmp_path, PARTS[ExitHeads](), ("hidden_size",), 2**20)
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


@pytest.mark.parametrize("module_class", PARTS)
def test_parts_come_back(module_class: type[DraftModule], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = PARTS[module_class]()
    torch.nn.init.normal_(next(part.parameters()))
    part.save_pretrained(tmp_path)
    loaded = module_class.from_pretrained(tmp_path)
    assert loaded.about == part.about
    assert not loaded.training
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in part.state_dict().items())
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("inference", [False, True])
def test_names_tell_weights_apart(inference: bool) -> None:
    with torch.inference_mode(inference):
        part = PARTS[Adapter]()
        other = copy.deepcopy(part)
        assert repr(other) == repr(part)
        with torch.no_grad():
            other.load_state_dict({name: value + 1 for name, value in part.state_dict().items()})
        assert repr(other) != repr(part)
        other.load_state_dict(part.state_dict())
        assert repr(other) == repr(part)


def test_parts_are_copied_to_a_device_once() -> None:
    part, other = PARTS[Adapter](), torch.device("meta")
    copied = part.on(other)
    assert copied is part.on(other) is not part.on(torch.device("cpu")) is part
    assert (part.norm.weight.is_meta, copied.norm.weight.is_meta) == (False, True)
    part.forget_copies()  # which do not follow its weights
    assert part.on(other) is not copied


def test_a_cascade_of_parts_that_differ_in_weights() -> None:
    source, other = (EarlyExitAdapter(Adapter(2, 64, 4)) for _ in range(2))
    assert len(Cascade([Lookup(), source, other]).sources) == 3
    with pytest.raises(SettingError, match="one Lookup and different others"):
        Cascade([Lookup(), source, source])
