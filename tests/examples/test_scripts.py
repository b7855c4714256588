"""Every script of ``examples``, each with its smallest setting, as a user starts it."""

import importlib.util
import json
import runpy
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from helpers import architectures, ids_of_types, multimodal
from helpers.models import ragged_batch, tiny_llama
from helpers.processes import DEMO_MODEL, EXAMPLES, TESTS, in_two_processes, library, python
from hf_selfspec import SelfSpec, first_differences
from hf_selfspec.tools.cli import main

BENCHMARKS = EXAMPLES / "benchmarks"
# What scripts share, which start nothing, and servers, of which `test_services` takes care.
SHARED = {"corpus", "fitting", "gpu_parts", "known_text", "synthetic", "tasks", "timing"}
SERVERS = {"chat", "openai_server", "service"}
RANDOM = "--width 64 --dtype float32 --layers 4 --vocabulary 97"
TRAINED = "--model {model} --data {tasks} --repeats 1"
FITTED = f"{TRAINED} --prompts 2 --tokens 12 --out {{folder}}/fitted"
TUNED = "--model {model} --steps 2 --batch_size 2 --longest 64 --pairs 2 --timed 1 --tuning 1 --head 50"
TUNED += " --output {folder}/tuned --data "
EQUAL = "Self-speculative tokens equal plain generation's: yes, for all"
# For each case a script, its words, and what it has to print.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "engine": (f"{RANDOM} --exit-layer 2 --tokens 12 --repeats 1", ("| width 64, float32, batch 1, prompt 64 |",)),
    "fewer_bits": ("--width 64 --layers 2 --vocabulary 97 --repeats 1", ("| Quantized(",)),
    "forward": (f"{RANDOM} --repeats 1 --prompt 20", ("| width 64, float32, ours |",)),
    "host": ("--model {model} --data {tasks} --prompts 2 --tokens 12 --rows 1 2", ("| 2 |",)),
    "known_answer": (f"{RANDOM} --layers 6 --steps 3 --plot {{folder}}/plot.png", ("| Bayesian | 3 |",)),
    "grammar": ("--model {model} --prompts 1 --max-new-tokens 24", ("| fresh |",)),
    "suites": (
        "humaneval {humaneval} spec-bench {spec_bench}",
        ('"kind": "code"', "rename the function add to my_add", '{"kind": "summary", "prompt": "Summarize: a text."}'),
    ),
    "suites, editing": ("editing {wiki}", ("change Paris to Arden", "Paris-on-Sea, had walls.")),
    "memory": (f"{RANDOM} --exit-layer 2 --tokens 4 --prompt 8", ("| width 64, float32 |",)),
    "training": (f"{RANDOM} --repeats 1 --prompt 16", ("| dropout 0.2 |",)),
    "exits": ("--model {model} --repeats 1 --prompts 1 --tokens 40", ("| SelfSpec.layerskip(), E = ",)),
    "stops": (f"{FITTED} --files 2", ("| AdaSPEED with the probe |",)),
    "adapters": (f"{FITTED} --files 2", ("| exit alone (LayerSkip) |",)),
    "parts": (
        "--model {model} --text {folder}/text.json --data {tasks} --prompts 1 --tokens 8 --exit-layer 2 --ranks 4 4 "
        "--block-size 32 --out {folder}/fitted",
        ("| mtp3 |",),
    ),
    "heads": ("--copied --repeats 1 --prompts 1 --tokens 8 --files 16 --out {folder}/fitted", ("| DSSD, ε = 0.9 |",)),
    "windows": ("--kinds mistral gpt_oss --prompts 200 --repeats 1 --tokens 4", ("| mistral | 200 |", "equal |")),
    "gpu": ("--device cpu --small --out {folder}/gpu", ("| 8b | 64 x 2 | 8 |", "17 of 17 cases ended well.")),
    "pictures": ("--out {folder}/pictures", ("how-dark.svg", "kinds-light.svg")),
    "quickstart": ("--model {model} --tokens 6 --no-color", ("tokens equal to plain generate: yes", "‹")),
    "train_demo_model": (
        "--steps 2 --held-out-blocks 2 --threads 1 --output {folder}/model",
        ("bits per byte",),
    ),
    "finetune_task": (TUNED + "{sources}", (EQUAL, "| free drafts alone |", "| reduced head, free drafts |")),
    "finetune_task, lora": (TUNED + "{sources} --lora --callbacks False", (EQUAL, "LoRA, without LayerSkip's")),
    "finetune_task, gsm8k": (TUNED + "{problems} --task gsm8k", (EQUAL,)),
    "lora_layerskip": (
        "--model {model} --data {texts} --output {folder}/adapters --steps 2 --rank 2 --max-length 64",
        ("| 6 |",),
    ),
    "batch_inference": ("--model {model} --data {tasks} --output {folder}/new/answers.jsonl --max-new-tokens 2", ()),
    "grpo_rollouts": ("--model {model} --output {folder}/policy --steps 1 --max-new-tokens 8 --lora", ("tokens, ",)),
}
LIBRARIES = {"grammar": "xgrammar", "lora_layerskip": "trl", "grpo_rollouts": "trl"}
# Those that take longer than a few seconds.
SLOW = {
    "adapters", "engine", "exits", "finetune_task", "finetune_task, gsm8k", "finetune_task, lora", "gpu",
    "grammar", "heads", "known_answer", "parts", "stops", "train_demo_model", "training", "windows",
}  # fmt: skip

# What TRL and lm-eval do, and theirs.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore:Passing `generation_config` together",
    "ignore:.*does not pay",  # parts of random models
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_before: None) -> None:
    """Scripts find each other, and what they set for the process is taken back."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(library("datasets").config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A tiny model with a chat template, files of prompts, and sources, which are the standard library, too."""
    model = tmp_path / "tiny"
    tiny_llama(vocabulary=4096).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    tokenizer.save_pretrained(model)
    prompt = "import os\n\n\n" + "def read(path):\n    return open(path).read()\n\n\n" * 8
    numbers = [f"{number}+1000\n#### {number + 1000:,}" for number in range(60)]
    rows: dict[str, list[Any]] = {
        "tasks": [{"prompt": prompt}] * 9,
        "humaneval": [{"prompt": "def add(x):\n", "entry_point": "add", "canonical_solution": "    return x\n"}],
        "spec_bench": [{"category": "summarization", "turns": ["Summarize: a text."]}],
        "texts": [{"text": f"def read_{name}(path):\n    return open(path).{name}()\n"} for name in "abcdefghij" * 4],
        "problems": [{"question": f"How many is {answer[:7]}?", "answer": answer} for answer in numbers],
    }
    for name, of_file in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, of_file)))
    (tmp_path / "text.json").write_text(json.dumps({"texts": [list(range(2, 802))]}))
    (tmp_path / "wiki.txt").write_text(f"In {'old ' * 80}the town of Paris @-@ on @-@ Sea , <unk> had walls .\n= T =\n")
    (tmp_path / "sources").mkdir()
    for number in range(64):
        header = f"class A:\n    def shared{number % 20}(self, size=0):\n        def own{number}(x, *y): pass\n"
        (tmp_path / "sources" / f"file{number}.py").write_text(header + "    def longer(self):\n        pass\n" * 40)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "sources")})
    files = {name: tmp_path / f"{name}.jsonl" for name in rows} | {"wiki": tmp_path / "wiki.txt"}
    return {"model": model, "folder": tmp_path, "sources": tmp_path / "sources", **files}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script, and processes that it starts of itself, in this process."""

    def run(name: str, *words: str) -> str:
        (script,) = EXAMPLES.rglob(f"{name}.py")
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    def started(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        words, (_, script, *given) = sys.argv, command
        printed = run(Path(script).stem, *given)
        monkeypatch.setattr(sys, "argv", words)
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(subprocess, "run", started)
    return run


def test_every_script_is_a_case() -> None:
    scripts = {path.stem for path in [*EXAMPLES.glob("*.py"), *BENCHMARKS.glob("*.py")]}
    assert scripts == {name.split(",")[0] for name in CASES} | SHARED | SERVERS | {
        "all",
        "lm_eval_scores",
        "ray_batches",
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_the_smallest_setting(name: str, places: dict[str, Path], run: Callable[..., str]) -> None:
    script, (words, expected) = name.split(",")[0], CASES[name]
    if script in LIBRARIES:
        library(LIBRARIES[script])
    printed = run(script, *(word.format(**places) for word in words.split()))
    for part in expected:
        assert part in printed


@pytest.mark.slow
def test_the_picture_of_a_bench(places: dict[str, Path], run: Callable[..., str]) -> None:
    data, folder = places["tasks"], places["folder"]
    words = ("bench", "--model", str(places["model"]), "--data", str(data), "--max-new-tokens", "4", "--methods")
    for kinds in (("code",), ("code", "text")):
        rows = [{"kind": kind, "prompt": f"def {name}(x):"} for kind in kinds for name in "ab"]
        data.write_text("\n".join(map(json.dumps, rows)))
        report = folder / f"report of {len(kinds)}"
        assert main([*words, "selfspec,prompt-lookup", "--threads", "1", "--out", str(report)]) == 0
    run("pictures", "--results", str(report / "results.json"), "--out", str(folder / "drawn"))
    picture = (folder / "drawn" / "kinds-dark.svg").read_text(encoding="utf-8")
    assert picture.count(">code</text>") == picture.count(">text</text>") == 1
    with pytest.raises(SystemExit, match="has one kind of prompts"):
        run("pictures", "--results", str(folder / "report of 1" / "results.json"), "--out", str(folder / "drawn"))


def test_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are those of the document, and a call runs what has not ended well before."""
    commands = runpy.run_path(str(BENCHMARKS / "all.py"))["COMMANDS"]
    document = " ".join((EXAMPLES / "RESULTS.md").read_text(encoding="utf-8").split())
    for command in commands.values():
        assert command.replace("--dtype bfloat16 --out", "--dtype float32 --out") in document
    ran: list[str] = []

    def started(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        script = words[3] if words[1] == "-m" else Path(words[1]).stem
        assert script == "bench" or (EXAMPLES.parent / words[1]).is_file()
        assert not {"SMOLLM2", "DIR", "TWIN"} & set(words)
        ran.append(script)
        return subprocess.CompletedProcess(words, int(script == "engine"), "a table", "")

    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr(
        sys, "argv", ["all.py", "--model", "m", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit, match=r"failed.*: engine$"):
        runpy.run_path(str(BENCHMARKS / "all.py"), run_name="__main__")
    assert len(ran) == len(commands) - 1 + 4  # without the twin, and with the suites
    ran.clear()
    with pytest.raises(SystemExit, match=r": engine$"):
        runpy.run_path(str(BENCHMARKS / "all.py"), run_name="__main__")
    assert ran == ["engine"]
    assert (tmp_path / "out" / "forward.md").read_text().endswith("--repeats 15`\n\na table")


def test_answers_to_prompts_with_a_chat_template(places: dict[str, Path], run: Callable[..., str]) -> None:
    """What the template adds is in the prompt."""
    data, output = places["tasks"], places["folder"] / "answers.jsonl"
    words = ("--model", str(places["model"]), "--data", str(data), "--output", str(output), "--max-new-tokens", "6")
    data.write_text('{"prompt": "def a(x):"}\n')
    model, tokenizer = (kind.from_pretrained(places["model"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    tokenizer.chat_template = "class {{ messages[0].content }}"
    tokenizer.save_pretrained(places["model"])
    run("batch_inference", *words)
    inputs = tokenizer("class def a(x):", return_tensors="pt", return_token_type_ids=False)
    answer = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert json.loads(output.read_text()) == {"prompt": "def a(x):", "answer": tokenizer.decode(answer)}
    data.write_text('{"prompt": "x"}\n\n{"question": "y"}\n')
    with pytest.raises(SystemExit, match=r"line 3: KeyError\('prompt'\); a line is"):
        run("batch_inference", *words)


@pytest.mark.slow
def test_batches_on_ray_go_on_where_a_run_was_stopped(
    tmp_path: Path, in_float32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two local actors; the second run has one prompt more, and answers no other."""
    library("ray")
    # Of a machine with fewer, two actors, a reader and Ray's look at checkpoints would wait for each other.
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 8}')
    data, output = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts = {
        number: f"def {name}(path):\n" for number, name in enumerate(("read", "write", "remove", "copy", "size"))
    }
    words = ("--rows", "2", "--max-new-tokens", "8", "--checkpoints", tmp_path / "checkpoints")
    answers: list[Any] = []
    for count in (4, 5):
        lines = [json.dumps({"id": number, "prompt": prompts[number]}) for number in range(count)]
        data.write_text("\n".join(lines) + "\n")
        folder = output / str(count)
        python(EXAMPLES / "ray_batches.py", "--model", in_float32, "--data", data, "--output", folder, *words)
        answers.append([json.loads(line) for file in folder.glob("*") for line in file.read_text().splitlines()])
    assert [sorted(answer["id"] for answer in run) for run in answers] == [[0, 1, 2, 3], [4]]
    model, tokenizer = (kind.from_pretrained(in_float32) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for answer in chain(*answers):
        inputs = tokenizer(prompts[answer["id"]], return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert answer["answer"] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture
def in_float32(tmp_path: Path) -> Path:
    """The demo model. In bfloat16, as it is saved, next tokens are equally likely at times, and any may be taken."""
    AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).save_pretrained(tmp_path / "demo")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.slow
def test_processes_answer_their_share_and_draft_from_their_answers(tmp_path: Path, in_float32: Path) -> None:
    prompts = [f"def {name}(path):\n" for name in ("read_text", "write_lines", "remove", "copy_file", "size_of")]
    data, output, cache = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "cache"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ("--model", in_float32, "--max-new-tokens", "24", "--data", data, "--output", output)
    in_two_processes(EXAMPLES / "batch_inference.py", *options, "--cache-dir", cache)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    model, tokenizer = (kind.from_pretrained(in_float32) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for process, answer in enumerate((answers[0], answers[-1])):
        inputs, rounds = tokenizer(answer["prompt"], return_tensors="pt"), []
        for folder in (None, cache):
            spec = SelfSpec(cache_dir=folder, task=f"process-{process}")
            ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant=spec)
            rounds.append(spec.stats.rounds)
        assert tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == answer["answer"]
        assert rounds[1] < rounds[0]  # by how much depends on times, too
    data.write_text(json.dumps({"prompt": prompts[0]}) + "\n")  # none for the second process
    in_two_processes(EXAMPLES / "batch_inference.py", *options)
    assert len(output.read_text().splitlines()) == 1


def test_only_the_answer_and_its_end_have_labels() -> None:
    example, tokenizer = importlib.import_module("finetune_task"), AutoTokenizer.from_pretrained(DEMO_MODEL)
    headers = "def f():", "def longer(a, b=None):"
    short, long = (example.encode(tokenizer, example.TASKS["signature"], header) for header in headers)
    dataset = example.TrainingPairs([short, long])
    batch, padding = example.collator(tokenizer)([dataset[0], dataset[1]]), len(long) - len(short)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert batch["input_ids"][0].tolist() == short.prompt + short.answer + [tokenizer.pad_token_id] * padding
    assert batch["labels"][0].tolist() == [-100] * len(short.prompt) + short.answer + [-100] * padding
    assert batch["labels"][1].tolist() == [-100] * len(long.prompt) + long.answer
    assert batch["attention_mask"][0].tolist() == [1] * len(short) + [0] * padding


@pytest.mark.parametrize("lora", [False, True])
def test_the_task_by_either_trainer(lora: bool, places: dict[str, Path]) -> None:
    """The stock Trainer and TRL's come to the same weights, with both callbacks."""
    library("trl")
    example, tokenizer = importlib.import_module("finetune_task"), AutoTokenizer.from_pretrained(DEMO_MODEL)
    pairs = [example.encode(tokenizer, example.TASKS["signature"], f"def name{at}(x, y={at}):") for at in range(12)]
    found, settings = [], {"model": str(places["model"]), "steps": 2, "batch_size": 2, "fp32": True, "lora": lora}
    for sft in (False, True):
        (folder := places["folder"] / f"checkpoints {sft}").mkdir()
        found.append(example.train_model(example.Recipe(**settings, sft=sft), tokenizer, pairs, folder).state_dict())
    start = example.load(places["model"]).state_dict()
    assert any(not torch.allclose(value, start[name], atol=1e-3) for name, value in found[0].items())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-4, rtol=1e-3)


class Exactness(TrainerCallback):
    """Compares greedy texts with plain generate's after each optimizer step."""

    def __init__(self) -> None:
        self.equal: list[bool] = []
        self.weights: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(next(p for p in model.parameters() if p.requires_grad).detach().clone())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inputs, options = ragged_batch((5, 9), vocabulary=4096), {"max_new_tokens": 16, "do_sample": False}
        model.eval()
        with torch.no_grad():
            drafted, plain = (model.generate(**inputs, **options, **way) for way in ({}, {"assistant": False}))
        model.train()
        self.equal.append(torch.equal(drafted, plain))
        self.on_train_begin(args, state, control, model)


@pytest.mark.slow
def test_rollouts_of_a_policy_that_learns(places: dict[str, Path], tmp_path: Path) -> None:
    """And goes on where it was, with what the SelfSpec knows."""
    library("trl")
    example, exactness = importlib.import_module("grpo_rollouts"), Exactness()
    policy = tmp_path / "policy"
    arguments = ["--output", str(policy), "--max-new-tokens", "16", "--lora", "--steps", "2", "--model"]
    example.main([*arguments, str(places["model"])], callbacks=[exactness])
    saved = (policy / "selfspec.json").read_bytes()
    example.main([*arguments, str(policy)], callbacks=[exactness])
    assert exactness.equal == [True] * 4
    weights = exactness.weights
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[-1])
    assert (policy / "selfspec.json").read_bytes() != saved


@pytest.mark.slow
def test_scores_of_lm_eval(tmp_path: Path, in_float32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("lm_eval")
    documents = [{"prompt": f"def {name}_text(path):\n", "answer": ""} for name in ("read", "write", "copy")]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    task = {
        "task": "bodies",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "bodies.yaml").write_text(json.dumps(task))  # which is YAML
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module("lm_eval_scores")
    arguments = ["--model", str(in_float32), "--tasks", "bodies", "--include", str(tmp_path), "--batch-size", "2"]
    drafted, plain = (
        [document["resps"] for document in example.main([*arguments, *way])["bodies"]] for way in ([], ["--plain"])
    )
    assert drafted == plain
    assert any(text for [[text]] in drafted)


def test_interleave_runs_in_turn_and_leaves_the_warmup_out() -> None:
    timing: Any = importlib.import_module("timing")
    calls: list[str] = []

    def variant(name: str, seconds: float) -> Any:
        calls.append(name)
        return timing.Sample(seconds, 2, torch.empty(0))

    timings = timing.interleave({"a": lambda: variant("a", 1.0), "b": lambda: variant("b", 4.0)}, repeats=3)
    assert calls == ["a", "b"] * 4
    assert timings["b"].median() / timings["a"].median() == 4.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_parts_of_a_gpu_run(device: str, tmp_path: Path) -> None:
    """Made small, on a CPU and on a pretended device: what ends a part on a GPU before it has begun fails here."""
    printed = python(TESTS / "helpers" / "run_gpu_script.py", device, tmp_path).stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    cases = {(line["part"], line["case"]) for line in lines if "call" in line}
    assert not [line for line in lines if "failed" in line or "skipped" in line]
    assert f"{len(cases)} of {len(cases)} cases ended well." in printed
    assert {part for part, _ in cases} == {"probe", "ids", "135m", "1b", "8b", "soak"}
    for part, case in (("135m", "64 x 1"), ("1b", "64 x 1"), ("8b", "64 x 1"), ("8b", "64 x 2")):
        of_case = [line for line in lines if (line["part"], line["case"]) == (part, case)]
        for repeated in (0, 3, 8):
            assert f"| {part} | {case} | {repeated} |" in printed
            ours = [line for line in of_case if line.get("repeated") == repeated and line.get("way") == "ours"]
            assert [line["is_first"] for line in ours] == [True, False]
        assert {line["way"] for line in of_case if "way" in line} == {"plain", "static", "ours"}
        assert any("logits_ours" in line for line in of_case)
        assert {line["of"] for line in of_case if "kernels_a_token" in line} == {"ours", "static"}
    assert [line["turn"] for line in lines if "turn" in line] == [1, 2, 3, 4, 5]


# Does not find the packages that its first argument names; the others are those of pytest.
WITHOUT_PACKAGES = """
import importlib.machinery, sys

class Finder:
    find = importlib.machinery.PathFinder.find_spec

    def __call__(self, name, *others):
        return None if name.split(".")[0] in sys.argv[1].split() else Finder.find(name, *others)

importlib.machinery.PathFinder.find_spec = Finder()
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_tests_for_a_gpu_collect_without_optional_packages() -> None:
    """A machine with one may have torch, transformers and pytest alone."""
    hidden = "accelerate bayes_opt datasets hypothesis llguidance lm_eval matplotlib outlines pandas peft PIL scipy"
    hidden += " sklearn torchao trl xgrammar"
    words = ("--collect-only", "-p", "no:hypothesispytest", "-m", "cuda", TESTS / "model" / "test_on_cuda.py")
    assert "test_forwards_are_captured[default]" in python("-c", WITHOUT_PACKAGES, hidden, *words).stdout


def test_prompts_have_as_much_of_a_known_text_as_they_should() -> None:
    """Free drafts find a piece of it in a round; the text is exact in bfloat16."""
    known_text = importlib.import_module("known_text")
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256, "vocab_size": 4096}
    known: Any = known_text.KnownText(torch.device("cpu"), **sizes, num_attention_heads=4, num_key_value_heads=2)
    assert known.model.dtype is torch.bfloat16
    for repeated, least, most in ((0, 1.0, 1.0), (3, 2.7, 3.2), (8, 5.0, 11.0)):
        spec = SelfSpec()
        for rows in (1, 3):
            prompt, expected = known.prompt(rows, 400, repeated, 96)
            ids = known.model.generate(**prompt, max_new_tokens=96, do_sample=False, assistant=spec)
            assert torch.equal(ids, torch.cat([prompt["input_ids"], expected], dim=1))
        assert spec.stats is not None
        assert least <= spec.stats.mean_generated_length <= most


# Parts in the place of those of ``gpu.py``. The file "mended" makes all that has failed work.
PARTS_THAT_FAIL = """
import os, time
from pathlib import Path
from unittest import SkipTest

HERE = Path(__file__).parent

class Bench:
    machine = "a machine"

    def __init__(self, part, device, is_small):
        self.part, self.is_mended = part, (HERE / "mended").exists()
        if part == "1b" and not self.is_mended:
            raise RuntimeError("it cannot begin")
        names = {"135m": ["well", "late", "unreached"], "8b": ["CUDA error", "after"], "1b": ["well"]}
        names |= {"probe": ["skipped", "wrong", "after"], "ids": ["ends", "after"]}
        self.cases = {name: lambda name=name: self.run(name) for name in names[part]}

    def run(self, name):
        with (HERE / "ran").open("a") as file:
            file.write(f"{self.part} {name}\\n")
        self.tell(is_mended=self.is_mended)
        if name == "skipped":
            raise SkipTest("no such type")
        if not self.is_mended:
            if name == "late":
                time.sleep(60)
            if name == "ends":
                os._exit(3)
            if name in ("wrong", "CUDA error"):
                raise ValueError(name)
"""


def test_a_gpu_run_goes_on_and_what_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "gpu.py", tmp_path / "out"
    script.write_text((BENCHMARKS / "gpu.py").read_text())
    (tmp_path / "gpu_parts.py").write_text(PARTS_THAT_FAIL)
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(out), "--small"])
    spec = importlib.util.spec_from_file_location("gpu_of_test", script)
    gpu: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    monkeypatch.setattr(gpu, "SECONDS", {"probe": 6, "135m": 2} | dict.fromkeys(("ids", "1b", "8b"), 30))

    def run() -> tuple[list[str], dict[str, Any]]:
        (tmp_path / "ran").write_text("")
        gpu.main()
        ends = {f"{part} {case}": lines[-1] if lines else {} for (part, case), lines in gpu.cases_in(out).items()}
        return (tmp_path / "ran").read_text().splitlines(), ends

    begun = time.monotonic()
    ran, ends = run()
    assert time.monotonic() - begun < 40
    assert ran == [
        *("probe skipped", "probe wrong", "probe after", "135m well", "135m late"),
        *("ids ends", "ids after", "8b CUDA error", "8b after"),
    ]
    failed = {case: line["failed"] for case, line in ends.items() if "failed" in line}
    assert failed == {
        "135m late": "the part's time was over",
        "probe wrong": "ValueError: wrong",
        "ids ends": "its process ended with code 3",
        "8b CUDA error": "its process ended with code 1",
        "1b start": "its process ended with code 1",
    }
    assert ends["135m unreached"] == {}
    assert "is_mended" in gpu.cases_in(out)["ids", "ends"][1], "what a case has told before it failed is kept"
    printed = capsys.readouterr().out
    assert "| 8b | CUDA error | failed | ValueError: CUDA error |" in printed
    assert "| probe | skipped | skipped | no such type |" in printed
    assert "| 135m | unreached | not reached |  |" in printed
    assert "it cannot begin" in (out / "log.txt").read_text()

    (tmp_path / "mended").touch()
    ran, ends = run()
    assert ran == ["135m unreached", "135m late", "probe wrong", "ids ends", "1b well", "8b CUDA error"]
    assert not [case for case, line in ends.items() if "took" not in line or "failed" in line]
    assert f"{len(ends)} of {len(ends)} cases ended well." in capsys.readouterr().out
    assert gpu.cases_in(out)["ids", "ends"][1]["is_mended"]
    assert run()[0] == []


def test_ids_that_are_not_plains_are_found() -> None:
    """In texts of rows with padding, and with an image, which the scores of plain ``generate`` have seen."""
    for name in ("llama", "idefics3"):
        model = (multimodal if name == "idefics3" else architectures).build(name)
        prompt = multimodal.prompt_of(name, (9, 5)) if name == "idefics3" else ragged_batch((9, 5))
        options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        plain = model.generate(**prompt, **options)
        assert ids_of_types.differences_of(model, prompt, plain, plain.sequences) == []
        wrong, column = plain.sequences.clone(), prompt["input_ids"].shape[1] + 2
        scores = plain.scores[2][1]
        wrong[1, column:] = scores.argmin()
        (difference,) = ids_of_types.differences_of(model, prompt, plain, wrong)
        assert (difference.row, difference.column) == (1, column)
        assert difference.margin == pytest.approx(float(scores.max() - scores.min()))
        assert not difference.is_near_tie
        if name == "llama":
            (usual,) = first_differences(model, plain.sequences, wrong, prompt["attention_mask"])
            assert (usual.row, usual.column, usual.tolerance) == (1, column, difference.tolerance)


def test_ids_of_a_type_that_are_wrong_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second call with one row alone."""
    calls: list[int] = []

    def differences_of(model: Any, prompt: Any, plain: Any, ours: torch.Tensor) -> Any:
        calls.append(len(ours))
        if len(calls) == 2:
            ours[0, -1] = plain.scores[-1][0].argmin()
        return original(model, prompt, plain, ours)

    original = ids_of_types.differences_of
    monkeypatch.setattr(ids_of_types, "differences_of", differences_of)
    with pytest.raises(ValueError, match=r"^torch.float32, 1 rows, call 1: Difference\(row=0, column=16"):
        ids_of_types.near_ties_of("llama", torch.device("cpu"), 8)
    assert calls == [1, 1, 3, 3, 1, 1, 3, 3]
