"""Trainings that are refused before any weight changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_selfspec
from helpers.architectures import build
from helpers.distributed_training import VOCABULARY, rows, tiny, trainer, weights
from helpers.train.by_hand import assert_equal
from helpers.train.watching import left_as_it_was
from hf_selfspec import (
    EarlyExitLoss,
    LayerDropout,
    SettingError,
    SettingTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)


class LlamaWithoutLayers(LlamaForCausalLM):
    """Says what follows each token from that token alone."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, VOCABULARY, **kwargs), logits=logits)


def with_own_loss_function() -> LlamaForCausalLM:
    model = tiny()
    model.loss_function = boom
    return model


def with_router_logits() -> PreTrainedModel:
    model = build("mixtral")
    model.config.output_router_logits = True
    return model


class Other(LayerDropout):
    """One beside the usual one."""


def with_flex_attention() -> LlamaForCausalLM:
    model = tiny()
    model.config._attn_implementation = "flex_attention"
    return model


class AnExitTooFar:
    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]:
        return frozenset([num_layers])


def every_exit() -> EarlyExitLoss:
    return EarlyExitLoss(curriculum=None)


def boom(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("called")


def mock_data_parallel(run: Any) -> None:
    run.args._n_gpu = 2


def mock_dft(run: Any) -> None:
    """As TRL's ``SFTConfig`` has it."""
    run.args.loss_type = "dft"


def take_the_labels(run: Any) -> None:
    run.train_dataset = [{"input_ids": row["input_ids"]} for row in rows(16)]


def with_virtual_tokens() -> PeftModel:
    return get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def nothing(run: Any) -> None:
    """Leaves it as it is."""


CASES: list[tuple[Callable[[], Any], Any, dict[str, Any], Any, type[Exception], list[str]]] = [
    (tiny, EarlyExitLoss, {"label_smoothing_factor": 0.1}, nothing, UnsupportedOptionError, ["label_smoothing"]),
    (
        tiny,
        EarlyExitLoss,
        {"settings": {"compute_loss_func": boom}},
        nothing,
        UnsupportedOptionError,
        ["compute_loss_func"],
    ),
    (tiny, EarlyExitLoss, {}, mock_data_parallel, UnsupportedOptionError, ["2 GPUs", "DataParallel", "torchrun"]),
    (tiny, lambda: EarlyExitLoss(layers=[2, 5]), {}, nothing, SettingError, ["exit layer 5", "1 to 4"]),
    (lambda: tiny(kind=LlamaWithoutLayers), every_exit, {}, nothing, UnsupportedModelError, ["no effect"]),
    (tiny, EarlyExitLoss, {}, mock_dft, UnsupportedOptionError, ["loss_type='dft'"]),
    (tiny, EarlyExitLoss, {}, take_the_labels, UnsupportedOptionError, ["labels", "['input_ids']"]),
    (with_virtual_tokens, every_exit, {}, nothing, UnsupportedModelError, ["[4, 12]", "[4, 10]", "virtual tokens"]),
    (with_own_loss_function, EarlyExitLoss, {}, nothing, UnsupportedModelError, ["function boom"]),
    (with_router_logits, LayerDropout, {}, nothing, UnsupportedOptionError, ["output_router_logits=True"]),
    (with_flex_attention, LayerDropout, {}, nothing, UnsupportedOptionError, ["flex_attention", "'sdpa'"]),
    (lambda: torch.nn.Linear(2, 2), EarlyExitLoss, {}, nothing, SettingTypeError, ["Linear"]),
    (tiny, lambda: Other(0.1, lambda t, steps: 1.5), {}, nothing, SettingError, ["schedule", "1.5"]),
    (tiny, lambda: LayerDropout(0.1), {}, nothing, SettingError, ["more than one LayerDropout"]),
    (tiny, lambda: EarlyExitLoss(layers=[1]), {}, nothing, SettingError, ["layers=[1]", "trains no exit", "even"]),
    (tiny, lambda: EarlyExitLoss(scale=lambda i, n, e: i - 1.5), {}, nothing, SettingError, ["at least 0", "-1.5"]),
    (tiny, lambda: EarlyExitLoss(curriculum=AnExitTooFar()), {}, nothing, SettingError, ["enabled layer 4"]),
]


@pytest.mark.parametrize(("create", "callback", "options", "prepare", "error", "words"), CASES)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_refused_trainings(
    tmp_path: Path,
    create: Callable[[], Any],
    callback: Callable[[], TrainerCallback],
    options: dict[str, Any],
    prepare: Callable[[Any], None],
    error: type[Exception],
    words: list[str],
) -> None:
    """By name, before any weight changes; the other callback is taken away again as well."""
    model = create()
    # Rates too small to drop any row.
    callbacks = [LayerDropout(1e-9), callback()] if create is tiny else [callback()]
    run = trainer(model, callbacks, tmp_path, **options)
    prepare(run)
    before = weights(model)
    with left_as_it_was(run), pytest.raises(error) as caught:
        run.train()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert_equal(weights(model), before)


def test_callbacks_that_come_too_late_are_refused(tmp_path: Path) -> None:
    """What cannot change the loss any more must not look as if it did."""

    class Late(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            run.add_callback(EarlyExitLoss())

    run = trainer(tiny(), [Late()], tmp_path)
    with (
        left_as_it_was(run),
        pytest.raises(UnsupportedOptionError, match="has to be among the callbacks"),
    ):
        run.train()
    run = trainer(tiny(), [EarlyExitLoss()], tmp_path)
    hf_selfspec.uninstall()
    try:
        with left_as_it_was(run), pytest.raises(UnsupportedOptionError, match="the one that hf_selfspec wraps"):
            run.train()
    finally:
        hf_selfspec.install()
