"""The command line: what it fits, and one line for whatever is wrong, before the model is loaded."""

import json
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config

from helpers.calls import check_lossless
from helpers.models import VOCABULARY, tiny_llama
from helpers.processes import told_in_one_line
from hf_selfspec import Adapter, EarlyExit, ExitHeads, ReducedHead, SelfSpec, fit_reduced_head
from hf_selfspec.tools.cli import main
from hf_selfspec.train.loading import texts

TEXT = "def f(x): return x + 1 "


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4).save_pretrained(folder)
    words = {chr(32 + index): index for index in range(VOCABULARY - 2)} | {"[UNK]": VOCABULARY - 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "options", "spec", "size"),
    [
        (
            "adapter",
            "--exit-layer 2 --blocks mlp --own-head --max-steps 2 --seed 7 --bf16",
            SelfSpec.kangaroo,
            2 * 64 + 8 * 64**2 + 64 * VOCABULARY,
        ),
        ("heads", "--layers 1,3 --rank 4 --metric margin --max-steps 2", None, 2 * (64 + 4 * (64 + VOCABULARY))),
        ("probe", "--exit-layer 3 --max-steps 2", lambda out: SelfSpec.adaspeed(probe=out), 65),
        ("head", "--size 16", lambda out: SelfSpec(EarlyExit(2, out)), 16),
    ],
)
def test_command_line(
    kind: str, options: str, spec: Any, size: int, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "heads":  # which have to be calibrated
        files["data"].write_text(files["data"].read_text() * 2)
    assert main(asked(kind, files, *options.split())) == 0
    assert f"of {size:,} parameters in {files['out']}" in capsys.readouterr().out
    model = LlamaForCausalLM.from_pretrained(files["model"])
    if kind == "heads":
        heads = ExitHeads.load(files["out"])
        assert (heads.layers, heads.metric) == ((1, 3), "margin")
    else:
        check_lossless(model, spec(files["out"]), 8)
    if kind == "adapter":
        assert Adapter.load(files["out"]).about["recipe"]["steps"] == 2
    if kind == "head":  # the same tokens as from Python
        tokenizer = AutoTokenizer.from_pretrained(files["model"])
        expected = fit_reduced_head(model, tokenizer, [TEXT] * 27, size=16)
        assert torch.equal(ReducedHead.load(files["out"]).tokens, expected.tokens)


@pytest.fixture
def files(saved_model: Path, tmp_path: Path) -> dict[str, Path]:
    """A model, its text, and a place for what is fitted."""
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": TEXT}) + "\n" for _ in range(27))
    )  # none is held out
    return {"model": saved_model, "data": tmp_path / "data.jsonl", "out": tmp_path / "out"}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is wrong is found only after the weights were loaded."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))


def asked(kind: str, files: dict[str, Path], *words: object) -> list[str]:
    """A command line; of options that come twice, the last one counts."""
    given = ["--model", files["model"], "--data", files["data"], "--out", files["out"]]
    given += [] if kind == "head" else ["--block-size", 32]
    given += ["--exit-layer", 2] if kind in ("adapter", "probe") else []
    return list(map(str, ["fit", kind, *given, *words]))


DATA: list[tuple[str, bytes | None, str]] = [
    ("a.txt", b"\0" * 100, "cannot be read as text in UTF-8 (it has null bytes)"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "line 3: this is not JSON (Expecting"),
    ("a.jsonl", b'{"text": " "}', "the dataset is empty"),
    ("a.txt", b"a" * 31, "fit_adapter was given 31 tokens, fewer than one row of block_size=32"),
    ("a.csv", b"text\na", "is a file of another kind (.csv). Give a .txt file, or a .jsonl file"),
    (".", None, "is a folder. Give a .txt file"),
    ("a b", None, "this is not a valid name"),
]


@pytest.mark.usefixtures("no_model")
def test_data_that_is_none(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, content, words in DATA:
        if content is not None:
            (tmp_path / file).write_bytes(content)
        assert words in told_in_one_line(asked("adapter", files, "--data", tmp_path / file), 2, capsys)
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


def datasets_module(load: Callable[..., Any] | None) -> Any:
    module: Any = types.ModuleType("datasets")
    module.exceptions = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    module.load_dataset = load
    return module


@pytest.mark.usefixtures("no_model")
def test_unknown_names_without_a_network(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes at once: what tries again and again is not asked."""

    def info(self: HfApi, name: str, *, timeout: float) -> None:
        assert timeout <= 10
        raise Elsewhere("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(sys.modules, "datasets", datasets_module(None))  # nothing to call
    for kind, what in (("data", "dataset"), ("model", "model")):
        monkeypatch.setattr(HfApi, f"{what}_info", info)
        line = told_in_one_line(asked("adapter", files, f"--{kind}", "no/such"), 2, capsys)
        assert f"the Hub has no such {what} (Name or service not known)" in line


@pytest.mark.usefixtures("no_model")
def test_datasets_that_cannot_be_used(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def load(name: str, split: str) -> Any:
        if isinstance(found[-1], Exception):
            raise found[-1]
        return found[-1]

    module = datasets_module(load)
    for given, words in (
        (None, "needs `pip install datasets`"),
        (ConnectionError("no Hub\n(OfflineModeIsEnabled)"), "(OfflineModeIsEnabled)"),
        (ValueError("Unknown split 'train'"), "cannot be loaded (Unknown split 'train')"),
        (module.exceptions.DatasetsError("no rows"), "cannot be loaded (no rows)"),
        ([{"text": "a"}, {"body": "b"}], "row 2: there is no text"),
    ):
        found.append(given)
        monkeypatch.setitem(sys.modules, "datasets", None if given is None else module)
        assert words in told_in_one_line(asked("adapter", files, "--data", "some/data"), 2, capsys)
    found.append([{"body": "a"}, {"body": "b"}])
    assert texts("some/data", "body") == ["a", "b"]


OPTIONS = [
    ("adapter", "--exit-layer 4", "the model has 4 layers, so the exit layer must be between 1 and 3"),
    ("adapter", "--block-size 513", "fit_adapter(block_size=513) is more than the 512 positions of the model"),
    ("heads", "--block-size 1", "(block_size=1) leaves the model nothing to write: give at least 2"),
    (
        "heads",
        "--layers 3,x",
        "--layers: invalid list of int, separated by commas, value: '3,x'. See",
    ),
    ("heads", "--copied --rank 4", "copied=True or a rank, not both"),
    ("probe", "--temperature 0.7", "has no effect without do_sample=True"),
    ("probe", "--do-sample --top-p 1.5", "`top_p` has to be a float > 0 and < 1"),
    ("mtp", "--prompts FILE.jsonl", "FILE.jsonl: there is no such file"),
    ("adapter", "--bf16 --fp16", "At most one of fp16 and bf16 can be True"),
    ("adapter", "--epoch 3", "--epoch"),
    ("head", "--size 0", "(size) must be at least 1, got 0"),
    ("adapter", "--out FILE/a", "nothing can be written there"),
    ("adapter", "--data FILE.txt --field body", "--field body has no effect on"),
]


@pytest.mark.usefixtures("no_model")
def test_options_that_are_wrong(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("FILE", "FILE.txt"):
        (tmp_path / name).write_text(TEXT)
    for kind, options, words in OPTIONS:
        given = [str(tmp_path / word) if word[0] == "F" else word for word in options.split()]
        assert words in told_in_one_line(asked(kind, files, *given), 2, capsys), options
    assert not files["out"].exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": "x"}, "its config cannot be loaded (Validation error for field 'num_hidden_layers'"),
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
    assert words in told_in_one_line(asked("adapter", files, "--model", folder), 2, capsys)


@pytest.mark.parametrize("damage", ["tokenizer.json", "model.safetensors", "kind"])
def test_damaged_models(damage: str, files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(files["model"], tmp_path / "damaged")
    if damage == "kind":  # the library's message names every class it knows; ours does not
        T5Config().save_pretrained(folder)
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:100])
    assert main(asked("adapter", files, "--model", folder)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"hf-selfspec: --model {folder}: its ")
    assert "cannot be loaded" in line
    assert len(line) < 600 or damage != "kind"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each fit; of one its settings, and those of every training."""
    assert main(["fit", "--help"]) == 0
    assert "  probe     Fits AdaSPEED's probe (§II.B)" in capsys.readouterr().out
    assert main(["fit", "probe", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("temperature, top_k, top_p: settings of sampling.", "--top-k", "--bf16"))


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["fit"], ["fit", "wings"], ["train"]):
        assert "See `hf-selfspec" in told_in_one_line(words, 2, capsys)
