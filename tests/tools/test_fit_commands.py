"""``hf-selfspec fit``: what it fits, and one line for whatever is wrong, before the model is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config

from helpers.calls import check_lossless
from helpers.models import VOCABULARY, tiny_llama
from helpers.processes import told_in_one_line
from hf_selfspec import EarlyExit, ExitHeads, SelfSpec
from hf_selfspec.tools.cli import main
from hf_selfspec.train.loading import texts

TEXT = "def f(x): return x + 1 "
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4).save_pretrained(folder)
    words = {chr(32 + index): index for index in range(VOCABULARY - 2)} | {"[UNK]": VOCABULARY - 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def files(saved_model: Path, tmp_path: Path) -> dict[str, Path]:
    """A model, its text, of which a row is held out, and a place for what is fitted."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(54)))
    return {"model": saved_model, "data": tmp_path / "data.jsonl", "out": tmp_path / "out"}


def asked(kind: str, files: dict[str, Path], *words: object) -> list[str]:
    """A command line; of options that come twice, the last one counts."""
    given = ["--model", files["model"], "--data", files["data"], "--out", files["out"]]
    given += [] if kind == "head" else ["--block-size", 32]
    given += ["--exit-layer", 2] if kind in ("adapter", "probe") else []
    return list(map(str, ["fit", kind, *given, *words]))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "options", "spec", "size"),
    [
        ("adapter", "--blocks mlp --own-head --max-steps 2 --bf16", SelfSpec.kangaroo, 128 + 64 * (512 + VOCABULARY)),
        ("heads", "--layers 1,3 --rank 4 --metric margin --max-steps 2", None, 2 * (64 + 4 * (64 + VOCABULARY))),
        ("probe", "--exit-layer 3 --max-steps 2", lambda out: SelfSpec.adaspeed(probe=out), 65),
        ("head", "--size 16", lambda out: SelfSpec(EarlyExit(2, out)), 16),
    ],
)  # fmt: skip
def test_command_line(
    kind: str, options: str, spec: Any, size: int, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(kind, files, *options.split())) == 0
    told = capsys.readouterr().out
    assert f"of {size:,} parameters in {files['out']}" in told
    assert kind == "head" or "\nsteps                            2\n" in told
    if kind == "heads":
        heads = ExitHeads.load(files["out"])
        assert (heads.layers, heads.metric) == ((1, 3), "margin")
    else:
        check_lossless(LlamaForCausalLM.from_pretrained(files["model"]), spec(files["out"]), 8)


def test_texts_are_those_of_the_file(tmp_path: Path) -> None:
    """Whatever line ends stand inside a text, and with a byte order mark."""
    given = ["a\u2028b", "c\x0bd\x1e", "e\n\r\nf", "ü"]
    lines = "\r\n".join(json.dumps({"body": text}, ensure_ascii=False) for text in given)
    (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert texts(str(tmp_path / "a.jsonl"), "body") == given
    (tmp_path / "a.txt").write_bytes("ü\n".encode("utf-8-sig"))
    assert texts(str(tmp_path / "a.txt")) == ["ü\n"]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is wrong is found only after the weights were loaded."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))


# Content of FILE, the options, and what is told.
WRONG: list[tuple[str, str, bytes, str]] = [
    ("adapter", "--data FILE.txt", b"\0" * 100, "cannot be read as text in UTF-8 (it has null bytes)"),
    ("adapter", "--data FILE.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "line 3: this is not JSON (Expecting"),
    ("adapter", "--data FILE.jsonl", b'{"body": "a"}', "line 1: there is no text in the column 'text'"),
    ("adapter", "--data FILE.jsonl", b'{"text": " "}', "the dataset is empty"),
    ("adapter", "--data FILE.txt", b"a" * 31, "fit_adapter was given 31 tokens, fewer than one row of block_size=32"),
    ("adapter", "--data FILE.csv", b"text\na", "is a file of another kind (.csv). Give a .txt file, or a .jsonl file"),
    ("adapter", "--data .", b"", "is a folder. Give a .txt file"),
    ("adapter", "--data nowhere", b"", "there is no such file"),
    ("adapter", "--data FILE.txt --field body", b"a", "--field body has no effect on"),
    ("adapter", "--exit-layer 4", b"", "the model has 4 layers, so the exit layer must be between 1 and 3"),
    ("adapter", "--block-size 513", b"", "fit_adapter(block_size=513) is more than the 512 positions of the model"),
    ("heads", "--block-size 1", b"", "(block_size=1) leaves the model nothing to write: give at least 2"),
    ("heads", "--layers 3,x", b"", "--layers: invalid list of int, separated by commas, value: '3,x'. See"),
    ("heads", "--copied --rank 4", b"", "copied=True or a rank, not both"),
    ("probe", "--temperature 0.7", b"", "has no effect without do_sample=True"),
    ("probe", "--do-sample --top-p 1.5", b"", "`top_p` has to be a float > 0 and < 1"),
    ("mtp", "--data FILE.jsonl", b'{"input_ids": "a"}', "with `input_ids`; got {'input_ids': 'a'}"),
    ("adapter", "--bf16 --fp16", b"", "At most one of fp16 and bf16 can be True"),
    ("adapter", "--epoch 3", b"", "--epoch"),
    ("head", "--size 0", b"", "(size) must be at least 1, got 0"),
    ("adapter", "--out FILE.txt/a", b"a", "nothing can be written there"),
]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("kind", "options", "content", "words"), WRONG)
def test_options_that_are_wrong(
    kind: str, options: str, content: bytes, words: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given = files["out"].parent, options.split()
    for name in (word for word in given if word.startswith("FILE")):
        (folder / Path(name).parts[0]).write_bytes(content)
    given = [str(folder / word) if word.startswith("FILE") else word for word in given]
    assert words in told_in_one_line(asked(kind, files, *given), 2, capsys)
    assert not files["out"].exists()


@pytest.mark.usefixtures("no_model")
def test_unknown_names_without_a_network(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes at once: what tries again and again is not asked."""

    class Elsewhere(HfHubHTTPError.__bases__[0]):
        """As the Hub's HTTP library raises it where there is no network."""

    def info(self: HfApi, name: str, *, timeout: float) -> None:
        assert timeout <= 10
        raise Elsewhere("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", info)
    line = told_in_one_line(asked("adapter", files, "--model", "no/such"), 2, capsys)
    assert "the Hub has no such model (Name or service not known)" in line


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "model.safetensors", "kind"])
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
    assert "AdaSPEED's probe (§II.B)" in capsys.readouterr().out
    assert main(["fit", "probe", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("temperature, top_k, top_p: settings of sampling.", "--top-k", "--bf16"))
    for words in ([], ["fit"], ["fit", "wings"], ["train"]):
        assert "See `hf-selfspec" in told_in_one_line(words, 2, capsys)
