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
from helpers.distributed_training import WIDTH, rows, tiny, trainer, weights
from helpers.processes import library
from helpers.train.by_hand import ALL, ByHand, assert_close, assert_equal, stacked
from helpers.train.watching import left_as_it_was
from hf_selfspec import (
    EarlyExitLoss,
    LayerDropout,
    Rotational,
    SettingError,
    SettingTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_selfspec.train import loss_scale, training


def boom(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("called")


def of_trl(name: str, module: str = "trl") -> Callable[[Any], None]:
    """Makes a trainer one of TRL's."""

    def change(run: Any) -> None:
        library("trl")
        run.__class__ = type("Users", (getattr(importlib.import_module(module), name),), {})

    return change


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
    (lambda: changed(build("mixtral"), output_router_logits=True), LayerDropout, {}, UnsupportedOptionError,
     ["output_router_logits=True"]),
    (lambda: changed(tiny(), _attn_implementation="flex_attention"), LayerDropout, {}, UnsupportedOptionError,
     ["flex_attention", "'sdpa'"]),
    (tiny, lambda: EarlyExitLoss(layers=[2, 5]), {}, SettingError, ["an exit layer must be at most 4, got 5"]),
    (tiny, lambda: EarlyExitLoss(layers=[1], scale=loss_scale), {}, SettingError,
     ["layers=[1]", "trains no exit", "even"]),
    (tiny, lambda: EarlyExitLoss(scale=lambda i, n, e: i - 1.5), {}, SettingError, ["at least 0", "-1.5"]),
    (tiny, lambda: LayerDropout(0.1), {}, SettingError, ["more than one LayerDropout"]),
]  # fmt: skip


@pytest.mark.parametrize(("create", "callback", "wrong", "error", "words"), CASES)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TRL_EXPERIMENTAL_SILENCE")  # in TRL
def test_refused_trainings(
    tmp_path: Path, create: Callable[[], Any], callback: Any, wrong: Any, error: type[Exception], words: list[str]
) -> None:
    """By name, before any weight changes; the other callback is taken away again as well."""
    model = create()
    # Rates too small to drop any row.
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


class FullyShardedDataParallel(torch.nn.Module):
    """By its name, in which one layer lies."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def in_flat_parameters() -> None:
    model = tiny()
    model.model.layers[0] = FullyShardedDataParallel(model.model.layers[0])
    training(model, [LayerDropout()], 1).__enter__()


SETTINGS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "e_scale": (lambda: EarlyExitLoss(math.nan), SettingError, r"e_scale\) must lie between 0 and 1.* nan"),
    "curriculum": (lambda: EarlyExitLoss(curriculum=8), SettingTypeError, r"must be Rotational.* or None, got 8"),
    "exits": (lambda: EarlyExitLoss(layers=[2, 0]), SettingError, "an exit layer must be at least 1, got 0"),
    "p_max": (lambda: LayerDropout(1.0), SettingError, r"p_max\) .*1 excluded.* 1\.0"),
    "schedule": (lambda: LayerDropout(schedule="exponential"), SettingTypeError, r"schedule\) .*'exponential'"),
    "no loss": (lambda: in_loop(EarlyExitLoss(), forward=from_logits),
                UnsupportedModelError, "EarlyExitLoss had no effect"),
    "no forward": (lambda: in_loop(LayerDropout()), UnsupportedModelError, "LayerDropout had no effect"),
    "copies": (lambda: in_loop(LayerDropout(), forward=in_copies), UnsupportedModelError, "LayerDropout had no effect"),
    "FSDP 1": (in_flat_parameters, UnsupportedOptionError, "FSDP version 1"),
    "steps": (lambda: in_loop(LayerDropout(), times=2, forward=lambda model: model(**stacked(rows(2))).loss.backward()),
              SettingError, r"training\(steps=1\) has taken all of its steps"),
    "no callbacks": (in_loop, SettingTypeError, r"callbacks\) must be .* got \(\)"),
    "twice": (lambda: in_loop(LayerDropout(), LayerDropout()), SettingError, r"has more than one LayerDropout"),
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
    """As `SFTTrainer` does it; a loss that makes something else of them is refused, before any weight changes."""
    library("trl")
    add_fused_lm_head = importlib.import_module("trl.trainer.utils").add_fused_lm_head

    class Fused(Trainer):
        shares = torch.ones(())

        def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            return -(model(**inputs, fused_lm_head=True).log_probs * self.shares).sum() / num_items_in_batch

    class Weighing(Fused):
        shares = torch.linspace(0, 1, WIDTH - 1)

    for trainer_class in (Fused, Weighing):
        usual, model = trainer(tiny(), [], tmp_path), tiny()
        add_fused_lm_head(model)
        run = trainer_class(
            model, usual.args, train_dataset=rows(16), callbacks=[EarlyExitLoss(1.0, Rotational(1), scale=loss_scale)]
        )
        before = weights(model)
        if trainer_class is Fused:
            run.train()
            assert_close(weights(model), ByHand(tiny(), lambda step: ALL).weights)
            continue
        with left_as_it_was(run), pytest.raises(UnsupportedModelError, match="the sum of its `log_probs`"):
            run.train()
        assert_equal(weights(model), before)


def test_callbacks_that_come_too_late_are_refused(tmp_path: Path) -> None:
    """What cannot change the loss any more, or layers, must not look as if it did."""
    for event, late in (("train_begin", EarlyExitLoss), ("step_end", EarlyExitLoss), ("step_end", LayerDropout)):
        adding = TrainerCallback()
        run = trainer(tiny(), [LayerDropout(1e-9), adding] if late is EarlyExitLoss else [adding], tmp_path)
        setattr(adding, f"on_{event}", lambda *args, run=run, late=late, **kwargs: run.add_callback(late()))
        words = f"{late.__name__} has to be among the callbacks"
        with left_as_it_was(run), pytest.raises(UnsupportedOptionError, match=words):
            run.train()
        assert run.state.global_step == (event == "step_end")
    run = trainer(tiny(), [EarlyExitLoss()], tmp_path)
    hf_selfspec.uninstall()
    try:
        with left_as_it_was(run), pytest.raises(UnsupportedOptionError, match="the one that hf_selfspec wraps"):
            run.train()
    finally:
        hf_selfspec.install()
