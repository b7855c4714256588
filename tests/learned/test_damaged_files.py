"""What comes from a file decides nothing but what it is for, and what goes into one is whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import (
    Adapter,
    EarlyExit,
    EarlyExitAdapter,
    ExitHeads,
    ExitReport,
    FixedLength,
    LinearProbe,
    SelfSpec,
    SettingError,
    SettingTypeError,
)
from hf_selfspec.cli.spec_text import read_spec
from hf_selfspec.data.texts import texts
from hf_selfspec.learned.files import check_folder, folder_written_whole
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.search.tuning import PROGRESS_NAME, tune
from hf_selfspec.train.fit_trainer import checkpoints_of
from hf_selfspec.train.frozen_model import FrozenModel

FILE = "selfspec.json"
SETTINGS = {"draft": {"class": "EarlyExit", "layer": 3}, "stop": None, "tree": None, "max_draft": 9}


def written(folder: Path, **settings: Any) -> Path:
    """A saved SelfSpec with these settings changed."""
    content = {"format": 1, "settings": SETTINGS | settings, "fingerprint": None, "findings": []}
    (folder / FILE).write_text(json.dumps(content))
    return folder


# What a file may set --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cache_dir", "task"])
def test_a_file_does_not_choose_where_findings_are_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"{FILE}: it sets {name}, which a file cannot set. It may set draft, "):
        SelfSpec.from_pretrained(written(tmp_path, **{name: str(tmp_path / "elsewhere")}))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft": {"class": "EarlyExit", "layer": 3, "cache_dir": "/"}}, "it sets draft.cache_dir, which a file"),
        (
            {"draft": {"class": "SkipLayers", "search": {"class": "ClosestLayers", "folder": "/"}}},
            "it sets draft.search.folder, which a file cannot set. It may set context_window, max_steps",
        ),
        ({"draft": {"class": "FixedLength", "num_tokens": 3}}, "draft has the class 'FixedLength', which is not"),
        ({"draft": {"class": ["EarlyExit"]}}, "draft has the class .'EarlyExit'., which is not allowed there"),
        (
            {"stop": {"class": "ConfidenceThreshold", "confidence": {"class": "FixedLength", "num_tokens": 3}}},
            "stop.confidence has the class 'FixedLength', which is not allowed there",
        ),
        ({"max_draft": 10**6}, "max_draft. must be at most 1024, got 1000000"),
        ({"tree": {"class": "TopKTree", "widths": [[1.0, 10**7]]}}, "k must be at most 256, got 10000000"),
    ],
)
def test_settings_are_of_our_classes_where_they_belong(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=words) as error:
        SelfSpec.from_pretrained(written(tmp_path, **settings))
    assert str(tmp_path / FILE) in str(error.value)


@pytest.mark.parametrize(
    "place", ["../adapter", "~/adapter", "https://example.com/a", None, r"\\a\b", r"/\a\b"], ids=repr
)
def test_a_file_names_parts_by_their_whole_path_or_on_the_hub(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(DraftModule, "load", classmethod(lambda cls, path: asked.append(path)))
    drafts = [{"class": "EarlyExitAdapter", "adapter": place}, {"class": "DynamicExit", "heads": place}]
    if place is not None:  # drafts have the whole head then
        drafts.append({"class": "EarlyExit", "layer": 2, "head": place})
    for draft in drafts:
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
        content = json.loads((tmp_path / "kept" / FILE).read_text())
        content["settings"]["draft"]["adapter"] = name
        (tmp_path / FILE).write_text(json.dumps(content))
        assert SelfSpec.from_pretrained(tmp_path).draft.adapter == name


@pytest.mark.parametrize("place", ["settings", "findings"])
def test_numbers_and_nesting_that_no_file_of_ours_has(place: str, tmp_path: Path) -> None:
    findings = [{"do_sample": False, "several_rows": False, "state": {"costs": "HERE"}}]
    settings = SETTINGS | ({"stop": "HERE"} if place == "settings" else {})
    content = {"format": 1, "settings": settings, "fingerprint": None}
    text = json.dumps(content | {"findings": findings if place == "findings" else []})
    deep = "[" * 600 + "]" * 600, '{"class":' * 300 + "1" + "}" * 300
    for value in (*deep, "1" + "0" * 400, "NaN", "1e999"):
        (tmp_path / FILE).write_text(text.replace('"HERE"', value))
        with pytest.raises(SettingError, match=r"cut short or changed .it (is nested too deeply|has a number that)"):
            SelfSpec.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fingerprint", "words"),
    [
        ({"num_layers": "many"}, "fingerprint.num_layers must be a whole number"),
        ({"weights": 1.5}, "fingerprint.weights must be a text"),
        ({"more": 1}, "fingerprint has an unknown field 'more'"),
    ],
)
def test_fingerprints_that_are_none(fingerprint: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = json.loads((written(tmp_path) / FILE).read_text())
    usual = {"model": "LlamaForCausalLM", "num_layers": 6, "shapes": "a", "weights": None}
    (tmp_path / FILE).write_text(json.dumps(content | {"fingerprint": usual | fingerprint}))
    with pytest.raises(SettingError, match=words) as error:
        SelfSpec.from_pretrained(tmp_path)
    assert str(tmp_path / FILE) in str(error.value)


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
    FrozenModel(tiny_llama(), (2,), "~/states")
    (tmp_path / "home" / "text.txt").write_text("text")
    assert texts("~/text.txt") == ["text"]
    check_folder("--out", "~/spec", ["a.json"])
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"spec", "adapter", "states", "text.txt"}
    assert not list((tmp_path / "here").iterdir())
    with pytest.raises(SettingError, match=r"~nobody-of-this-name/spec: .*home directory. Give the whole path"):
        spec.save_pretrained("~nobody-of-this-name/spec")


# What cannot be written -----------------------------------------------------------------------------------------------


def as_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "out"


def too_long(folder: Path) -> Path:
    return folder / ("a" * 300)


PLACES = {"inside a file": as_file, "too long": too_long}
SAVED: dict[str, Callable[[], Any]] = {
    "settings": lambda: SelfSpec(),
    "adapter": lambda: Adapter(2, 64, 4),
    "heads": lambda: ExitHeads([2], 64, 97),
    "probe": lambda: LinearProbe(2, 64),
}


@pytest.mark.parametrize(("what", "place"), [("settings", "inside a file"), ("adapter", "too long")])
def test_places_where_nothing_can_be_saved(what: str, place: str, tmp_path: Path) -> None:
    folder = PLACES[place](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingError, match=r"cannot be written .(Not a directory|File name too long)") as error:
        SAVED[what]().save_pretrained(folder)
    assert str(folder) in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("what", "at"), [("heads", "_save_pretrained"), ("probe", "generate_model_card")])
def test_a_full_disk_leaves_the_part_that_was_there(
    what: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = SAVED[what]()
    part.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["README.md", "config.json", "model.safetensors"]

    def full(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(part), at, full)
        with pytest.raises(SettingError, match=r"cannot be written \(No space left on device\)"):
            part.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    part.about = {"recipe": {"tokens": 3}}
    part.save_pretrained(tmp_path)
    assert "- tokens: 3" in (tmp_path / "README.md").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to /dev/full, which this system has not")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are written to where there is no room."""
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode, **options: opened(Path("/dev/full"), "w", **options))
    with pytest.raises(SettingError, match=r"selfspec\.json cannot be written \(No space left on device\)"):
        SelfSpec().save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_states_and_steps_that_cannot_be_kept(tmp_path: Path) -> None:
    model, folder = tiny_llama(), as_file(tmp_path)
    with pytest.raises(SettingError, match="cannot be written"):
        FrozenModel(model, (2,), folder)
    (tmp_path / PROGRESS_NAME).write_text("[" * 600)
    with pytest.raises(SettingError, match=rf"{PROGRESS_NAME} was cut short or changed"):
        tune(model, lambda text, **_: {"input_ids": [3, 4, 5]}, ["a"], folder=tmp_path)
    with pytest.raises(SettingError, match=r"cannot be written|cut short"):
        tune(model, lambda text, **_: {"input_ids": [3, 4, 5]}, ["a"], folder=folder, max_new_tokens=1)


# Pictures -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plots() -> list[Callable[[Any], Any]]:
    spec = SelfSpec(EarlyExit(3), FixedLength(2))
    tiny_llama().generate(**ragged_batch((6,)), max_new_tokens=6, do_sample=False, assistant=spec)
    return [spec.plot, ExitReport((2.0, 1.0), (0.5, 0.6), (0.7, 1.0), 10, "model").plot]


@pytest.mark.parametrize("name", ["a.txt", "a.tar.gz"])
def test_pictures_of_unknown_kinds(name: str, plots: list[Callable[[Any], Any]], tmp_path: Path) -> None:
    for plot in plots:
        with pytest.raises(SettingError, match=r"plot\(path=.* no picture format '\.\w+'.* one of .*\.png, .*\.svg"):
            plot(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_pictures_that_cannot_be_written(plots: list[Callable[[Any], Any]], tmp_path: Path) -> None:
    for plot in plots:
        with pytest.raises(SettingError, match=r"nowhere/a\.png cannot be written .No such file or directory"):
            plot(str(tmp_path / "nowhere" / "a.png"))
        with pytest.raises(SettingTypeError, match=r"plot\(path\) must be a path or None, got 3"):
            plot(3)
        plot(tmp_path / "a.PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["a.PNG"]


# Reading, and folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "words"),
    [("file", "is a file. Name a folder"), ("file/a", "cannot be a folder .Not a directory"), ("a" * 300, "too long")],
)
def test_folders_that_are_none(place: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=rf"--out {re.escape(str(tmp_path / place))}: .*{words}"):
        check_folder("--out", tmp_path / place)
    check_folder("--out", tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs the file system of processes")
def test_folders_that_only_seem_writable() -> None:
    with pytest.raises(SettingError, match=r"--out /proc/x: nothing can be written in /proc"):
        check_folder("--out", "/proc/x")


def test_no_folder_and_folders_in_the_place_of_files(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--out is empty"):
        check_folder("--out", "")
    (tmp_path / "a.json").mkdir()
    check_folder("--out", tmp_path, ["b.json"])
    with pytest.raises(SettingError, match=r"a\.json is a folder there, but is to be a file"):
        check_folder("--out", tmp_path, ["a.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_folders_within_a_folder_are_written_whole(tmp_path: Path) -> None:
    """Tokenizers with several chat templates save a folder of these."""
    with folder_written_whole(tmp_path) as inside:
        (inside / "templates").mkdir()
        (inside / "templates" / "tools.jinja").write_text("a template")
    assert (tmp_path / "templates" / "tools.jinja").read_text() == "a template"


def test_checkpoints_of_a_fit_in_a_home_folder() -> None:
    """The Trainer expands it, too."""
    assert checkpoints_of("~/adapter") == str(Path("~/adapter-checkpoints").expanduser())
