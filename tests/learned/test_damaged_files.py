"""What comes from a file decides nothing but what it is for, and what goes into one is whole."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_selfspec import (
    Adapter,
    EarlyExit,
    EarlyExitAdapter,
    ExitReport,
    FixedLength,
    LinearProbe,
    SelfSpec,
)
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.learned.files import check_folder, folder_written_whole
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.tools.spec_text import read_spec
from hf_selfspec.train.prompts import texts

FILE = "selfspec.json"
SETTINGS = {"draft": {"class": "EarlyExit", "layer": 3}, "stop": None, "tree": None, "max_draft": 9}


def written(folder: Path, **settings: Any) -> Path:
    content = {"format": 1, "settings": SETTINGS | settings, "fingerprint": None, "findings": [], "text_id": ""}
    (folder / FILE).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache_dir": "/elsewhere"}, "it sets cache_dir, which a file cannot set. It may set draft, "),
        (
            {"draft": {"class": "SkipLayers", "search": {"class": "OnTheFlySearch", "folder": "/"}}},
            "it sets draft.search.folder, which a file cannot set. It may set context_window, max_steps",
        ),
        ({"draft": {"class": "FixedLength", "num_tokens": 3}}, "draft has the class 'FixedLength', which is not"),
        (
            {"stop": {"class": "ConfidenceThreshold", "confidence": {"class": "FixedLength", "num_tokens": 3}}},
            "stop.confidence has the class 'FixedLength', which is not allowed there",
        ),
        ({"max_draft": 10**6}, "max_draft. must be at most 1024, got 1000000"),
    ],
)
def test_settings_are_of_our_classes_where_they_belong(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=words) as error:
        SelfSpec.from_pretrained(written(tmp_path, **settings))
    assert str(tmp_path / FILE) in str(error.value)


@pytest.mark.parametrize("place", ["../adapter", "~/adapter", "https://example.com/a", None, r"\\a\b"], ids=repr)
def test_a_file_names_parts_by_path_or_on_the_hub(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(DraftModule, "load", classmethod(lambda cls, path: asked.append(path)))
    for draft in ({"class": "EarlyExitAdapter", "adapter": place}, {"class": "DynamicExit", "heads": place}):
        with pytest.raises(SettingError, match="neither the whole path of a folder nor the name of a repository"):
            SelfSpec.from_pretrained(written(tmp_path, draft=draft))
    assert not asked


def test_parts_that_were_saved_go_on_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Adapter(2, 64, 4).save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    spec = SelfSpec.kangaroo("adapter")
    spec.save_pretrained("kept")
    monkeypatch.chdir("/")
    loaded = SelfSpec.from_pretrained(tmp_path / "kept")
    assert isinstance(loaded.draft, EarlyExitAdapter)
    assert loaded.draft.adapter == str(tmp_path / "adapter")
    monkeypatch.setattr(DraftModule, "load", classmethod(lambda cls, path: Adapter(2, 64, 4)))
    for name in ("gpt2", "me/my-adapter.v2"):
        draft = {"class": "EarlyExitAdapter", "adapter": name}
        assert SelfSpec.from_pretrained(written(tmp_path, draft=draft)).draft.adapter == name


def test_numbers_and_nesting_that_no_file_of_ours_has(tmp_path: Path) -> None:
    text = (written(tmp_path, stop="HERE") / FILE).read_text()
    for value in ("[" * 600 + "]" * 600, '{"class":' * 300 + "1" + "}" * 300, "1" + "0" * 400, "NaN", "1e999"):
        (tmp_path / FILE).write_text(text.replace('"HERE"', value))
        with pytest.raises(SettingError, match=FILE):
            SelfSpec.from_pretrained(tmp_path)


def test_home_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the user's home in all that is written and read, and no folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    spec = SelfSpec(EarlyExit(3), FixedLength(3))
    spec.save_pretrained("~/spec")
    assert SelfSpec.from_pretrained("~/spec") == read_spec("~/spec") == spec
    Adapter(2, 64, 4).save_pretrained("~/adapter")
    assert Adapter.from_pretrained("~/adapter").exit_layer == 2
    draft = EarlyExitAdapter("~/adapter")
    assert draft.adapter == str(tmp_path / "home" / "adapter")
    (tmp_path / "home" / "text.txt").write_text("text")
    assert texts("~/text.txt") == ["text"]
    check_folder("--out", "~/spec", ["a.json"])
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"spec", "adapter", "text.txt"}
    assert not list((tmp_path / "here").iterdir())
    with pytest.raises(SettingError, match=r"~nobody-of-this-name/spec: .*home directory. Give the whole path"):
        spec.save_pretrained("~nobody-of-this-name/spec")


@pytest.mark.parametrize(
    ("part", "place"), [(SelfSpec(), "file/out"), (Adapter(2, 64, 4), "a" * 300)], ids=["settings", "adapter"]
)
def test_places_where_nothing_can_be_saved(part: Any, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"cannot be written .(Not a directory|File name too long)") as error:
        part.save_pretrained(tmp_path / place)
    assert str(tmp_path / place) in str(error.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("at", ["_save_pretrained", "generate_model_card"])
def test_a_full_disk_leaves_the_part_that_was_there(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = LinearProbe(2, 64)
    part.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["README.md", "config.json", "model.safetensors"]

    def full(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LinearProbe, at, full)
    with pytest.raises(SettingError, match=r"cannot be written \(No space left on device\)"):
        part.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_part_whose_saving_was_interrupted(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that was there, or none: never the settings of one with the weights of another."""
    first, second = (LinearProbe(2, 64, about={"recipe": {"number": number}}) for number in (1, 2))
    torch.nn.init.ones_(second.direction.weight)
    first.save_pretrained(tmp_path)
    replaced, replace = list[Path](), os.replace

    def interrupted(source: Path, target: Path) -> None:
        replaced.append(target)
        if len(replaced) == stop:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.save_pretrained(tmp_path)
    if stop == 3:
        with pytest.raises(SettingError, match=r"config\.json and model\.safetensors are not of one save"):
            LinearProbe.load(tmp_path)
    else:
        loaded = LinearProbe.load(tmp_path)
        assert (loaded.about, loaded.digest) == (first.about, first.digest)
    monkeypatch.undo()
    second.save_pretrained(tmp_path)
    assert LinearProbe.load(tmp_path).digest == second.digest != first.digest


def test_pictures_that_cannot_be_written(tmp_path: Path) -> None:
    plot: Any = ExitReport((2.0, 1.0), (0.5, 0.6), (0.7, 1.0), 10, "model").plot
    with pytest.raises(SettingError, match=r"nowhere/a\.png cannot be written .No such file or directory"):
        plot(str(tmp_path / "nowhere" / "a.png"))
    with pytest.raises(SettingTypeError, match=r"plot\(path\) must be a path or None, got 3"):
        plot(3)


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a.json").mkdir()
    places = {
        "file": "is a file. Name a folder",
        "file/a": "cannot be a folder .Not a directory",
        "a" * 300: "too long",
    }
    for place, words in places.items():
        with pytest.raises(SettingError, match=rf"--out {re.escape(str(tmp_path / place))}: .*{words}"):
            check_folder("--out", tmp_path / place)
    with pytest.raises(SettingError, match="--out is empty"):
        check_folder("--out", "")
    with pytest.raises(SettingError, match=r"a\.json is a folder there, but is to be a file"):
        check_folder("--out", tmp_path, ["b.json", "a.json"])
    check_folder("--out", tmp_path / "a" / "b", ["b.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "file"]


def test_folders_within_a_folder_are_written_whole(tmp_path: Path) -> None:
    """Tokenizers with several chat templates save a folder of these."""
    with folder_written_whole(tmp_path) as inside:
        (inside / "templates").mkdir()
        (inside / "templates" / "tools.jinja").write_text("a template")
    assert (tmp_path / "templates" / "tools.jinja").read_text() == "a template"
