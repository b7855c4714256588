"""Every script of ``examples``, each with its smallest setting, as a user starts it."""

import importlib
import json
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from helpers.calls import PLAIN
from helpers.models import ragged_batch, tiny_llama
from helpers.processes import DEMO_MODEL, EXAMPLES, TESTS, in_two_processes, library, python
from hf_selfspec import SelfSpec
from hf_selfspec.model.kernels.packing import kernel_for
from hf_selfspec.model.patching import evaluating

BENCHMARKS = EXAMPLES / "benchmarks"
# What scripts share, which start nothing, and servers, of which `test_services` takes care.
SHARED = {"corpus", "fitting", "gpu_ids", "gpu_parts", "known_text", "synthetic", "tables", "tasks", "timing"}
SERVERS = {"chat", "openai_server", "service"}
OTHERS = {"agent", "all", "lm_eval_scores", "ray_batches"}
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
    "exits, by exit": ("--model {model} --prompts 1 --tokens 8 --by-exit", ("| plain |",)),
    "stops": (f"{FITTED} --files 2", ("| AdaSPEED with the probe |",)),
    "parts": (
        "--model {model} --text {folder}/answers.jsonl --data {tasks} --prompts 1 --tokens 8 --exit-layer 2 --rank 4 "
        "--block-size 32 --out {folder}/fitted",
        ("| mtp3 |",),
    ),
    "heads": ("--copied --repeats 1 --prompts 1 --tokens 8 --files 16 --out {folder}/fitted", ("| DSSD, ε = 0.9 |",)),
    "windows": ("--kinds mistral gpt_oss --prompts 200 --repeats 1 --tokens 4", ("| mistral | 200 |", "equal |")),
    "gpu": ("--device cpu --small --out {folder}/gpu", ("| 8b | 64 x 2 | 8 |", "17 of 17 cases ended well.")),
    "pictures": ("--out {folder}/pictures", ("how-dark.svg", "kinds-light.svg")),
    "quickstart": ("--model {model} --tokens 6 --no-color", ("tokens equal to plain generate: yes", "‹")),
    "train_demo_model": ("--steps 2 --held-out-blocks 2 --threads 1 --output {folder}/model", ("bits per byte",)),
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
    "engine", "exits", "finetune_task", "finetune_task, gsm8k", "finetune_task, lora", "gpu",
    "grammar", "heads", "known_answer", "parts", "stops", "train_demo_model", "training", "windows",
}  # fmt: skip

# What TRL and lm-eval do, and theirs.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore:Passing `generation_config` together",
    "ignore:fit_exit_heads. these exit heads reach none",  # fitted to next to nothing
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
        "answers": [{"input_ids": list(range(2, 802))}],
        "problems": [{"question": f"How many is {answer[:7]}?", "answer": answer} for answer in numbers],
    }
    for name, of_file in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, of_file)))
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

    def started(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[0] != sys.executable:  # as matplotlib looks for fonts
            return of_others(command, **options)
        words, (_, script, *given) = sys.argv, command
        printed = run(Path(script).stem, *given)
        monkeypatch.setattr(sys, "argv", words)
        return subprocess.CompletedProcess(command, 0, printed, "")

    of_others = subprocess.run
    monkeypatch.setattr(subprocess, "run", started)
    return run


def test_every_script_is_a_case() -> None:
    scripts = {path.stem for path in [*EXAMPLES.glob("*.py"), *BENCHMARKS.glob("*.py")]}
    assert scripts == {name.split(",")[0] for name in CASES} | SHARED | SERVERS | OTHERS


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_the_smallest_setting(name: str, places: dict[str, Path], run: Callable[..., str]) -> None:
    script, (words, expected) = name.split(",")[0], CASES[name]
    if script in LIBRARIES:
        library(LIBRARIES[script])
    if script == "fewer_bits" and kernel_for(torch.device("cpu"), torch.bfloat16) is None:
        with pytest.raises(SystemExit, match="torch has no kernel for four bits"):
            run(script, *words.split())
        pytest.skip("torch has no kernel for four bits on this CPU")
    printed = run(script, *(word.format(**places) for word in words.split()))
    for part in expected:
        assert part in printed


def test_tables_are_those_of_the_results() -> None:
    """``python examples/benchmarks/tables.py`` writes them; each file is shown, and its command can be started."""
    tables, every = importlib.import_module("tables"), importlib.import_module("all")
    texts = {path: path.read_text(encoding="utf-8") for path in tables.DOCUMENTS}
    assert [tables.rendered(text, path.parent) for path, text in texts.items()] == list(texts.values())
    for path in tables.RESULTS.glob("*.json"):
        assert any(f"<!-- {path.stem} -->" in text or f"results/{path.name})" in text for text in texts.values()), path
        for command in {tables.read(path.stem).get("again"), tables.read(path.stem)["command"]} - {None}:
            _, words = every.words_of(command, {})
            assert words[1:4] == ["-m", "hf_selfspec", "bench"] or (EXAMPLES.parent / words[1]).exists()


def answers_of(folder: Path, prompts: list[str], tokens: int) -> list[str]:
    """What plain generate answers."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    encoded = [tokenizer(prompt, return_tensors="pt", return_token_type_ids=False) for prompt in prompts]
    found = [model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0] for inputs in encoded]
    pairs = zip(found, encoded, strict=True)
    return [tokenizer.decode(ids[each["input_ids"].shape[1] :], skip_special_tokens=True) for ids, each in pairs]


def test_answers_to_prompts_with_a_chat_template(places: dict[str, Path], run: Callable[..., str]) -> None:
    """What the template adds is in the prompt."""
    data, output = places["tasks"], places["folder"] / "answers.jsonl"
    words = ("--model", str(places["model"]), "--data", str(data), "--output", str(output), "--max-new-tokens", "6")
    data.write_text('{"prompt": "def a(x):"}\n')
    (places["model"] / "chat_template.jinja").write_text("class {{ messages[0].content }}")
    run("batch_inference", *words)
    (answer,) = answers_of(places["model"], ["class def a(x):"], 6)
    assert json.loads(output.read_text()) == {"prompt": "def a(x):", "answer": answer}
    data.write_text('{"prompt": "x"}\n\n{"question": "y"}\n')
    with pytest.raises(SystemExit, match=r"line 3: KeyError\('prompt'\); a line is"):
        run("batch_inference", *words)


PROMPTS = [f"def {name}(path):\n" for name in ("read_text", "write_lines", "remove", "copy_file", "size_of")]


@pytest.mark.slow
def test_batches_on_ray_go_on_where_a_run_was_stopped(
    tmp_path: Path, in_float32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two local actors; the second run has one prompt more, and answers no other."""
    library("ray")
    # Of a machine with fewer, two actors, a reader and Ray's look at checkpoints would wait for each other.
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 8}')
    data, answers = tmp_path / "prompts.jsonl", list[Any]()
    words = ("--rows", "2", "--max-new-tokens", "8", "--checkpoints", tmp_path / "checkpoints", "--data", data)
    for count in (4, 5):
        data.write_text("".join(json.dumps({"id": at, "prompt": PROMPTS[at]}) + "\n" for at in range(count)))
        folder = tmp_path / "answers" / str(count)
        python(EXAMPLES / "ray_batches.py", "--model", in_float32, "--output", folder, *words)
        answers.append([json.loads(line) for file in folder.glob("*") for line in file.read_text().splitlines()])
    assert [sorted(answer["id"] for answer in run) for run in answers] == [[0, 1, 2, 3], [4]]
    found = {answer["id"]: answer["answer"] for answer in chain(*answers)}
    assert [found[at] for at in range(5)] == answers_of(in_float32, PROMPTS, 8)


@pytest.fixture
def in_float32(tmp_path: Path) -> Path:
    """The demo model. In bfloat16, as it is saved, next tokens are equally likely at times, and any may be taken."""
    AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).save_pretrained(tmp_path / "demo")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.slow
def test_processes_answer_their_share_and_draft_from_their_answers(tmp_path: Path, in_float32: Path) -> None:
    data, output, cache = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "cache"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    options = ("--model", in_float32, "--max-new-tokens", "24", "--data", data, "--output", output)
    in_two_processes(EXAMPLES / "batch_inference.py", *options, "--cache-dir", cache)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    expected = zip(PROMPTS, answers_of(in_float32, PROMPTS, 24), strict=True)
    assert [(answer["prompt"], answer["answer"]) for answer in answers] == list(expected)
    model, tokenizer = (kind.from_pretrained(in_float32) for kind in (AutoModelForCausalLM, AutoTokenizer))
    inputs, rounds = tokenizer(PROMPTS[-1], return_tensors="pt"), list[int]()
    for folder in (None, cache):
        spec = SelfSpec(cache_dir=folder, task="process-1")
        model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant=spec)
        rounds.append(spec.stats.rounds)
    assert rounds[1] < rounds[0]  # by how much depends on times, too
    data.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")  # none for the second process
    in_two_processes(EXAMPLES / "batch_inference.py", *options)
    assert len(output.read_text().splitlines()) == 1


@pytest.mark.parametrize("lora", [False, True])
def test_the_task_by_either_trainer(lora: bool, places: dict[str, Path]) -> None:
    """The stock Trainer and TRL's come to the same weights, with both callbacks; answers and their ends have labels."""
    library("trl")
    example, tokenizer = importlib.import_module("finetune_task"), AutoTokenizer.from_pretrained(DEMO_MODEL)
    pairs = [example.encode(tokenizer, example.TASKS["signature"], f"def name{at}(x, y={at}):") for at in range(12)]
    labels = example.collator(tokenizer)(list(example.TrainingPairs(pairs[:1])))["labels"][0].tolist()
    assert labels == [-100] * len(pairs[0].prompt) + pairs[0].answer
    found, settings = [], {"model": str(places["model"]), "steps": 2, "batch_size": 2, "fp32": True, "lora": lora}
    for sft in (False, True):
        (folder := places["folder"] / f"checkpoints {sft}").mkdir()
        found.append(example.train_model(example.Recipe(**settings, sft=sft), tokenizer, pairs, folder).state_dict())
    start = example.load(places["model"]).state_dict()
    assert any(not torch.allclose(value, start[name], atol=1e-3) for name, value in found[0].items())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_rollouts_of_a_policy_that_learns(places: dict[str, Path]) -> None:
    """Greedy texts are plain's after each step; and it goes on where it was, with what the SelfSpec knows."""
    library("trl")
    example, policy = importlib.import_module("grpo_rollouts"), places["folder"] / "policy"
    equal, seen, looking = list[bool](), list[torch.Tensor](), TrainerCallback()
    inputs, options = ragged_batch((5, 9), vocabulary=4096), {"max_new_tokens": 16, "do_sample": False}

    def look(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        seen.append(next(each for each in model.parameters() if each.requires_grad).detach().clone())
        with torch.no_grad(), evaluating(model):
            equal.append(torch.equal(*(model.generate(**inputs, **options, **way) for way in ({}, PLAIN))))

    looking.on_train_begin = looking.on_step_end = look
    saved = []
    for model in (places["model"], policy):
        words = ["--output", str(policy), "--max-new-tokens", "16", "--lora", "--steps", "2", "--model", str(model)]
        example.main(words, callbacks=[looking])
        saved.append((policy / "selfspec.json").read_bytes())
    assert equal == [True] * 6
    assert torch.equal(*seen[2:4])
    assert not torch.equal(seen[3], seen[-1])
    assert saved[0] != saved[1]


@pytest.mark.slow
def test_scores_of_lm_eval(tmp_path: Path, in_float32: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    library("lm_eval")
    documents = [json.dumps({"prompt": prompt, "answer": ""}) for prompt in PROMPTS[:3]]
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    task = {
        **{"task": "bodies", "output_type": "generate_until", "test_split": "test"},
        **{"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}}},
        **{"doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]},
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
    }
    (tmp_path / "bodies.yaml").write_text(json.dumps(task))  # which is YAML
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module("lm_eval_scores")
    arguments = ["--model", str(in_float32), "--tasks", "bodies", "--include", str(tmp_path), "--batch-size", "2"]
    results = [example.main([*arguments, *way])["bodies"] for way in ([], ["--plain"])]
    drafted, plain = ([document["resps"] for document in result] for result in results)
    assert drafted == plain
    assert any(text for [[text]] in drafted)
    assert "rows advance together" not in capsys.readouterr().out  # each at its own pace


@pytest.mark.slow
def test_an_agent_streams_from_a_thread(places: dict[str, Path]) -> None:
    library("smolagents")
    example = importlib.import_module("agent")
    words = ["count", "--model", str(places["model"]), "--steps", "1", "--max-new-tokens", "16"]
    drafted, plain = (example.main([*words, *way]) for way in ([], ["--plain"]))
    assert drafted == plain
    assert any(drafted)


def test_all_parts_of_a_gpu_run(tmp_path: Path) -> None:
    """Made small, on a pretended device: what ends a part on a GPU before it has begun fails here."""
    printed = python(TESTS / "helpers" / "run_gpu_script.py", tmp_path).stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    cases = {(line["part"], line["case"]) for line in lines if "call" in line}
    assert not [line for line in lines if "failed" in line or "skipped" in line]
    assert f"{len(cases)} of {len(cases)} cases ended well." in printed
    assert {part for part, _ in cases} == {"probe", "ids", "135m", "1b", "8b", "soak"}
    for part, case in (("135m", "64 x 1"), ("1b", "64 x 1"), ("8b", "64 x 1"), ("8b", "64 x 2")):
        of_case = [line for line in lines if (line["part"], line["case"]) == (part, case)]
        for repeated in (0, 3, 8):
            assert f"| {part} | {case} | {repeated} |" in printed
        packed = {"four bits"} if (part, case) == ("8b", "64 x 1") else set()
        assert {line["way"] for line in of_case if "way" in line} == {"plain", "static", "ours"} | packed
        assert (f"| {part} | {case} | 0, four bits |" in printed) == bool(packed)
        assert any("logits_ours" in line for line in of_case)
        assert {line["of"] for line in of_case if "kernels_a_token" in line} == {"ours", "static"}


# Parts in the place of those of ``gpu.py``. The file "mended" makes all that has failed work.
PARTS_THAT_FAIL = """
import os, time
from pathlib import Path

class Bench:
    machine = "a machine"

    def __init__(self, part, device, is_small):
        self.part, self.cases = part, {"first": self.fail, "second": lambda: self.tell(figure=1)}

    def fail(self):
        self.tell(figure=2)
        if not (Path(__file__).parent / "mended").exists():
            {"probe": lambda: int("CUDA"), "135m": lambda: time.sleep(60), "ids": lambda: os._exit(3)}[self.part]()
"""
ENDS = (
    "| probe | first | failed | ValueError: invalid literal for int() with base 10: 'CUDA' |",
    "| 135m | first | failed | the part's time was over |",
    "| 135m | second | not reached |  |",
    "| ids | first | failed | its process ended with code 3 |",
)


def test_a_gpu_run_goes_on_and_what_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "gpu_of_test.py").write_text((BENCHMARKS / "gpu.py").read_text())
    (tmp_path / "gpu_parts.py").write_text(PARTS_THAT_FAIL)
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path), "--small"])
    monkeypatch.syspath_prepend(tmp_path)
    gpu = importlib.import_module("gpu_of_test")
    monkeypatch.setattr(gpu, "SECONDS", {"probe": 6, "135m": 2, "ids": 30})
    gpu.main()
    printed = capsys.readouterr().out
    assert [line for line in ENDS if line not in printed] == []
    first = gpu.cases_in(tmp_path)
    assert first["ids", "first"][1]["figure"] == 2, "what a case has told before it failed is kept"
    (tmp_path / "mended").touch()
    gpu.main()
    assert "9 of 9 cases ended well." in capsys.readouterr().out
    assert gpu.cases_in(tmp_path)["ids", "second"] == first["ids", "second"], "it ended well, and ran once"
