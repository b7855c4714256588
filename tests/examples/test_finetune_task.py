"""The task experiment among the examples: its pairs, its labels and the whole way in two steps."""

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer

from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL, EXAMPLES
from hf_selfspec import EarlyExitLoss, Gradual, LayerDropout

sys.path.append(str(EXAMPLES))

import finetune_task
import tasks
from benchmarks.corpus import is_held_out
from finetune_task import Evaluation, Recipe, TrainingPairs

SIGNATURE = tasks.TASKS["signature"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty small files, at least one of them held out, whose headers overlap."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(60):
        shared, own = f"def shared{number % 20}(self, size=0):", f"def own{number}(x, *y):"
        source = f"class A:\n    {shared}\n        {own} pass\n"
        (folder / f"file{number}.py").write_text(source)
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text("def installed(x): pass\n")
    (folder / "old.py").write_text("def f(x): print x\n")
    return folder


def test_every_kind_of_argument_has_its_name() -> None:
    header = """def f(a,b=1,/,c="'",*args:int,d,e=lambda x, y=',': x,**kw)->Dict[str, int]:"""
    assert tasks.header_of(tasks.parse_header(header)) == header
    assert list(tasks.headers_in(f"class A:\n  @decorator(1)\n  {header} return lambda: 0".encode())) == [header]
    found = json.loads(tasks.answer_text(tasks.parse_header(header)))
    kinds = ["posonly", "posonly", "arg", "vararg", "kwonly", "kwonly", "kwarg"]
    assert [argument["kind"] for argument in found["args"]] == kinds
    defaults = {argument["name"]: argument.get("default") for argument in found["args"]}
    assert {name for name, value in defaults.items() if value is not None} == {"b", "c", "e"}
    for name, default in (("c", '"\'"'), ("e", "lambda x, y=',': x")):
        assert ast.dump(ast.parse(defaults[name])) == ast.dump(ast.parse(default))


def test_no_header_is_in_both_halves(library: Path) -> None:
    headers = tasks.read_headers(library)
    assert headers.held_out
    assert not set(headers.training) & set(headers.held_out)
    assert len(set(headers.training)) == len(headers.training)
    assert not any("installed" in header for header in headers.training + headers.held_out)


def test_only_the_answer_and_its_end_have_labels(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    pairs = [finetune_task.encode(tokenizer, SIGNATURE, header) for header in ("def f():", "def longer(a, b=None):")]
    dataset = TrainingPairs(pairs)
    batch = finetune_task.collator(tokenizer)([dataset[0], dataset[1]])
    short, width = pairs[0], len(pairs[1])
    padding = width - len(short)
    assert padding > 0
    assert batch["input_ids"].shape == (2, width)
    assert batch["input_ids"][0].tolist() == short.prompt + short.answer + [tokenizer.pad_token_id] * padding
    assert batch["labels"][0].tolist() == [-100] * len(short.prompt) + short.answer + [-100] * padding
    assert batch["attention_mask"][0].tolist() == [1] * len(short) + [0] * padding
    assert batch["labels"][1].tolist() == [-100] * len(pairs[1].prompt) + pairs[1].answer


def test_what_is_refused(library: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    training = next(file for file in library.glob("file*.py") if not is_held_out(Path(file.name)))
    (few / training.name).write_text(training.read_text())
    for recipe, folder, message in (
        (Recipe(batch_size=1000), library, "a batch of 1000"),
        (Recipe(batch_size=1), few, "and 0 held-out ones"),
        (Recipe("gsm8k"), None, "needs --data"),
        (Recipe("cooking"), None, "give one of signature, gsm8k"),
    ):
        with pytest.raises(SystemExit, match=message):
            finetune_task.finetune(recipe, Evaluation(), folder, tmp_path / "model", tmp_path / message)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
@pytest.mark.parametrize(("lora", "callbacks"), [(False, True), (True, False)])
def test_two_steps_make_a_model_and_a_table(
    lora: bool, callbacks: bool, library: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    tiny_llama(layers=4, vocabulary=len(tokenizer)).save_pretrained(start)
    tokenizer.save_pretrained(start)
    recipe = Recipe(model=str(start), steps=2, batch_size=2, longest=64, lora=lora, callbacks=callbacks)
    folders = tmp_path / "model", tmp_path / "checkpoints"
    given: list[Any] = []

    class Recording(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            given.extend(self.callback_handler.callbacks)
            return super().train(*args, **kwargs)

    monkeypatch.setattr(finetune_task, "Trainer", Recording)
    evaluation = Evaluation(pairs=2, timed=1, tuning=1, head=50)
    text = finetune_task.finetune(recipe, evaluation, library, *folders, "a command")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].split(",")[0].strip() for line in table[2:]] == [
        "plain",
        *["early exit only"] * 3,
        *["self-speculative"] * 3,
        "free drafts alone",
        *["with free drafts"] * 3,
        *["reduced head", "reduced head"] * 3,
    ]
    assert "equal plain generation's: yes, for all 2 pairs" in text
    assert (tmp_path / "model" / "results.md").read_text(encoding="utf-8") == text

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again = finetune_task.train_model(recipe, AutoTokenizer.from_pretrained(tmp_path / "model"), [], folders[1])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name].to(tensor.dtype)), name
    before = finetune_task.load(start).state_dict()
    assert any(not torch.equal(tensor, again.state_dict()[name]) for name, tensor in before.items())
    exits = [callback for callback in given if isinstance(callback, EarlyExitLoss)]
    dropouts = [callback for callback in given if isinstance(callback, LayerDropout)]
    assert [(exit.e_scale, exit.curriculum, exit.layers) for exit in exits] == [(1.0, Gradual(), {1, 2, 3})] * callbacks
    assert [dropout.p_max for dropout in dropouts] == [0.2] * callbacks
    other = replace(recipe, learning_rate=1.0)
    with pytest.raises(SystemExit, match="learning_rate"):
        finetune_task.finetune(other, Evaluation(pairs=2, timed=1, tuning=1), library, *folders)


PROBLEMS = [
    {"question": f"How many are {number} and 1,000?", "answer": f"{number}+1000\n#### {number + 1000:,}"}
    for number in range(60)
]


def test_word_problems_are_split_and_compared_by_result(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file, task = tmp_path / "problems.jsonl", tasks.TASKS["gsm8k"]
    file.write_text("".join(json.dumps(problem) + "\n" for problem in [*PROBLEMS, *PROBLEMS]))
    problems = task.read(file)
    assert sorted([*problems.training, *problems.held_out]) == sorted(map(json.dumps, PROBLEMS))
    assert 0 < len(problems.held_out) < 12
    pair = finetune_task.encode(tokenizer, task, json.dumps(PROBLEMS[7]))
    assert tokenizer.decode(pair.prompt) == "Question: How many are 7 and 1,000?\nAnswer: "
    assert pair.expected == "1007"
    assert task.is_right(tokenizer.decode(pair.answer[:-1]), pair.expected)
    assert task.is_right("7 more\n#### 1007", "1007")
    assert not task.is_right("7 more\n#### 1,008", "1007")
    assert not task.is_right("1007", "1007")
