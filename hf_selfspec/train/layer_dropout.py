"""Layer dropout: samples skip layers at random while training, later layers more often (LayerSkip §4.1.1)."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from ..model.anatomy import Anatomy, causal_lm
from ..model.internals import CHECKPOINTING, attention_implementation
from ..model.patching import Forward, InstanceForwards, PerThread, with_arity
from ..model.transfer import upload
from ..validation import check_share
from .exits import BATCH_DIM
from .trainer import ModelCallback, TrainingRun

# Inputs of layers that have no row for each sample, although their first dimension (heads) can equal the batch size.
_WITHOUT_ROWS = {"position_bias"}

Schedule = Callable[[int, int], float]
# For layers that drop some: the rows ``[n]`` that stay.
Kept = Mapping[int, torch.Tensor]
_ALL: Kept = {}
# Of the forward that runs, also where the model's checkpointing runs its layers again, in a backward's thread.
_kept = PerThread[Kept]()


def constant(step: int, steps: int) -> float:
    """``S(t) = 1``, for fine-tuning and continual pre-training."""
    return 1.0


def exponential(step: int, steps: int) -> float:
    """``S(t) = e^{t ln 2 / (T - 1)} - 1``, from 0 to 1, for training from scratch (LayerSkip, equation 4)."""
    return math.exp(step * math.log(2) / max(steps - 1, 1)) - 1


def layer_scale(layer: int, num_layers: int) -> float:
    """``D(l) = e^{l ln 2 / (L - 1)} - 1``, from 0 at the first layer to 1 at the last (LayerSkip, equation 3)."""
    return math.exp(layer * math.log(2) / max(num_layers - 1, 1)) - 1


class LayerDropout(ModelCallback):
    """Drops layers for single samples while training, with the stock ``Trainer``.

    ``x_{l+1} = x_l + M(p_{l,t}) f_l(x_l)`` with ``p_{l,t} = S(t) D(l) p_max``: a dropped sample leaves the batch before
    the layer and comes back after it, so steps get faster. A row is a sample, also one that is packed with several
    sequences. Nothing is dropped in evaluation and in forwards without gradients. Random numbers depend only on the
    seed, the step and the sample's place in the step, so a resumed run draws the same ones as an uninterrupted run, and
    all ranks draw the same, so that they skip layers together.

    Args:
        p_max: dropout rate of the last layer, at least 0 and less than 1. The paper uses 0.1, and 0.2 for fine-tuning
            on a task.
        schedule: ``S(t)``: :func:`constant`, :func:`exponential` or any function of ``(t, T)`` with values from 0 to 1.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    def __init__(self, p_max: float = 0.1, schedule: Schedule = constant) -> None:
        check_share("LayerDropout(p_max)", p_max, zero=True, one=False)
        if not callable(schedule) or isinstance(schedule, type):
            raise SettingTypeError(
                f"LayerDropout(schedule) must be constant, exponential or a function of (t, T), got {schedule!r}."
            )
        self.p_max, self.schedule = float(p_max), schedule

    def check_model(self, model: PreTrainedModel) -> None:
        config = model.config
        if attention_implementation(config) == "flex_attention":
            raise UnsupportedOptionError(
                "attn_implementation='flex_attention' has one block mask for the whole batch, which LayerDropout "
                "cannot cut to the samples that stay in a layer. Load the model with "
                "'sdpa', 'flash_attention_2' or 'eager'."
            )
        if getattr(config, "output_router_logits", False):
            raise UnsupportedOptionError(
                "config.output_router_logits=True adds a load-balancing loss that expects every sample in every layer, "
                "while LayerDropout leaves some out. Set it to False, or train without LayerDropout."
            )

    def make_run(self, model: Any, seed: int) -> _Run:
        anatomy = Anatomy.of(causal_lm(model, "LayerDropout"))
        if anatomy.kv_sources:
            raise UnsupportedModelError(
                f"later layers of {anatomy.model_name} read keys and values of earlier ones, so a sample cannot leave "
                "single layers. Train without LayerDropout."
            )
        return _Run(anatomy, seed, self.rates)

    def rates(self, step: int, steps: int, num_layers: int) -> list[float]:
        share = self.schedule(step, steps)
        check_share("LayerDropout(schedule)'s value", share, zero=True, one=True)
        return [self.p_max * share * layer_scale(layer, num_layers) for layer in range(num_layers)]


class _Run(TrainingRun):
    """The forwards in place of those of the layers during one training, and the samples that they drop."""

    def __init__(self, anatomy: Anatomy, seed: int, rates: Callable[[int, int, int], list[float]]) -> None:
        self.anatomy, self._seed, self._rates_of = anatomy, seed, rates
        self._forwards = InstanceForwards()
        self._arity: dict[type, int | None] = {}
        self._step = self._samples = 0
        self._rates: np.ndarray | None = None
        self._thread = threading.get_ident()

    def attach(self, model: Any) -> None:
        self._forwards.replace(self.anatomy.stack, self._stack_forward(self.anatomy.stack.forward))
        for index, layer in enumerate(self.anatomy.layers):
            self._forwards.replace(layer, self._layer_forward(index, layer))
        for module in self.anatomy.stack.modules():
            if CHECKPOINTING in module.__dict__:
                self._forwards.replace(module, _bound(getattr(module, CHECKPOINTING)), CHECKPOINTING)

    def detach(self) -> None:
        self._forwards.close()

    def begin_step(self, step: int, steps: int) -> None:
        self._rates = np.array(self._rates_of(step, steps, self.anatomy.num_layers))
        self._step, self._samples = step, 0

    def end_step(self) -> None:
        """Raises if no layer could be dropped."""
        if self._rates is not None and not self._samples:
            raise UnsupportedModelError(
                f"LayerDropout had no effect: no training forward went through the layers of "
                f"{self.anatomy.model_name} in this thread (DataParallel?). The weights were not changed."
            )
        self._rates = None

    def _stack_forward(self, original: Forward) -> Forward:
        @torch.compiler.disable(recursive=False)
        def forward(*args: Any, **kwargs: Any) -> Any:
            is_here = threading.get_ident() == self._thread and torch.is_grad_enabled()
            with _kept.during(_ALL if self._rates is None or not is_here else self._draw(self._rates, args, kwargs)):
                return original(*args, **kwargs)

        return forward

    def _draw(self, rates: np.ndarray, args: Any, kwargs: dict[str, Any]) -> Kept:
        """Decides for each layer which rows of this batch stay in it."""
        named = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        first = next(value for value in named if isinstance(value, torch.Tensor))
        if len(first) > 1 and kwargs.get("cu_seq_lens_q") is not None:
            raise UnsupportedOptionError(
                "LayerDropout cannot leave out rows of a batch whose cu_seq_lens_q go over all of them. Pack the "
                "sequences into one row."
            )
        samples = self._samples + len(first)
        uniform = np.random.default_rng([self._seed, self._step]).random((samples, len(rates)))
        stays = uniform[self._samples :] >= rates
        self._samples = samples
        rows = {layer: column.nonzero()[0] for layer, column in enumerate(stays.T) if not column.all()}
        if not rows:
            return _ALL
        together = upload(np.concatenate(list(rows.values())), first.device)
        return dict(zip(rows, together.split([len(numbers) for numbers in rows.values()]), strict=True))

    def _layer_forward(self, index: int, layer: nn.Module) -> Forward:
        run, layer_class = layer.forward, type(layer)
        positional = ["hidden_states", *list(inspect.signature(layer_class.forward).parameters)[2:]]

        def original(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            self._arity[layer_class] = len(output) if isinstance(output, tuple) else None
            return output

        @torch.compiler.disable(recursive=False)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if _kept.now is None and layer.training and self._rates is not None:
                raise UnsupportedOptionError(
                    "LayerDropout cannot tell which forward gradient checkpointing runs again. Use "
                    "model.gradient_checkpointing_enable() before the training."
                )
            if not _kept.now or not layer.training or (kept := _kept.now.get(index)) is None:
                return original(*args, **kwargs)
            inputs = dict(zip(positional, args, strict=False)) | kwargs
            hidden = inputs.pop("hidden_states")
            if not len(kept):
                if layer_class not in self._arity:
                    with torch.no_grad():
                        original(hidden, **inputs)
                return with_arity(_untouched(hidden, layer), self._arity[layer_class])
            rows = {name: _select(name, value, kept, hidden.shape[BATCH_DIM]) for name, value in inputs.items()}
            output = original(hidden.index_select(BATCH_DIM, kept), **rows)
            states = output[0] if isinstance(output, tuple) else output
            states = hidden.index_copy(BATCH_DIM, kept, states.to(hidden.dtype))
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return forward


def _bound(checkpoint: Forward) -> Forward:
    """Checkpointing that runs layers again with what their own forward has dropped, whichever came since."""
    return lambda run, *args, **kwargs: checkpoint(_kept.during(_kept.now)(run), *args, **kwargs)


def _select(name: str, value: Any, rows: torch.Tensor, b: int) -> Any:
    """``rows`` of an input of a layer other than the hidden states, if it has a row for each sample."""
    if isinstance(value, (tuple, list)):
        return type(value)(_select(name, item, rows, b) for item in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or name in _WITHOUT_ROWS:
        return value
    rows = rows.to(value.device)
    if name == "alibi":  # [b * k, 1, s], heads within samples
        return value.unflatten(0, (b, -1)).index_select(0, rows).flatten(0, 1)
    return value.index_select(0, rows) if value.shape[0] == b else value


def _untouched(hidden: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """The hidden states unchanged, with zero gradients for the layer's parameters, which data parallelism waits for."""
    for parameter in layer.parameters():
        if parameter.requires_grad:
            hidden = hidden + parameter.flatten()[:0].sum().to(hidden.dtype)
    return hidden
