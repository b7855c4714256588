"""Evaluation, checkpoints, and models as they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainerCallback

from helpers.distributed_training import LAYERS, rows, tiny, trainer, weights
from helpers.train.by_hand import BOTH, assert_equal, exit_loss, history, stacked, targets, train
from hf_selfspec import EarlyExitLoss, Gradual, LayerDropout
from hf_selfspec.train import exponential


def test_evaluation(tmp_path: Path) -> None:
    """Its loss is the plain model's, and the training goes on as if there had been none."""
    snapshots: list[dict[str, torch.Tensor]] = []

    class Snapshot(TrainerCallback):
        def on_evaluate(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            snapshots.append(weights(model))

    evaluated = rows(6, seed=9)
    run = trainer(
        tiny(),
        [*BOTH["both"](), Snapshot()],
        tmp_path,
        settings={"eval_dataset": evaluated},
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        per_device_eval_batch_size=6,
    )
    run.train()
    unevaluated = train(tmp_path, BOTH["both"]())
    assert_equal(weights(run.model), weights(unevaluated.model))
    for key in ("loss", "loss/exit_2", "loss/exit_3", "loss/exit_4"):
        assert history(run, key) == history(unevaluated, key)
    batch = stacked(evaluated)
    found = history(run, "eval_loss")
    assert len(found) == len(snapshots) == 4
    for loss, snapshot in zip(found, snapshots, strict=True):
        model = tiny().eval()
        model.load_state_dict(snapshot)
        with torch.no_grad():
            assert loss == pytest.approx(exit_loss(model, batch, LAYERS).item() / targets(batch), rel=1e-5)
    assert not any("exit" in key for entry in run.state.log_history if "eval_loss" in entry for key in entry)


def test_resume(tmp_path: Path) -> None:
    """From a checkpoint in the middle, with shuffled data and Adam: the same weights and the same logs."""
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "random",
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def callbacks() -> list[TrainerCallback]:
        return [EarlyExitLoss(1.0, Gradual()), LayerDropout(0.6, exponential)]

    whole = train(tmp_path / "whole", callbacks(), **options)
    resumed = trainer(tiny(seed=5), callbacks(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(weights(resumed.model), weights(whole.model))
    keys = {key for entry in whole.state.log_history for key in entry if "loss" in key and key != "train_loss"}
    assert keys == {"loss", "loss/exit_2", "loss/exit_3", "loss/exit_4"}
    for key in keys:
        assert history(resumed, key) == history(whole, key)


def test_saved_models_are_ordinary(tmp_path: Path) -> None:
    """A checkpoint of a training and what is saved after it: the keys of before, loadable without this package."""
    model = tiny(tied=True)
    keys = list(model.state_dict())
    train(tmp_path / "run", BOTH["both"](), model, save_strategy="steps", save_steps=3).save_model(tmp_path / "end")
    model.save_pretrained(tmp_path / "model")
    assert list(model.state_dict()) == keys
    model.eval()
    ids = stacked(rows(2))["input_ids"]
    for folder in (tmp_path / "model", tmp_path / "end", tmp_path / "run" / "checkpoint-3"):
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())
        assert type(loaded) is LlamaForCausalLM
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert "loss" not in (folder / "config.json").read_text()
