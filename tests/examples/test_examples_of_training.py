"""Examples of training and evaluation with other libraries, on the demo model."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from helpers.models import ragged_batch, tiny_llama
from helpers.processes import EXAMPLES, library

DEMO = str(EXAMPLES / "demo_model")

# What TRL and lm-eval do, and theirs.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(library("datasets").config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_supervised_fine_tuning_with_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library("trl")
    texts = [{"text": f"def read_{name}(path):\n    return open(path).{name}()\n"} for name in "abcdefghij" * 4]
    output = tmp_path / "adapters"
    settings = ["--steps", "2", "--rank", "2", "--max-length", "64"]
    example = importlib.import_module("lora_layerskip")
    example.main(
        ["--model", DEMO, "--data", lines(tmp_path / "texts.jsonl", texts), "--output", str(output), *settings]
    )
    assert (output / "adapter_model.safetensors").exists()
    assert "| 24 |" in (output / "exits.md").read_text()
    assert "| 24 |" in capsys.readouterr().out


@pytest.mark.parametrize("lora", [False, True])
def test_the_task_by_either_trainer(lora: bool, tmp_path: Path) -> None:
    """The stock Trainer and TRL's come to the same weights, with both callbacks."""
    library("trl")
    example = importlib.import_module("finetune_task")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tiny_llama(layers=4, vocabulary=len(tokenizer)).save_pretrained(tmp_path / "start")
    pairs = [example.encode(tokenizer, example.TASKS["signature"], f"def name{at}(x, y={at}):") for at in range(12)]
    found, settings = [], {"model": str(tmp_path / "start"), "steps": 3, "batch_size": 2, "fp32": True, "lora": lora}
    for sft in (False, True):
        folder = tmp_path / f"checkpoints {sft}"
        folder.mkdir()
        found.append(example.train_model(example.Recipe(**settings, sft=sft), tokenizer, pairs, folder).state_dict())
    start = example.load(tmp_path / "start").state_dict()
    assert any(not torch.allclose(value, start[name], atol=1e-3) for name, value in found[0].items())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-4, rtol=1e-3)


class Exactness(TrainerCallback):
    """Compares greedy texts with plain generate's after each optimizer step."""

    def __init__(self) -> None:
        self.equal: list[bool] = []
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inputs = ragged_batch((5, 9), vocabulary=4096)
        options = {"max_new_tokens": 16, "do_sample": False}
        model.eval()
        with torch.no_grad():
            drafted = model.generate(**inputs, **options)
            self.equal.append(torch.equal(drafted, model.generate(**inputs, **options, assistant=False)))
        model.train()
        self.weights.append(next(p for p in model.parameters() if p.requires_grad).detach().clone())


@pytest.mark.every_run("lora")
@pytest.mark.parametrize("adapters", [[], ["--lora"]], ids=["whole", "lora"])
def test_rollouts_of_a_policy_that_learns(adapters: list[str], tmp_path: Path) -> None:
    library("trl")
    example, exactness = importlib.import_module("grpo_rollouts"), Exactness()
    arguments = ["--model", DEMO, "--output", str(tmp_path), "--steps", "3", "--max-new-tokens", "16", *adapters]
    spec = example.main(arguments, callbacks=[exactness])
    assert exactness.equal == [True] * 3
    assert not torch.equal(exactness.weights[0], exactness.weights[-1])
    assert sum(stats.tokens for stats in spec._knowledge.calls) >= 3 * 8 * 8
    # The policy goes on where it was, with what the SelfSpec knows, and is saved again.
    arguments[1:6:4], begun = [str(tmp_path), "1"], list[torch.Tensor]()

    class Begins(TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            begun.extend(p.detach().clone() for p in model.parameters() if p.requires_grad)

    saved = (tmp_path / "selfspec.json").read_bytes()
    assert example.main(arguments, callbacks=[exactness, Begins()])._knowledge.saved is not None
    assert exactness.equal == [True] * 4
    assert torch.equal(begun[0], exactness.weights[2])
    assert (tmp_path / "selfspec.json").read_bytes() != saved


@pytest.mark.slow
def test_scores_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("lm_eval")
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    documents = [{"prompt": f"def {name}_text(path):\n", "answer": ""} for name in ("read", "write", "copy")]
    task = {
        "task": "bodies",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": lines(tmp_path / "documents.jsonl", documents)}},
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
    arguments = ["--model", str(folder), "--tasks", "bodies", "--include", str(tmp_path), "--batch-size", "2"]
    drafted, plain = (
        [document["resps"] for document in example.main([*arguments, *way])["bodies"]] for way in ([], ["--plain"])
    )
    assert drafted == plain
    assert any(text for [[text]] in drafted)
