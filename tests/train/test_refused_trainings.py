"""Trainings that are refused before any weight changes."""

import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import PreTrainedModel, Trainer, TrainerCallback

import hf_selfspec
from helpers.architectures import build
from helpers.distributed import WIDTH, exits, rows, tiny, trainer, weights
from helpers.processes import library
from helpers.train.by_hand import ALL, ByHand, assert_close, assert_equal, left_as_it_was, stacked
from hf_selfspec import EarlyExitLoss, LayerDropout
from hf_selfspec.errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from hf_selfspec.train import loss_scale, training


def boom(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("called")


def of_trl(name: str, module: str = "trl") -> Callable[[Any], None]:
    """Makes a trainer one of TRL's."""

    def change(run: Any) -> None:
        library("trl")
        run.__class__ = type("Users", (getattr(importlib.import_module(module), name),), {})

    return change


class Fused(Trainer):
    """Makes the loss of the outputs of TRL's fused head, as ``SFTTrainer`` does it: of their sum."""

    shares = torch.ones(())

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return -(model(**inputs, fused_lm_head=True).log_probs * self.shares).sum() / num_items_in_batch


class Weighing(Fused):
    shares = torch.linspace(0, 1, WIDTH - 1)


def fused(kind: type[Fused]) -> Callable[[Any], None]:
    def change(run: Any) -> None:
        library("trl")
        importlib.import_module("trl.trainer.utils").add_fused_lm_head(run.model)
        run.__class__ = kind

    return change


def late(run: Any) -> None:
    """Adds a callback when a training begins: it cannot change the loss any more, and must not look as if it did."""
    adding = TrainerCallback()
    adding.on_train_begin = lambda *args, **kwargs: run.add_callback(EarlyExitLoss())
    run.add_callback(adding)


def changed(model: PreTrainedModel, config: bool = True, **settings: Any) -> PreTrainedModel:
    for name, value in settings.items():
        setattr(model.config if config else model, name, value)
    return model


# A model, a callback, what is wrong with the run (an argument of the Trainer, or a change to it), and the error.
CASES: list[tuple[Callable[[], Any], Any, Any, type[Exception], list[str]]] = [
    (tiny, EarlyExitLoss, {"label_smoothing_factor": 0.1}, UnsupportedOptionError, ["label_smoothing"]),
    (tiny, EarlyExitLoss, {"settings": {"compute_loss_func": boom}}, UnsupportedOptionError, ["compute_loss_func"]),
    (tiny, EarlyExitLoss, lambda run: setattr(run.args, "_n_gpu", 2), UnsupportedOptionError, ["2 GPUs", "torchrun"]),
    # As TRL's ``SFTConfig`` has it.
    (tiny, EarlyExitLoss, lambda run: setattr(run.args, "loss_type", "dft"), UnsupportedOptionError, ["'dft'"]),
    *((tiny, EarlyExitLoss, of_trl(f"{name}Trainer"), UnsupportedOptionError, [f"TRL's {name}Trainer trains"])
      for name in ("DPO", "GRPO", "Reward")),
    (tiny, EarlyExitLoss, of_trl("GKDTrainer", "trl.experimental.gkd"), UnsupportedOptionError, ["GKDTrainer"]),
    (tiny, EarlyExitLoss, lambda run: [row.pop("labels") for row in run.train_dataset], UnsupportedOptionError,
     ["`labels`", "['attention_mask', 'input_ids']"]),
    (lambda: get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
     lambda: EarlyExitLoss(), {}, UnsupportedModelError, ["[4, 12]", "[4, 10]", "virtual tokens"]),
    (lambda: changed(tiny(), False, loss_function=boom), EarlyExitLoss, {}, UnsupportedModelError, ["function boom"]),
    *((lambda name=name: build(name), EarlyExitLoss, {}, UnsupportedModelError, ["fixes the batch after its last"])
      for name in ("gpt_bigcode", "inkling2_text")),
    (lambda: build("gemma3n_text"), LayerDropout, {}, UnsupportedModelError, ["read keys and values of earlier ones"]),
    (lambda: changed(build("mixtral"), output_router_logits=True), LayerDropout, {}, UnsupportedOptionError,
     ["output_router_logits=True"]),
    (lambda: changed(tiny(), _attn_implementation="flex_attention"), LayerDropout, {}, UnsupportedOptionError,
     ["flex_attention", "'sdpa'"]),
    (tiny, lambda: EarlyExitLoss(layers=[2, 5]), {}, SettingError, ["an exit layer must be at most 4, got 5"]),
    (tiny, lambda: EarlyExitLoss(layers=[1], scale=loss_scale), {}, SettingError,
     ["layers=[1]", "trains no exit", "even"]),
    (tiny, lambda: EarlyExitLoss(scale=lambda i, n, e: i - 1.5), {}, SettingError, ["at least 0", "-1.5"]),
    (tiny, lambda: LayerDropout(0.1), {}, SettingError, ["more than one LayerDropout"]),
    (tiny, EarlyExitLoss, fused(Weighing), UnsupportedModelError, ["the sum of its `log_probs`"]),
    (tiny, TrainerCallback, late, UnsupportedOptionError, ["EarlyExitLoss has to be among the"]),
]  # fmt: skip


@pytest.mark.parametrize(("create", "callback", "wrong", "error", "words"), CASES)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TRL_EXPERIMENTAL_SILENCE")  # in TRL
def test_refused_trainings(
    tmp_path: Path, create: Callable[[], Any], callback: Any, wrong: Any, error: type[Exception], words: list[str]
) -> None:
    """By name, before any weight changes; the other callback is taken away again as well."""
    model = create()
    # Those of the other callback are too small to drop any row.
    callbacks = [LayerDropout(1e-9), callback()] if create is tiny else [callback()]
    run = trainer(model, callbacks, tmp_path, **({} if callable(wrong) else wrong))
    if callable(wrong):
        wrong(run)
    before = weights(model)
    with left_as_it_was(run), pytest.raises(error) as caught:
        run.train()
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_equal(weights(model), before)


def in_loop(*callbacks: Any, times: int = 1, steps: int = 1, forward: Callable[[Any], Any] = lambda model: None) -> Any:
    """A loop of the user's own."""
    with training(model := tiny(), callbacks, steps) as loop:
        for _ in range(times):
            with loop.step():
                forward(model)


def in_copies(model: Any) -> None:
    """As DataParallel runs them."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: model(**stacked(rows(2))).loss.backward()).result()


def from_logits(model: Any) -> None:
    """As a trainer with a loss of its own."""
    model(**stacked(rows(2))).logits.sum().backward()


class FullyShardedDataParallel(torch.nn.Identity):
    """By its name."""


def in_flat_parameters() -> None:
    model = tiny()
    model.model.norm = FullyShardedDataParallel()
    training(model, [LayerDropout()], 1).__enter__()


SETTINGS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "e_scale": (lambda: EarlyExitLoss(math.nan), SettingError, r"e_scale\) must lie between 0 and 1.* nan"),
    "curriculum": (lambda: EarlyExitLoss(curriculum=8), SettingTypeError, r"must be Rotational.* or None, got 8"),
    "exits": (lambda: EarlyExitLoss(layers=[2, 0]), SettingError, "an exit layer must be at least 1, got 0"),
    "p_max": (lambda: LayerDropout(1.0), SettingError, r"p_max\) .*1 excluded.* 1\.0"),
    "schedule": (lambda: LayerDropout(schedule="exponential"), SettingTypeError, r"schedule\) .*'exponential'"),
    "no loss": (lambda: in_loop(EarlyExitLoss(), forward=from_logits),
                UnsupportedModelError, "EarlyExitLoss had no effect"),
    "copies": (lambda: in_loop(LayerDropout(), forward=in_copies), UnsupportedModelError, "LayerDropout had no effect"),
    "FSDP 1": (in_flat_parameters, UnsupportedOptionError, "FSDP version 1"),
    "steps": (lambda: in_loop(LayerDropout(), times=2, forward=lambda model: model(**stacked(rows(2))).loss.backward()),
              SettingError, r"training\(steps=1\) has taken all of its steps"),
    "no callbacks": (in_loop, SettingTypeError, r"callbacks\) must be .* got \(\)"),
    "no steps": (lambda: in_loop(LayerDropout(), steps=0), SettingError, r"training\(steps\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_refused_settings_and_loops(case: str) -> None:
    make, error, words = SETTINGS[case]
    with pytest.raises(error, match=words) as caught:
        make()
    assert type(caught.value) is error


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in TRL
def test_fused_heads_are_served_where_their_outputs_are_summed(tmp_path: Path) -> None:
    run = trainer(tiny(), [exits(1)], tmp_path)
    fused(Fused)(run)
    run.train()
    assert_close(weights(run.model), ByHand(tiny(), lambda step: ALL).weights)


def test_callbacks_without_the_package_are_refused(tmp_path: Path) -> None:
    run = trainer(tiny(), [EarlyExitLoss()], tmp_path)
    hf_selfspec.uninstall()
    try:
        with left_as_it_was(run), pytest.raises(UnsupportedOptionError, match="the one that hf_selfspec wraps"):
            run.train()
    finally:
        hf_selfspec.install()
