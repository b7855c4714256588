"""The command line: what it fits, and one line for whatever is wrong, before the model is loaded."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

import hf_selfspec
from helpers.calls import check_lossless
from helpers.models import VOCABULARY, tiny_llama
from hf_selfspec import (
    EarlyExit,
    EarlyExitLora,
    ExitHeads,
    ReducedHead,
    SelfSpec,
    SettingError,
    fit_reduced_head,
)
from hf_selfspec.cli import app, main
from hf_selfspec.cli.fit import fits
from hf_selfspec.data.texts import texts
from hf_selfspec.train.fit import Fit
from hf_selfspec.validation import Option

TEXT = "def f(x): return x + 1 "


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    words = {chr(32 + index): index for index in range(VOCABULARY - 2)} | {"[UNK]": VOCABULARY - 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "options", "spec", "size"),
    [
        ("adapter", "--exit-layer 2 --blocks mlp --own-head", SelfSpec.kangaroo, 2 * 64 + 8 * 64**2 + 64 * VOCABULARY),
        ("heads", "--layers 1,3 --rank 4 --metric margin", None, 2 * (64 + 4 * (64 + VOCABULARY))),
        ("lora", "--exit-layer 2 --rank 4", lambda out: SelfSpec(EarlyExitLora(out)), 2 * 4 * 1024),
        ("probe", "--exit-layer 3", lambda out: SelfSpec.adaspeed(probe=out), 65),
        ("head", "--size 16", lambda out: SelfSpec(EarlyExit(2, out)), 16),
    ],
)
def test_command_line(
    kind: str, options: str, spec: Any, size: int, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", files["model"], "--data", files["data"], "--out", files["out"]]
    trains = [] if kind == "head" else ["--block-size", "32"]
    if kind == "heads":  # which have to be calibrated
        files["data"].write_text(files["data"].read_text() * 2)
    assert main(["fit", kind, *map(str, common), *trains, *options.split()]) == 0
    assert f"of {size:,} parameters in {files['out']}" in capsys.readouterr().out
    model = LlamaForCausalLM.from_pretrained(files["model"])
    if kind == "heads":
        heads = ExitHeads.load(files["out"])
        assert (heads.layers, heads.metric) == ((1, 3), "margin")
    else:
        check_lossless(model, spec(files["out"]), 12)
    if kind == "head":  # the same tokens as from Python
        tokenizer = AutoTokenizer.from_pretrained(files["model"])
        expected = fit_reduced_head(model, tokenizer, [TEXT] * 27, size=16)
        assert torch.equal(ReducedHead.load(files["out"]).tokens, expected.tokens)


@pytest.mark.parametrize("kind", fits())
def test_settings_are_declared_once(kind: type[Fit[Any]]) -> None:
    """The function of a fit takes them all, and its command those that have an option."""
    names = [field.name for field in fields(kind)]
    function = getattr(hf_selfspec, kind.function)
    assert list(inspect.signature(function).parameters) == ["model", "tokenizer", "dataset", *names]
    assert function.__doc__ == kind.__doc__
    command = typer.main.get_command(app).commands["fit"].commands[kind.command]
    hints = get_type_hints(kind, include_extras=True)
    settings = [name for name in names if any(isinstance(one, Option) for one in get_args(hints[name]))]
    assert [option.name for option in command.params][-len(settings) :] == settings


@pytest.fixture
def files(saved_model: Path, tmp_path: Path) -> dict[str, Path]:
    """A model, its text, a place for what is fitted, and a file."""
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": TEXT}) + "\n" for _ in range(27))
    )  # none is held out
    (tmp_path / "file").write_text("")
    return {"model": saved_model, "data": tmp_path / "data.jsonl", "out": tmp_path / "out", "file": tmp_path / "file"}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is wrong is found only after the weights were loaded."""

    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


def asked(kind: str, files: dict[str, Path], **changed: object) -> list[str]:
    """A command line; ``None`` leaves an option out, ``True`` gives one that has no value."""
    given: dict[str, object] = {"model": files["model"], "data": files["data"], "out": files["out"], "block-size": 32}
    given |= {"exit-layer": 2} if kind != "heads" else {}
    words = ["fit", kind]
    for name, value in (given | {name.replace("_", "-"): value for name, value in changed.items()}).items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name}"] if value is True else [f"--{name}", text]
    return words


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says what is wrong."""
    capsys.readouterr()
    assert main(arguments) != 0
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("hf-selfspec: ")
    return line


# Data ----------------------------------------------------------------------------------------------------------------


DATA: dict[str, tuple[str, bytes | None, str]] = {
    "zeros": ("a.txt", b"\0" * 100, "cannot be read as text in UTF-8 (it has null bytes)"),
    "broken": ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "line 3: this is not JSON (Expecting"),
    "lists": ("a.jsonl", b'{"text": "a"}\n["b"]', "line 2: ['b'] is not an object with a text"),
    "half a character": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "abc \\ud800"}',
        "line 2: this text is not Unicode, so no tokenizer accepts it ('utf-8' codec can't encode character '\\ud800'",
    ),
    "blank": ("a.jsonl", b'{"text": " "}', "the dataset is empty"),
    "table": ("a.csv", b"text\na", "is a file of another kind (.csv). Give a .txt file, or a .jsonl file"),
    "folder": (".", None, "is a folder. Give a .txt file"),
    "no name": ("a b", None, "there is no such file, and it is not the name of a dataset"),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", DATA)
def test_data_that_is_none(
    name: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, words = DATA[name]
    if content is not None:
        (tmp_path / file).write_bytes(content)
    line = refused(asked("adapter", files, data=tmp_path / file), capsys)
    assert words in line
    assert f"--data {tmp_path / file}" in line
    assert not files["out"].exists()


def test_texts_are_those_of_the_file(tmp_path: Path) -> None:
    """Whatever line ends stand inside a text, and with a byte order mark."""
    given = ["a\u2028b", "c\x0bd\x1e", "e\n\r\nf", "ü"]
    lines = "\r\n".join(json.dumps({"body": text}, ensure_ascii=False) for text in given)
    (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert texts(str(tmp_path / "a.jsonl"), "body") == given
    (tmp_path / "a.txt").write_bytes("ü\n".encode("utf-8-sig"))
    assert texts(str(tmp_path / "a.txt")) == ["ü\n"]


class Elsewhere(HfHubHTTPError.__bases__[0]):
    """As the Hub's HTTP library raises it where there is no network."""


def datasets_module(load: Callable[..., Any]) -> types.ModuleType:
    module = types.ModuleType("datasets")
    module.exceptions = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    module.load_dataset = load
    return module


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("offline", [False, True])
def test_unknown_names_without_a_network(
    offline: bool, files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes at once: what tries again and again is not asked."""

    def load(name: str, split: str) -> None:
        if not offline:
            time.sleep(60)
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub\n(OfflineModeIsEnabled)")

    def info(self: HfApi, name: str, *, timeout: float) -> None:
        assert not offline
        assert timeout <= 10
        raise Elsewhere("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(HfApi, "dataset_info", info)
    monkeypatch.setitem(sys.modules, "datasets", datasets_module(load))
    begun = time.monotonic()
    line = refused(asked("adapter", files, data="no/such-data"), capsys)
    assert time.monotonic() - begun < 10
    assert ("(OfflineModeIsEnabled)" if offline else "the Hub has no such dataset (Name or service not known)") in line
    assert "Give a .jsonl or .txt file" in line
    if not offline:
        monkeypatch.setattr(HfApi, "model_info", info)
        line = refused(asked("adapter", files, model="no/such-model"), capsys)
        assert "the Hub has no such model (Name or service not known)" in line


@pytest.mark.usefixtures("no_model")
def test_datasets_that_cannot_be_used(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs `pip install datasets`" in refused(asked("adapter", files, data="some/data"), capsys)

    def raises(error: Exception) -> Callable[..., Any]:
        def load(name: str, split: str) -> None:
            raise error

        return load

    module = datasets_module(raises(ValueError("Unknown split 'train'")))
    for error in (ValueError("Unknown split 'train'"), module.exceptions.DatasetsError("no rows")):
        module.load_dataset = raises(error)
        monkeypatch.setitem(sys.modules, "datasets", module)
        assert f"cannot be loaded ({error})" in refused(asked("adapter", files, data="some/data"), capsys)
    module.load_dataset = lambda name, split: [{"text": "a"}, {"body": "b"}]
    assert "row 2: there is no text" in refused(asked("adapter", files, data="some/data"), capsys)
    module.load_dataset = lambda name, split: [{"body": "a"}, {"body": "b"}]
    assert texts("some/data", "body") == ["a", "b"]


# Options --------------------------------------------------------------------------------------------------------------


OPTIONS: list[tuple[str, dict[str, object], str]] = [
    ("adapter", {"batch": 0}, "--batch must be at least 1, got 0"),
    ("adapter", {"exit-layer": 6}, "the model has 6 layers, so the exit layer must be between 1 and 5"),
    ("adapter", {"block-size": 513}, "--block-size 513 is more than the 512 positions of the model"),
    ("heads", {"block-size": 1}, "--block-size 1 leaves the model nothing to write: give at least 2"),
    ("adapter", {"patience": 0}, "--patience must be at least 1, got 0"),
    ("adapter", {"cache-gib": 2}, "--cache-gib 2.0 has no effect without --cache"),
    ("adapter", {"heads": 4, "blocks": ["mlp"]}, "--heads 4 has no effect with --blocks mlp"),
    ("adapter", {"blocks": ["mixer"]}, "--blocks takes some of ('attention', 'mlp'), got ('mixer',)"),
    ("heads", {"layers": ["3", "x"]}, "--layers 3,x: give whole numbers separated by commas"),
    ("heads", {"layers": [1, 3], "heads": 2}, "--heads 2 has no effect with --layers"),
    ("heads", {"copied": True, "rank": 4}, "--copied --rank 4: the model's own head has full rank"),
    ("probe", {"temperature": 0.7}, "--temperature 0.7 has no effect without --sample"),
    ("probe", {"sample": True, "top-p": 1.5}, "--top-p must lie between 0 and 1"),
    ("probe", {"sample": True, "top-k": -1}, "--top-k must be at least 0"),
    ("probe", {"sample": True, "temperature": 0.0}, "--temperature must be a finite number above 0"),
    ("head", {"size": 0, "exit-layer": None, "block-size": None}, "--size must be at least 1, got 0"),
]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("kind", "options", "words"), OPTIONS)
def test_options_that_are_wrong(
    kind: str, options: dict[str, object], words: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(asked(kind, files, **options), capsys)
    assert not files["out"].exists()


@pytest.mark.usefixtures("no_model")
def test_places_that_are_wrong(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file = files["file"]
    occupied = file.parent / "occupied"
    (occupied / "config.json").mkdir(parents=True)
    for name, place, words in (
        ("out", file, f"{file} is a file. Name a folder"),
        ("out", file / "a", "cannot be a folder (Not a directory)"),
        ("out", "", "--out is empty"),
        ("out", occupied, "config.json is a folder there"),
        ("cache", file, f"{file} is a file. Name a folder"),
        ("field", "body", "--field body has no effect on --data"),
    ):
        changed = {name: place}
        if name == "field":
            (file.parent / "a.txt").write_text(TEXT)
            changed["data"] = file.parent / "a.txt"
        assert words in refused(asked("adapter", files, **changed), capsys)


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "model.safetensors"])
def test_models_that_are_damaged(
    damage: str, files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in files["model"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[: 100 if file.name == damage else None])
    assert main(asked("adapter", files, model=folder)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"hf-selfspec: --model {folder}: its ")
    assert "cannot be loaded" in line


@pytest.mark.usefixtures("no_model")
def test_too_little_text(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    files["data"].write_text(json.dumps({"text": "a" * 31}))
    line = refused(asked("heads", files), capsys)
    assert "fit heads was given 31 tokens, fewer than one row of block_size=32" in line


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": "x"}, "its config cannot be loaded (Validation error for field 'num_hidden_layers'"),
        ({"num_attention_heads": 0}, "its config cannot be loaded (integer modulo by zero)"),
        ({"num_hidden_layers": 1}, "the model has 1 layer, so it has no exit layer"),
        ({"hidden_size": 33, "num_attention_heads": 3}, "hidden_size must be a multiple of 2 * num_heads"),
    ],
)
def test_configs_that_are_wrong(
    changed: dict[str, Any], words: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(files["model"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    assert words in refused(asked("adapter", files, model=folder), capsys)


def test_models_of_other_kinds(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library's message names every class it knows; ours does not."""
    folder = shutil.copytree(files["model"], tmp_path / "model")
    T5Config().save_pretrained(folder)
    line = refused(asked("adapter", files, model=folder), capsys)
    assert "its model cannot be loaded (Unrecognized configuration class" in line
    assert len(line) < 600


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["fit"], ["fit", "wings"], ["train"]):
        assert "See `hf-selfspec" in refused(words, capsys)


# Fits that bring nothing ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
def test_heads_that_reach_nothing(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """They are saved, and a line says what is wrong with them."""
    files["data"].write_text(files["data"].read_text() * 2)
    assert main(asked("heads", files, heads=2, epochs=0.01, learning_rate=1e-9)) == 0
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("hf-selfspec: ")]
    assert len(lines) == 1
    assert "these exit heads reach none of the accuracies from 0.5 on" in lines[0]
    assert "drafts accepted at best" in told.out
    heads = ExitHeads.load(files["out"])
    assert heads.about["figures"]["drafts accepted at best"] < 0.5
    with pytest.raises(SettingError, match="is more than these exit heads reach"):
        SelfSpec.dssd(heads, 0.5)
