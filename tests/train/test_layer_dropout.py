"""Rows that drop a layer leave the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments, default_data_collator

from helpers.distributed_training import LAYERS, Row, rows, tiny, weights
from helpers.train.by_hand import SEED, ByHand, assert_close, assert_equal, history, rotational_shares, stays, train
from helpers.train.watching import RowsSeen
from hf_selfspec import EarlyExitLoss, LayerDropout, Rotational
from hf_selfspec.train import loss_scale


def test_dropped_rows_leave_the_batch(tmp_path: Path) -> None:
    """Layers run on as many rows as stay; in evaluation on all."""
    model = tiny()
    rows_seen = RowsSeen(model)
    evaluated = {"settings": {"eval_dataset": rows(3)}, "eval_strategy": "steps", "eval_steps": 6}
    train(tmp_path, [LayerDropout(0.9)], model, max_steps=12, **evaluated)
    assert rows_seen.steps == [stays(step, 4, 0.9).sum(0).tolist() for step in range(12)]
    assert {counts[0] for counts in rows_seen.steps} == {4}
    assert {counts[3] for counts in rows_seen.steps} >= {0, 1}
    assert rows_seen.evaluations == [[3] * LAYERS] * 2


@pytest.mark.parametrize("p_max", [0.6, 0.9])
def test_training_with_dropout(tmp_path: Path, p_max: float) -> None:
    """``x + M f(x)`` by hand, where ``M`` is 0 or 1 and nothing is scaled; beside exits and alone."""
    for callbacks, shares in (
        ([LayerDropout(p_max)], lambda step: {4: 1.0}),
        ([EarlyExitLoss(1.0, Rotational(2), scale=loss_scale), LayerDropout(p_max)], rotational_shares),
        ([LayerDropout(p_max), EarlyExitLoss(1.0, Rotational(2), scale=loss_scale)], rotational_shares),
    ):
        expected = ByHand(tiny(), shares, p_max=p_max)
        run = train(tmp_path, callbacks)
        assert history(run) == pytest.approx(expected.losses, rel=1e-5)
        assert_close(weights(run.model), expected.weights)
    assert abs(expected.losses[0] - ByHand(tiny(), shares, steps=1).losses[0]) > 1e-3


def test_no_dropout_is_plain_training_and_another_seed_draws_other_rows(tmp_path: Path) -> None:
    without, plain = train(tmp_path, [LayerDropout(0.0)]), train(tmp_path, [])
    assert history(without) == history(plain)
    assert_equal(weights(without.model), weights(plain.model))
    first, other = train(tmp_path, [LayerDropout(0.6)]), train(tmp_path, [LayerDropout(0.6)], seed=SEED + 1)
    assert history(first)[0] != history(other)[0]


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}], ids=["positions", "ends"])
def test_packed_sequences_are_samples(tmp_path: Path, options: dict[str, bool]) -> None:
    """One row of four sequences, which drop layers as four rows do; beside exits and alone."""
    data = [{name: row[name] for name in ("input_ids", "labels")} for row in rows(16)]
    for callbacks, shares in (
        ([LayerDropout(0.6)], lambda step: {4: 1.0}),
        ([LayerDropout(0.6), EarlyExitLoss(1.0, Rotational(2), scale=loss_scale)], rotational_shares),
    ):
        expected = ByHand(tiny(), shares, p_max=0.6)
        settings = {"data_collator": DataCollatorWithFlattening(**options)}
        run = train(tmp_path, callbacks, data=data, settings=settings)
        assert history(run) == pytest.approx(expected.losses, rel=1e-5)
        assert_close(weights(run.model), expected.weights)


def test_ranks_drop_their_own_sequences_where_layers_run_anyway(tmp_path: Path, monkeypatch: Any) -> None:
    """That is, in packed rows, where processes have samples of their own; also of a row that is one sequence."""
    monkeypatch.setattr(TrainingArguments, "process_index", 1)
    flat = {"data_collator": DataCollatorWithFlattening()}
    data = [{name: row[name] for name in ("input_ids", "labels")} for row in rows(16)]
    for options, rank in (({"data": data, "settings": flat}, (1,)), ({}, ())):
        expected = ByHand(tiny(), lambda step: {4: 1.0}, p_max=0.6, rank=rank)
        run = train(tmp_path, [callback := LayerDropout(0.6)], **options)
        assert_close(weights(run.model), expected.weights)
    model = tiny()
    rows_seen = RowsSeen(model)
    train(tmp_path, [LayerDropout(0.9)], model, data=data, settings=flat, per_device_train_batch_size=1)
    assert rows_seen.steps == [[1] * LAYERS] * 3
    monkeypatch.setattr(run, "get_tp_size", lambda: 2)
    callback.check(run)
    assert callback._rank == 0


def test_embeddings_as_inputs(tmp_path: Path) -> None:
    """Rows are counted where the rows are, also where positions have one row for all."""

    def collate(samples: list[Row]) -> Row:
        batch = default_data_collator(samples)
        embeddings = tiny().model.embed_tokens(batch["input_ids"]).detach()
        positions = torch.arange(embeddings.shape[1])[None]
        return {"position_ids": positions, "inputs_embeds": embeddings, "labels": batch["labels"]}

    model = tiny()
    rows_seen = RowsSeen(model)
    train(tmp_path, [LayerDropout(0.6)], model, settings={"data_collator": collate})
    assert rows_seen.steps == [stays(step, 4, 0.6).sum(0).tolist() for step in range(3)]


def test_forwards_without_gradients_drop_nothing(tmp_path: Path) -> None:
    """Such as those of a reference between the forward and the backward of a step, which they leave alone."""

    class WithReference(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            with torch.no_grad():
                model(**inputs)
            return loss

    expected = train(tmp_path, [LayerDropout(0.6), EarlyExitLoss()])
    model = tiny()
    rows_seen = RowsSeen(model)
    callbacks = [LayerDropout(0.6), EarlyExitLoss()]
    run = WithReference(model, expected.args, train_dataset=rows(16), callbacks=callbacks)
    run.train()
    assert_equal(weights(model), weights(expected.model))
    assert history(run) == history(expected)
    assert rows_seen.steps[1::2] == [[4] * LAYERS] * 3
    assert rows_seen.steps[::2] == [stays(step, 4, 0.6).sum(0).tolist() for step in range(3)]
