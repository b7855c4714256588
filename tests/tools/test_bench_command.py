"""``hf-selfspec bench``: streams of prompts, the whole way on a tiny model, and one line for what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters
from transformers import AutoTokenizer
from transformers.utils import logging

from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL
from hf_selfspec import SettingError
from hf_selfspec.tools import methods
from hf_selfspec.tools.cli import main
from hf_selfspec.tools.request import Encoder, repeated, stream_of, texts_of

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
KINDS = ("code", "poems", "rag")

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts of each kind, and two without one, of which one is a chat."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"kind": kind, "prompt": f"def {kind}_{number}(path, other):"} for number in range(3) for kind in KINDS
    ]
    rows += [{"prompt": "def read(path):"}, {"messages": [{"role": "user", "content": "import os"}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4, vocabulary=4096).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def bench(model: Path, data: Path, out: Path, *words: str) -> int:
    given = ["--model", str(model), "--data", str(data), "--out", str(out), "--threads", "1", "--device", "cpu"]
    return main(["bench", *given, *words])


def test_stream_has_as_many_of_each_kind_in_turn(data: Path, model: Path) -> None:
    texts = texts_of([str(data)])
    encoder = Encoder(AutoTokenizer.from_pretrained(model), 10_000)
    stream = stream_of(texts, encoder, 2, 0)
    assert [prompt.kind for prompt in stream] == 2 * [*KINDS, "text"]
    assert stream == stream_of(texts, encoder, 2, 0)
    assert [prompt.ids for prompt in repeated(stream)] == 2 * [prompt.ids for prompt in stream]
    assert len(stream_of(texts, encoder, 99, 0)) == 11
    assert texts["text"] == ["def read(path):", [{"role": "user", "content": "import os"}]]
    short = Encoder(encoder.tokenizer, 3)
    assert [prompt.kind for prompt in stream_of(texts, short, 3, 0)] == ["text"]
    assert short.left_out["code"] == 3


def test_a_named_column_is_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "a", "answer": "b"}')
    assert texts_of([str(path)], "answer") == {"text": ["b"]}
    path.write_text('{"solution": 1}')
    for column, words in (("solution", "the column 'solution'"), (None, "any of the columns messages, prompt")):
        with pytest.raises(SettingError, match=f"line 1: there is no text in {words}"):
            texts_of([str(path)], column)


def test_chats_are_one_stream(data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.txt"
    own.write_text("class Stack:\n\nclass Queue:\n")
    logging.enable_progress_bar()
    words = ["--data", str(own), "--kinds", "code,text", "--prompts", "1", "--max-new-tokens", "6", "--repeat"]
    words += ["--methods", "selfspec, prompt-lookup(2)", "--methods", "SelfSpec.layerskip(3, stop=FixedLength(2))"]
    assert bench(model, data, tmp_path / "out", *words) == 0
    captured = capsys.readouterr()
    assert "SelfSpec.layerskip(3, stop=FixedLength(2))" in captured.out
    assert "left 0:00:00" in captured.err
    assert "Loading" not in captured.err, "a log has no bar of loading"
    (condition,) = json.loads((tmp_path / "out" / "results.json").read_text())["conditions"]
    assert condition["kinds"] == {"text": 1, "code, again": 1, "text, again": 1}
    assert all(method["equal_ids"]["share"] == 1 for method in condition["methods"])


def test_a_file_of_ones_own_gives_enough_prompts_for_an_interval(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"def number_{number}():"}) for number in range(30)))
    assert bench(model, data, tmp_path / "report", "--methods", "prompt-lookup(2)", "--max-new-tokens", "2") == 0
    (condition,) = json.loads((tmp_path / "report" / "results.json").read_text())["conditions"]
    assert condition["prompts"] == 19, "the first one is left out"
    assert condition["methods"][1]["whole"]["ratio_of_means"]["low"] is not None


def test_drawn_batches_of_texts(data: Path, model: Path, tmp_path: Path) -> None:
    words = ["--raw", "--kinds", "code", "--prompts", "3", "--batch-size", "2", "--max-new-tokens", "8"]
    words += ["--methods", "selfspec,prompt-lookup", "--temperature", "0.7", "--top-p", "0.9"]
    assert bench(model, data, tmp_path, *words) == 0
    (condition,) = json.loads((tmp_path / "results.json").read_text())["conditions"]
    assert condition["kinds"] == {"batch of 2": 1}
    assert [method["name"] for method in condition["methods"]] == ["plain", "SelfSpec()"], "prompt lookup takes one"
    for method in condition["methods"]:
        assert method["output_sequence_length"] == 8
        assert method["equal_ids"] is None


@pytest.mark.slow
def test_compiled_methods(data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = methods.METHODS["static-compiled"].options
    monkeypatch.setattr(options["compile_config"], "backend", "eager")  # dynamo alone
    made = counters["stats"]["unique_graphs"]
    words = ["--prompts", "2", "--kinds", "rag", "--max-new-tokens", "8", "--passes", "3"]
    assert bench(model, data, tmp_path, *words, "--methods", "static-compiled") == 0
    (condition,) = json.loads((tmp_path / "results.json").read_text())["conditions"]
    compiled = condition["methods"][1]
    assert counters["stats"]["unique_graphs"] > made
    assert compiled["equal_ids"]["share"] == 1
    assert len((tmp_path / "calls.jsonl").read_text().splitlines()) == 1 + 3 * 2 * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "prose"], "--kinds prose: --data has no such prompts, only code, poems, rag, text"),
        (["--max-prompt-tokens", "1"], "no prompt fits"),
        (["--kinds", "text", "--model", DEMO_MODEL], "the tokenizer has no chat template, so the model cannot chat."),
    ],
)
def test_mistakes_are_one_line(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert bench(model, data, tmp_path / "out", *map(str, words)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hf-selfspec: ")
    assert message in line
    assert not (tmp_path / "out").exists()
