"""Rows that drop a layer leave the batch, at the rates of LayerSkip's formula."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DataCollatorWithFlattening, Trainer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from helpers.distributed import LAYERS, WIDTH, Row, exits, rows, rows_seen, tiny, weights
from helpers.train.by_hand import (
    SEED,
    ByHand,
    assert_close,
    assert_equal,
    both,
    history,
    rotational_shares,
    stacked,
    stays,
    train,
)
from hf_selfspec import EarlyExitLoss, LayerDropout, UnsupportedOptionError
from hf_selfspec.train import exponential, training


def test_rates() -> None:
    """``p = S(t) D(l) p_max`` with the powers of two that ``e^{x ln 2}`` are."""
    powers = [2**0.0 - 1, 2**0.25 - 1, 2**0.5 - 1, 2**0.75 - 1, 1.0]
    assert LayerDropout(0.2).rates(0, 5, 5) == pytest.approx([0.2 * power for power in powers])
    for step, share in enumerate(powers):
        rates = LayerDropout(0.2, exponential).rates(step, 5, 5)
        assert rates == pytest.approx([0.2 * share * power for power in powers])
    assert LayerDropout(0.2, lambda step, steps: step / steps).rates(1, 4, 2) == pytest.approx([0.0, 0.05])
    assert LayerDropout(0.5).rates(0, 8, 1) == LayerDropout(0.5, exponential).rates(0, 1, 1) == [0.0]


def test_training_with_dropout(tmp_path: Path) -> None:
    """``x + M f(x)`` by hand, where ``M`` is 0 or 1 and nothing is scaled; beside exits and alone."""
    for callbacks, shares in (
        ([LayerDropout(0.9)], lambda step: {4: 1.0}),
        ([exits(), LayerDropout(0.9)], rotational_shares),
        ([LayerDropout(0.9), exits()], rotational_shares),
    ):
        expected = ByHand(tiny(), shares, p_max=0.9)
        run = train(tmp_path, callbacks)
        assert history(run) == pytest.approx(expected.losses, rel=1e-5)
        assert_close(weights(run.model), expected.weights)
    assert abs(expected.losses[0] - ByHand(tiny(), shares, steps=1).losses[0]) > 1e-3


def test_callbacks_of_no_weight_are_plain_training_and_another_seed_draws_other_rows(tmp_path: Path) -> None:
    without, plain = train(tmp_path, [EarlyExitLoss(0.0), LayerDropout(0.0)]), train(tmp_path, [])
    assert history(without) == history(plain)
    assert_equal(weights(without.model), weights(plain.model))
    first, other = (history(train(tmp_path, [LayerDropout(0.6)], seed=seed)) for seed in (SEED, SEED + 1))
    assert first[0] != other[0]


def embedded(samples: list[Row]) -> Row:
    """Embeddings instead of ids, with positions that have one row for all."""
    batch = stacked(samples)
    embeddings = tiny().model.embed_tokens(batch["input_ids"]).detach()
    return {"position_ids": torch.arange(WIDTH)[None], "inputs_embeds": embeddings, "labels": batch["labels"]}


@pytest.mark.parametrize(
    ("collate", "samples", "steps"),
    [
        (None, 4, 12),
        (DataCollatorWithFlattening(), 1, 3),
        (DataCollatorWithFlattening(return_flash_attn_kwargs=True), 1, 3),
        (embedded, 4, 3),
    ],
    ids=["rows", "packed", "packed with ends", "embedded"],
)
def test_dropped_rows_leave_the_batch(tmp_path: Path, collate: Any, samples: int, steps: int) -> None:
    """Layers run on as many as stay. A row is a sample: all sequences of a packed one run through a layer, or none."""
    model, data = tiny(), [{name: row[name] for name in ("input_ids", "labels")} for row in rows(16)]
    seen = rows_seen(model)
    train(tmp_path, [LayerDropout(0.9)], model, data=data, settings={"data_collator": collate}, max_steps=steps)
    assert seen == [stays(step, samples, 0.9).sum(0).tolist() for step in range(steps)]
    assert {counts[0] for counts in seen} == {samples}


def test_ends_that_go_over_several_rows_are_refused() -> None:
    ends = {"cu_seq_lens_q": torch.tensor([0, 4, 20])}
    with training(model := tiny(), [LayerDropout()], steps=1) as loop, loop.step():
        with pytest.raises(UnsupportedOptionError, match="cu_seq_lens_q go over all"):
            model(**stacked(rows(2)), **ends)
        model(**stacked(rows(2))).loss.backward()


def test_forwards_without_gradients_drop_nothing(tmp_path: Path) -> None:
    """Such as those of a reference between the forward and the backward of a step, which they leave alone."""

    class WithReference(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            with torch.no_grad():
                model(**inputs)
            return loss

    expected, model = train(tmp_path, both()), tiny()
    seen = rows_seen(model)
    run = WithReference(model, expected.args, train_dataset=rows(16), callbacks=both())
    run.train()
    assert_equal(weights(model), weights(expected.model))
    assert history(run) == history(expected)
    assert seen[1::2] == [[4] * LAYERS] * 3
    assert seen[::2] == [stays(step, 4, 0.6).sum(0).tolist() for step in range(3)]


class Around(LlamaDecoderLayer):
    """As layers were before transformers 5.23, and as the code of models may have it: checkpointing runs all of a call
    again, also what stands in place of the forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = partial(super().__call__, **kwargs)
        if self.is_own:
            return self._gradient_checkpointing_func(again, *args)
        return checkpoint(again, *args, use_reentrant=False)


def gradients(is_own: bool | None, waits: bool, reentrant: bool = False) -> dict[str, torch.Tensor]:
    """Of two batches in one step, with the model's own checkpointing, another, or none: ``waits`` for one backward."""
    model, batches = tiny().train(), [stacked(rows(4, seed)) for seed in (1, 2)]
    if is_own is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for layer in model.model.layers:
            layer.__class__, layer.is_own, layer.gradient_checkpointing = Around, is_own, False
    with training(model, [LayerDropout(0.9)], steps=1) as loop, loop.step():
        losses = []
        for batch in batches:
            losses.append(model(**batch, use_cache=False).loss)
            if not waits:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_layers_that_run_again_leave_out_the_same_rows() -> None:
    """Also where another forward came between, as with pairs; checkpointing that is not the model's is refused."""
    for waits, reentrant in ((True, False), (True, True), (False, False)):
        assert_close(gradients(True, waits, reentrant), gradients(None, waits))
    with pytest.raises(UnsupportedOptionError, match="LayerDropout cannot tell which forward gradient checkpointing"):
        gradients(False, waits=False)
