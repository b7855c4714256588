"""``hf-selfspec``: what its commands print, and one line for every ordinary mistake in any of them."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import hf_selfspec
from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL, python, told_in_one_line
from hf_selfspec import MarkedStreamer, NumericalError, SelfSpec, inspect_model
from hf_selfspec.model.logits import Logits
from hf_selfspec.tools.cli import fits, main
from hf_selfspec.tools.commands import COMMANDS
from hf_selfspec.train import loading
from hf_selfspec.train.loading import NamedModel

HEAVY = ("numpy", "torch", "transformers")

pytestmark = [
    pytest.mark.usefixtures("as_before"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:tune. no set of blocks"),
]


def test_help_imports_nothing_heavy() -> None:
    """But that of fits, whose options are the package's own settings."""
    assert NEEDED.keys() == {*COMMANDS, *(f"fit {name}" for name in fits())}
    helps = [[], *(name.split() for name in NEEDED if not name.startswith("fit "))]
    script = f"""
import sys
from hf_selfspec.tools.cli import main
codes = [main([*words, "--help"]) for words in {helps}]
print(set(codes), [name for name in {HEAVY} if name in sys.modules])
"""
    told = python("-c", script)
    assert told.stdout.splitlines()[-1] == "{0} []"
    for words in helps:
        assert f"usage: hf-selfspec {' '.join(words)}" in told.stdout
    told = python("-m", "hf_selfspec", "fit", code=2)
    assert told.stderr.splitlines()[-1].endswith(" required: FIT. See `hf-selfspec fit --help`.")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of data and a model that cannot be loaded, which tests leave as they are."""
    tmp_path = tmp_path_factory.mktemp("place")
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps({"text": "def f(x): return x + 1 " * 9})] * 40))
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_text("")
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


def test_tune_and_exit_report(model: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model, "--data", str(place / "data.jsonl"), "--prompts"]
    limits = ["1", "--steps", "2", "--max-new-tokens", "4", "--max-prompt-tokens", "3"]
    assert main(["tune", *words, *limits, "--out", str(tmp_path / "tuned")]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"model.generate(**inputs, assistant=SelfSpec.from_pretrained({str(tmp_path / 'tuned')!r}))"
    assert SelfSpec.from_pretrained(tmp_path / "tuned").draft.search is None
    assert main(["exit-report", *words, "2", "--plot", str(tmp_path / "exits.png")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    assert (tmp_path / "exits.png").read_bytes().startswith(b"\x89PNG")


PROMPT = "def read_text(path):"


def generated(*words: str) -> int:
    limits = ["--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu"]
    spec = ["--spec", "SelfSpec.layerskip(6, num_draft=3)"]
    return main(["generate", "--model", str(DEMO_MODEL), *limits, *spec, *words])


def test_how_a_model_is_loaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, calls = AutoModelForCausalLM.from_pretrained, []

    def recorded(name: str, **options: Any) -> Any:
        calls.append((options.get("revision"), options.get("device_map"), network := load(name, **options)))
        return network

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
    words = ["--dtype", "bfloat16", "--attn-implementation", "eager", "--prompt", "a", "--max-new-tokens", "1"]
    for options in (["--device-map", "cpu"], ["--device", "cpu", "--revision", "main"]):
        assert main(["generate", "--model", model, *words, *options]) == 0
    assert [call[:2] for call in calls] == [(None, "cpu"), ("main", None)]
    for *_, network in calls:
        assert (network.dtype, network.config._attn_implementation) == (torch.bfloat16, "eager")


def test_generate_prints_the_text_and_one_line_beside_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain generate's text, on a terminal with accepted drafts in a colour."""
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
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_colours in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_colours)
        assert generated("--prompt", PROMPT) == 0
        shown = capsys.readouterr().out
        assert ("\x1b[32m" in shown) is not bool(no_colours)
        assert shown.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


def test_generate_draws_by_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("0", "0", "1"):
        assert generated("--prompt", "def f(", "--temperature", "1.5", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_stopped_generate_ends_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(MarkedStreamer):
        def put(self, value: torch.Tensor) -> None:
            print("once upon", end="")
            raise KeyboardInterrupt

    monkeypatch.setattr(hf_selfspec, "MarkedStreamer", Stopped)
    assert generated("--prompt", "a") == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("once upon\n", "hf-selfspec: stopped.\n")


def test_generate_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn has those before it in its prompt; empty lines are no turns, and the end of the input ends it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)  # nothing comes through a pipe
    words = ["generate", "--model", str(DEMO_MODEL)]
    line = told_in_one_line(words, 2, capsys)
    assert "the tokenizer has no chat template, so the model cannot chat. Give a text for it to continue" in line
    words[-1] = str(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    lines, asked = ["hello", "  ", "and then?"], list[Any]()

    template = PreTrainedTokenizerBase.apply_chat_template

    def recorded(self: Any, conversation: Any, **options: Any) -> Any:
        asked.append([message["content"] for message in conversation])
        return template(self, conversation, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", recorded)
    monkeypatch.setattr(sys.stdin, "readline", lambda *_: f"{lines.pop(0)}\n" if lines else "")
    assert main([*words, "--max-new-tokens", "8"]) == 0
    first, (question, answer, then) = asked
    assert (first, question, then) == (["hello"], "hello", "and then?")
    assert answer
    assert answer in capsys.readouterr().out


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
    "tune": [*DATA, *OUT],
}
# How many commands take an option, at least.
TAKEN = {"--speed": 11, "--model": 11, "--dtype": 10, "--device": 5, "--device-map": 5, "--data": 9, "--field": 8}
TAKEN |= {"--prompts": 4, "--spec": 1, "--methods": 2, "--out": 7, "--chat": 3, "--temperature": 3}
# By name: what is put in the place of what is needed, or added to it, and what the line says.
MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown option": (["--speed", "3"], "--speed"),
    "no model": (["--model", "{}/none"], "--model {}/none: there is no such folder, and the Hub has no such model"),
    "damaged config": (["--model", "{}/damaged"], "--model {}/damaged: its config cannot be loaded"),
    "bad dtype": (["--dtype", "foat32"], "'foat32'"),
    "bad device": (["--device", "toaster"], "--device toaster: there is no such device"),
    "two devices": (["--device-map", "auto", "--device", "cpu"], "--device and --device-map are both given"),
    "absent device": (["--device", "cuda:7"], "--device cuda:7: this machine has none. Give one of cpu"),
    "missing data": (["--data", "{}/none.jsonl"], "{}/none.jsonl: there is no such file"),
    "binary data": (["--data", "{}/binary.txt"], "cannot be read as text in UTF-8"),
    "empty data": (["--data", "{}/empty.txt"], "the dataset is empty"),
    "another column": (["--field", "body"], "there is no text in the column 'body'"),
    "no prompts": (["--prompts", "0"], "argument --prompts: it must be a whole number of at least 1, got '0'"),
    "bad spec": (["--spec", "lokup"], "--spec lokup: there is no such folder or preset. Give one of adaspeed"),
    "bad methods": (["--methods", "lookup,lokup"], "--methods lokup: there is no such folder or preset"),
    "out is a file": (["--out", "{}/data.jsonl"], "--out {}/data.jsonl: nothing can be written there"),
    "no chat template": (["--chat"], "the tokenizer has no chat template"),
    "bad temperature": (["--temperature", "-1"], "temperature"),
}


def asked(name: str, place: Path, changed: list[str]) -> list[str]:
    """A command line of what is needed, with an option that is changed or added."""
    given = ["--model", str(DEMO_MODEL), *NEEDED[name]]
    if changed and changed[0] in given:
        at = given.index(changed[0])
        given[at : at + len(changed)] = []
    return [*name.split(), *(word.replace("{}", str(place)) for word in [*given, *changed])]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_one_line(
    mistake: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every command that takes the option, before a model is loaded."""
    changed, words = MISTAKES[mistake]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))
    lines = {name: told_in_one_line(asked(name, place, changed), 2, capsys) for name in NEEDED}
    if words != "--speed":
        lines = {name: line for name, line in lines.items() if "unrecognized arguments" not in line}
    assert len(lines) >= TAKEN[changed[0]]
    for name, line in lines.items():
        assert words.replace("{}", str(place)) in line, name
    assert not (place / "out").exists()


def test_what_is_raised_on_the_way_is_told_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But errors of our own, which are not hidden."""
    for error, code, words in (
        (KeyboardInterrupt(), 130, "stopped."),
        (NumericalError("the model returned\nNaN"), 2, "the model returned NaN"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "CUDA out of memory"),
        (MemoryError("no memory"), 2, "no memory"),
        (AssertionError("a bug"), 0, ""),
    ):

        def find(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(loading, "NamedModel", find)
        for name in NEEDED if code else ():
            assert told_in_one_line(asked(name, place, []), code, capsys) == f"hf-selfspec: {words}"
    with pytest.raises(AssertionError, match="a bug"):
        main(asked("inspect", place, []))
