"""``hf-selfspec``: what its commands print and fit, and one line for every ordinary mistake in any of them."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, TextStreamer

from helpers.calls import check_lossless
from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL, python
from hf_selfspec import EarlyExit, ExitHeads, NumericalError, SelfSpec, inspect_model
from hf_selfspec.model.logits import Logits
from hf_selfspec.tools.cli import fits, main
from hf_selfspec.tools.commands import COMMANDS
from hf_selfspec.train import loading
from hf_selfspec.train.loading import NamedModel, texts

pytestmark = [
    pytest.mark.usefixtures("as_before"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]


def test_help_imports_nothing_heavy() -> None:
    """But that of fits, whose options are the package's own settings."""
    assert NEEDED.keys() == {*COMMANDS, *(f"fit {name}" for name in fits())}
    helps = [[], *(name.split() for name in NEEDED if not name.startswith("fit "))]
    script = f"""
import sys
from hf_selfspec.tools.cli import main
codes = [main([*words, "--help"]) for words in {helps}]
print(set(codes), {{"numpy", "torch", "transformers"}} & sys.modules.keys())
"""
    told = python("-c", script)
    assert told.stdout.splitlines()[-1] == "{0} set()"
    for words in helps:
        assert f"usage: hf-selfspec {' '.join(words)}" in told.stdout
    told = python("-m", "hf_selfspec", "fit", code=2)
    assert told.stderr.splitlines()[-1].endswith(" required: FIT. See `hf-selfspec fit --help`.")


def test_help_of_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each; of one its settings, and those of every training."""
    assert main(["fit", "--help"]) == 0
    assert "AdaSPEED's probe (§II.B)" in capsys.readouterr().out
    assert main(["fit", "probe", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("exit_layer: the exit layer ``E``.", "--exit-layer", "--bf16"))
    for words in ([], ["fit", "wings"], ["train"]):
        assert "See `hf-selfspec" in told_in_one_line(words, 2, capsys)


def told_in_one_line(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says of a mistake, with this exit code."""
    capsys.readouterr()
    assert main(words) == code
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("hf-selfspec: ")
    return line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of data and a model that cannot be loaded, which tests leave as they are."""
    tmp_path = tmp_path_factory.mktemp("place")
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps({"text": "def f(x): return x + 1 " * 9})] * 40))
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a b")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n')
    (tmp_path / "ids.jsonl").write_text('{"input_ids": "a"}')
    (tmp_path / "table.csv").write_text("text\na")
    shutil.copytree(DEMO_MODEL, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text("{")
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4, vocabulary=4096).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return str(folder)


def test_inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))
    assert main(["inspect", "--model", str(DEMO_MODEL)]) == 0
    assert capsys.readouterr().out == f"{inspect_model(NamedModel(str(DEMO_MODEL)).config)}\n"


def test_audit(model: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is not exact makes the exit code 1."""
    how = ["audit", "--model", model, "--dtype", "float32", "--device", "cpu", "--data", str(place / "data.jsonl")]
    how += ["--methods", "SelfSpec.layerskip(3, num_draft=3)", "--max-new-tokens", "6", "--prompts", "2"]
    with monkeypatch.context() as wrong:
        wrong.setattr(Logits, "best", property(lambda logits: (logits.of_all.argmin(-1), logits.of_all.amax(-1))))
        assert main(how) == 1
    assert "differ where rounding does not explain it: NOT exact" in capsys.readouterr().out
    assert main(how) == 0
    told = capsys.readouterr().out
    assert "SelfSpec.layerskip(3, num_draft=3) against plain generate: LlamaForCausalLM, float32, cpu, greedy" in told
    assert "2 of 2 prompts have equal ids; exact" in told


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "options", "spec", "size"),
    [
        ("adapter", "--exit-layer 2 --blocks mlp --bf16", SelfSpec.kangaroo, 128 + 64 * 512),
        ("heads", "--layers 1,3 --rank 4", None, 2 * (64 + 4 * (64 + 4096))),
        ("probe", "--exit-layer 3", lambda out: SelfSpec.adaspeed(probe=out), 65),
        ("head", "--size 16", lambda out: SelfSpec(EarlyExit(2, out)), 16),
    ],
)  # fmt: skip
def test_fits(
    kind: str, options: str, spec: Any, size: int, model: str, place: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["fit", kind, "--model", model, "--data", str(place / "data.jsonl"), "--out", str(tmp_path / "out")]
    words += [] if kind == "head" else ["--block-size", "32", "--max-steps", "2"]
    assert main([*words, *options.split()]) == 0
    told = capsys.readouterr().out
    assert f"of {size:,} parameters in {tmp_path / 'out'}" in told
    assert kind == "head" or "\nsteps                            2\n" in told
    if kind == "heads":
        heads = ExitHeads.from_pretrained(tmp_path / "out")
        assert heads.layers == (1, 3)
    else:
        check_lossless(AutoModelForCausalLM.from_pretrained(model), spec(tmp_path / "out"), 8)


def test_texts_are_those_of_the_file(tmp_path: Path) -> None:
    """Whatever line ends stand inside a text, and with a byte order mark."""
    given = ["a\u2028b", "c\x0bd\x1e", "e\n\r\nf", "ü"]
    lines = "\r\n".join(json.dumps({"body": text}, ensure_ascii=False) for text in given)
    (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert texts(str(tmp_path / "a.jsonl"), "body") == given
    (tmp_path / "a.txt").write_bytes("ü\n".encode("utf-8-sig"))
    assert texts(str(tmp_path / "a.txt")) == ["ü\n"]


def test_exit_report(model: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exit-report", "--model", model, "--data", str(place / "data.jsonl"), "--prompts", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4


PROMPT = "def read_text(path):"


def generated(*words: str) -> int:
    limits = ["--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu"]
    spec = ["--spec", "SelfSpec.layerskip(6, num_draft=3)"]
    return main(["generate", "--model", str(DEMO_MODEL), *limits, *spec, *words])


def test_how_a_model_is_loaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(wraps=AutoModelForCausalLM.from_pretrained)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    words = ["--dtype", "bfloat16", "--attn-implementation", "eager", "--prompt", "a", "--max-new-tokens", "1"]
    for options in (["--device-map", "cpu"], ["--device", "cpu", "--revision", "main"]):
        assert main(["generate", "--model", model, *words, *options]) == 0
    given = [call.kwargs for call in load.call_args_list]
    assert [(each.get("revision"), each.get("device_map")) for each in given] == [("main", "cpu"), ("main", None)]
    for each in given:
        assert (each["dtype"], each["attn_implementation"]) == ("bfloat16", "eager")


def test_generate_prints_the_text_and_one_line_beside_it(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named = NamedModel(str(DEMO_MODEL), dtype="float32")
    tokenizer = named.tokenizer()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    tokens = named.model().generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    plain = f"{tokenizer.decode(tokens, skip_special_tokens=True)}\n"
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))  # as a pipe
    for words in (["--prompt", PROMPT], ["--raw"]):
        assert generated(*words) == 0
        told = capsys.readouterr()
        assert told.out == plain
        assert told.err.startswith("[8 tokens, ")
        assert told.err.endswith(" drafted tokens accepted in each]\n")


def test_generate_draws_by_a_seed_and_ends_its_line_when_stopped(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for seed in ("0", "0", "1"):
        assert generated("--prompt", "def f(", "--temperature", "15e-1", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]

    class Stopped(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            print("once upon", end="")
            raise KeyboardInterrupt

    monkeypatch.setattr(transformers, "TextStreamer", Stopped)
    assert generated("--prompt", "a") == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("once upon\n", "hf-selfspec: stopped.\n")


def test_generate_answers_as_a_chat_by_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n    return{% endfor %}")
    answers = list[str]()
    for words in ([], ["--chat"], ["--raw"]):
        assert main(["generate", "--model", str(folder), "--prompt", PROMPT, "--max-new-tokens", "8", *words]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    assert (
        main(["generate", "--model", str(DEMO_MODEL), "--prompt", f"{PROMPT}\n    return", "--max-new-tokens", "8"])
        == 0
    )
    assert capsys.readouterr().out == answers[0]


# What each command needs, with `{}` for a folder of the test.
DATA, OUT = ["--data", "{}/data.jsonl"], ["--out", "{}/out"]
NEEDED: dict[str, list[str]] = {
    "audit": DATA,
    "bench": [*DATA, *OUT],
    "exit-report": DATA,
    "fit adapter": [*DATA, *OUT, "--block-size", "16"],
    "fit head": [*DATA, *OUT],
    "fit heads": [*DATA, *OUT, "--block-size", "16"],
    "fit mtp": [*DATA, *OUT, "--block-size", "16"],
    "fit probe": [*DATA, *OUT, "--block-size", "16", "--exit-layer", "3"],
    "generate": ["--prompt", "a"],
    "inspect": [],
}
# How many commands take an option, at least.
TAKEN = {"--speed": 10, "--model": 10, "--dtype": 9, "--device": 4, "--device-map": 4, "--data": 8, "--field": 7}
TAKEN |= {"--prompts": 3, "--spec": 1, "--methods": 2, "--out": 6, "--chat": 3, "--temperature": 2}
# What is put in the place of what is needed, or added to it; what the line says; and the command, if not all that take
# the option.
MISTAKES: list[tuple[str, str, str | None]] = [
    ("--speed 3", "--speed", None),
    ("--model {}/none", "--model {}/none: there is no such folder. Give", None),
    ("--model no/such", "--model no/such: its config cannot be loaded (", None),
    ("--model {}/damaged", "--model {}/damaged: its config cannot be loaded", None),
    ("--dtype foat32", "'foat32'", None),
    ("--device toaster", "--device toaster: there is no such device", None),
    ("--device-map auto --device cpu", "--device and --device-map are both given", None),
    ("--device cuda:7", "--device cuda:7: this machine has none. Give one of cpu", None),
    ("--data {}/none.jsonl", "{}/none.jsonl: there is no such file", None),
    ("--data {}/binary.txt", "cannot be read as text in UTF-8", None),
    ("--data {}/empty.txt", "the dataset is empty", None),
    ("--field body", "there is no text in the column 'body'", None),
    ("--prompts 0", "argument --prompts: it must be a whole number of at least 1, got '0'", None),
    ("--spec lokup", "--spec lokup: there is no such folder or preset. Give one of adaspeed", None),
    ("--methods lookup,lokup", "--methods lokup: there is no such folder or preset", None),
    ("--out {}/data.jsonl", "--out {}/data.jsonl: nothing can be written there", None),
    ("--chat", "the tokenizer has no chat template", None),
    ("--temperature -1", "temperature", None),
    ("--data {}/broken.jsonl", "line 3: this is not JSON (Expecting", "fit adapter"),
    ("--data {}/short.txt", "fewer than one row of block_size=16", "fit adapter"),
    ("--data {}/table.csv", "is a file of another kind (.csv). Give a .txt file, or a .jsonl file", "fit adapter"),
    ("--data {}", "is a folder. Give a .txt file", "fit adapter"),
    ("--data {}/short.txt --field body", "--field body has no effect on", "fit adapter"),
    ("--data {}/ids.jsonl", "with `input_ids`; got {'input_ids': 'a'}", "fit mtp"),
    ("--exit-layer 24", "the model has 24 layers, so the exit layer must be between 1 and 23", "fit adapter"),
    ("--block-size 513", "fit_adapter(block_size=513) is more than the 512 positions of the model", "fit adapter"),
    ("--block-size 1", "(block_size=1) leaves the model nothing to write: give at least 2", "fit heads"),
    ("--layers 3,x", "--layers: invalid list of int, separated by commas, value: '3,x'. See", "fit heads"),
    ("--copied --rank 4", "copied=True or a rank, not both", "fit heads"),
    ("--bf16 --fp16", "At most one of fp16 and bf16 can be True", "fit adapter"),
    ("--size 0", "(size) must be at least 1, got 0", "fit head"),
]


def asked(name: str, place: Path, changed: str) -> list[str]:
    """A command line of what is needed, with an option that is changed or added."""
    given = ["--model", str(DEMO_MODEL), *NEEDED[name]]
    if changed and (option := changed.split()[0]) in given:
        at = given.index(option)
        given[at : at + 2] = []
    return [*name.split(), *(word.replace("{}", str(place)) for word in [*given, *changed.split()])]


@pytest.mark.parametrize(("changed", "words", "command"), MISTAKES)
def test_mistakes_are_told_in_one_line(
    changed: str, words: str, command: str | None, place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is loaded."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))
    names = list(NEEDED) if command is None else [command]
    lines = {name: told_in_one_line(asked(name, place, changed), 2, capsys) for name in names}
    if words != "--speed":
        lines = {name: line for name, line in lines.items() if "unrecognized arguments" not in line}
    assert len(lines) >= (TAKEN[changed.split()[0]] if command is None else 1)
    for name, line in lines.items():
        assert words.replace("{}", str(place)) in line, name
        assert "unrecognized" not in line or f"See `hf-selfspec {name.split()[0]} --help`" in line
    assert not (place / "out").exists()


@pytest.mark.parametrize("damage", ["tokenizer.json", "model.safetensors", "kind"])
def test_damaged_models(damage: str, model: str, place: Path, tmp_path: Path, capfd: Any) -> None:
    folder = shutil.copytree(model, tmp_path / "damaged")
    if damage == "kind":  # the library's message names every class it knows; ours does not
        T5Config().save_pretrained(folder)
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:100])
    assert main(asked("fit adapter", place, f"--model {folder}")) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"hf-selfspec: --model {folder}: its ")
    assert "cannot be loaded" in line
    assert len(line) < 600 or damage != "kind"


def test_what_is_raised_on_the_way_is_told_in_one_line(place: Path, capsys: Any, monkeypatch: Any) -> None:
    """But errors of our own, which are not hidden."""
    for error, code, words in (
        (KeyboardInterrupt(), 130, "stopped."),
        (NumericalError("the model returned\nNaN"), 2, "the model returned NaN"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "CUDA out of memory"),
        (MemoryError("no memory"), 2, "no memory"),
    ):
        monkeypatch.setattr(loading, "NamedModel", Mock(side_effect=error))
        for name in NEEDED:
            assert told_in_one_line(asked(name, place, ""), code, capsys) == f"hf-selfspec: {words}"
    monkeypatch.setattr(loading, "NamedModel", Mock(side_effect=AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        main(asked("inspect", place, ""))
