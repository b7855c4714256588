"""Early-exit loss: every layer learns to predict through the model's own head (LayerSkip §4.1.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from ..model.anatomy import causal_lm
from ..model.exits import Exits
from ..settings import check_share
from .curriculum import Curriculum, Rotational
from .losses import weighted_exit_losses
from .trainer import ComputeLoss, ModelCallback

Scale = Callable[[int, int, float], float]

_ROTATIONAL = Rotational()


def loss_scale(layer: int, num_layers: int, e_scale: float) -> float:
    """``e(l)``, how much the exit after layer ``l`` weighs before normalisation (LayerSkip, equation 7).

    Args:
        layer: ``l``, 0 to ``L-1``.
        num_layers: ``L``.
        e_scale: share of the exits before the last.
    """
    below = min(layer, num_layers - 2)
    scale = e_scale * below * (below + 1) / 2
    return scale if layer < num_layers - 1 else num_layers - 1 + scale


def even(layer: int, num_layers: int, e_scale: float) -> float:
    """``e_scale`` for each exit before the last and 1 for the last, another ``e(l)`` than the paper's.

    The paper's gives the first third of the layers a few per cent of the loss. Where drafts are to come from there and
    the training is short, equal shares teach them more, at the cost of the last layer.
    """
    return e_scale if layer < num_layers - 1 else 1.0


def loss_weights(
    layers: Collection[int], num_layers: int, e_scale: float, scale: Scale = loss_scale
) -> dict[int, float]:
    """``ẽ(t, l)`` of the enabled ``layers`` and the last one, which add up to 1 (LayerSkip, equation 6).

    Raises:
        SettingError: a layer does not exist, or ``scale`` gave no weight or a negative one.
    """
    wrong = sorted(layer for layer in layers if not 0 <= layer < num_layers)
    if wrong:
        raise SettingError(
            f"EarlyExitLoss(curriculum) enabled layer {wrong[0]}, but the model has layers 0 to {num_layers - 1}."
        )
    scales = {layer: scale(layer, num_layers, e_scale) for layer in {*layers, num_layers - 1}}
    if not all(0 <= weight < math.inf for weight in scales.values()):
        raise SettingError(f"EarlyExitLoss(scale) must give numbers of at least 0, got {scales} for the layers.")
    total = sum(scales.values())
    if total == 0:  # the one layer of a model that has no other
        return {num_layers - 1: 1.0}
    return {layer: weight / total for layer, weight in sorted(scales.items())}


class EarlyExitLoss(ModelCallback):
    """Trains the exits after earlier layers beside the last one, with the stock ``Trainer``.

    ``J = Σ_l ẽ(t, l) · CE(g(x_{l+1}), Y)`` with the model's own final norm and output head ``g`` for all exits. The
    logits of the earlier exits exist for a chunk of tokens at a time. Each exit's loss goes into the Trainer's log as
    ``loss/exit_E`` (nats per token, mean since the last log), where exit ``E`` is after the first ``E`` layers.

    Args:
        e_scale: weight of the exits before the last, from 0 to 1. The paper takes 1.0 for fine-tuning and 0.1 or 0.2
            for pre-training.
        curriculum: :class:`Rotational`, :class:`Gradual` or ``None`` for all exits in all steps.
        layers: exit layers ``E`` that take part, ``None`` for all. The last layer always does.
        scale: ``e(l)`` as a function of ``(l, L, e_scale)``: :func:`loss_scale`, the paper's, or :func:`even`, or any
            other that gives no number below 0 and one above it for the last layer.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    def __init__(
        self,
        e_scale: float = 1.0,
        curriculum: Curriculum | None = _ROTATIONAL,
        layers: Sequence[int] | None = None,
        scale: Scale = loss_scale,
    ) -> None:
        check_share("EarlyExitLoss(e_scale)", e_scale, zero=True, one=True)
        if curriculum is not None and (isinstance(curriculum, type) or not hasattr(curriculum, "enabled")):
            raise SettingTypeError(
                f"EarlyExitLoss(curriculum) must be Rotational(R), Gradual() or None, got {curriculum!r}."
            )
        if not callable(scale) or isinstance(scale, type):
            raise SettingTypeError(
                f"EarlyExitLoss(scale) must be loss_scale, even or a function of (l, L, e_scale), got {scale!r}."
            )
        self.e_scale = float(e_scale)
        self.scale = scale
        self.curriculum = curriculum
        self.layers = None if layers is None else _exit_layers(layers)
        self._run: _Run | None = None

    def check(self, trainer: Trainer) -> None:
        args = trainer.args
        refused = {
            "compute_loss_func": getattr(trainer, "compute_loss_func", None) is not None,
            f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor != 0,
            "use_liger_kernel=True": bool(getattr(args, "use_liger_kernel", False)),
            f"loss_type={getattr(args, 'loss_type', None)!r}": getattr(args, "loss_type", None) == "dft",
        }
        for option, is_set in refused.items():
            if is_set:
                raise UnsupportedOptionError(
                    f"EarlyExitLoss adds the cross entropy of earlier exits to that of the last layer, and {option} "
                    "trains the last layer by something else. Train without it, or without EarlyExitLoss."
                )
        model = causal_lm(trainer.model, "EarlyExitLoss")
        loss = model.loss_function
        if loss is not ForCausalLMLoss:
            raise UnsupportedModelError(
                f"EarlyExitLoss trains exits with the cross entropy that causal LMs share, but the loss function of "
                f"{type(model).__name__} is {loss!r}. Train without EarlyExitLoss."
            )

    def attach(self, model: Any, args: TrainingArguments, state: TrainerState) -> None:
        inner = causal_lm(model, "EarlyExitLoss")
        exits = Exits(inner)
        exits.check("EarlyExitLoss(layers)", self.layers or ())
        self._check_weights(exits.anatomy.num_layers)
        self._run = _Run(inner, exits)
        self._run.attach(model)

    def _check_weights(self, num_layers: int) -> None:
        """Raises where a weight is impossible, or the exits that were named would never count."""
        loss_weights(range(num_layers), num_layers, self.e_scale, self.scale)
        named = [layer - 1 for layer in self.layers or () if layer < num_layers]
        if named and self.e_scale and not any(self.scale(layer, num_layers, self.e_scale) for layer in named):
            raise SettingError(
                f"EarlyExitLoss(layers={sorted(self.layers or ())}) trains no exit: e(l) of LayerSkip is 0 for the "
                "first layer. Name a later one, or set scale=hf_selfspec.train.even."
            )

    def detach(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.detach()

    def compute_loss(
        self,
        trainer: Trainer,
        original: ComputeLoss,
        model: Any,
        inputs: dict[str, Any],
        num_items: Any,
        **options: Any,
    ) -> Any:
        """``Σ ẽ · CE`` in the place of the Trainer's loss of the last layer; the same as it outside training steps."""
        run = self._run
        if run is None or not run.in_step or not run.model.training:
            return original(model, inputs, num_items_in_batch=num_items, **options)
        # As the Trainer does: per token of the whole step where the model is told their number, else of this batch.
        whole_step = num_items is not None and trainer.model_accepts_loss_kwargs
        processes = trainer.accelerator.num_processes
        factor = processes if whole_step and trainer.args.average_tokens_across_devices else 1
        run.begin_batch(inputs, num_items if whole_step else None)
        result = original(model, inputs, num_items_in_batch=num_items, **options)
        if isinstance(result, tuple):
            return (run.total(result[0], factor), *result[1:])
        return run.total(result, factor)

    def weights(self, step: int, steps: int, num_layers: int) -> dict[int, float]:
        """``ẽ(t, l)`` of the layers ``l`` whose exits are on in step ``t`` of ``T``; they add up to 1."""
        enabled: Collection[int] = range(num_layers)
        if self.curriculum is not None:
            enabled = self.curriculum.enabled(step, steps, num_layers)
        if self.layers is not None:
            enabled = [layer for layer in enabled if layer + 1 in self.layers]
        return loss_weights(enabled, num_layers, self.e_scale, self.scale)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        run = self._run
        assert run is not None
        num_layers = run.exits.anatomy.num_layers
        run.begin_step(self.weights(state.global_step, state.max_steps, num_layers))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._run is not None
        self._run.end_step()

    def logs(self, trainer: Trainer) -> dict[str, float]:
        if self._run is None:
            return {}
        table = trainer.accelerator.reduce(self._run.table, reduction="sum")
        self._run.table = torch.zeros_like(self._run.table)
        return {
            f"loss/exit_{layer}": total / tokens
            for layer, (total, tokens) in enumerate(table.tolist(), start=1)
            if tokens
        }


def _exit_layers(layers: object) -> frozenset[int]:
    found = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else ()
    if not found or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in found):
        raise SettingTypeError(f"EarlyExitLoss(layers) must be a list of exit layers, or None for all, got {layers!r}.")
    if min(found) < 1:
        raise SettingError(
            f"EarlyExitLoss(layers={list(found)}): exit layers start at 1, which is the exit after the first layer."
        )
    return frozenset(found)


class _Run:
    """What one training step needs to know, and what is counted between logs.

    Attributes:
        in_step: a training step is going on (evaluation is not one).
        table: ``[L, 2]`` for each exit the summed cross entropy since the last log, and the tokens behind it.
    """

    def __init__(self, model: PreTrainedModel, exits: Exits) -> None:
        self.model = model
        self.exits = exits
        self.in_step = False
        self._handle: RemovableHandle | None = None
        precise = torch.float32 if model.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.table = torch.zeros(exits.anatomy.num_layers, 2, dtype=precise, device=model.device)
        self._weights: list[float] = []
        self._last_weight = 1.0
        self._targets: torch.Tensor | None = None
        self._count: torch.Tensor | int = 0
        self._earlier: torch.Tensor | None = None

    def attach(self, outer: nn.Module) -> None:
        """Puts hooks on the causal LM and on what the Trainer calls (PEFT's wrapper, or the same)."""
        self.exits.attach()
        # Before others' hooks: sharded parameters of the head are at hand until those of FSDP2 run.
        self._handle = outer.register_forward_hook(self._give_out, prepend=True)

    def detach(self) -> None:
        self.exits.detach()
        if self._handle is not None:
            self._handle.remove()

    def begin_step(self, weights: dict[int, float]) -> None:
        last = self.exits.anatomy.num_layers - 1
        self._last_weight = weights[last]
        earlier = {layer: weight for layer, weight in weights.items() if layer != last and weight > 0}
        self.exits.chosen = tuple(layer + 1 for layer in earlier)
        self._weights = list(earlier.values())
        self.in_step = True

    def end_step(self) -> None:
        self.exits.chosen = ()
        self.exits.release()
        self.in_step = False
        self._targets = self._earlier = None

    def begin_batch(self, inputs: dict[str, Any], num_items: torch.Tensor | int | None) -> None:
        """Takes what the exits are to predict, and over how many tokens a mean is taken."""
        self._earlier = None
        self._targets = _targets(inputs)
        self._count = int((self._targets != _IGNORED).sum()) if num_items is None else num_items

    def _add_exits(self) -> None:
        states, targets = self.exits.states, self._targets
        if targets is None or states is None:
            return
        if states.shape[1:3] != targets.shape:
            raise UnsupportedModelError(
                f"EarlyExitLoss needs a label for each hidden state, but {self.exits.anatomy.model_name} has states "
                f"for {list(states.shape[1:3])} tokens and labels for {list(targets.shape)} (virtual tokens of a "
                "prompt-learning method, or images?). Train without EarlyExitLoss."
            )
        targets = targets.to(states.device).flatten()
        places = (targets != _IGNORED).nonzero().flatten()
        total, sums = weighted_exit_losses(
            self.exits.head,
            self.exits.head_parameters(),
            states.flatten(1, 2).index_select(1, places),
            targets[places],
            self._weights,
            self.model.config.get_text_config(decoder=True).vocab_size,
        )
        self._earlier = total if self._earlier is None else self._earlier + total
        for layer, loss in zip(self.exits.chosen, sums, strict=True):
            self.table[layer - 1, 0] += loss.to(self.table.device)
            self.table[layer - 1, 1] += len(places)

    @torch.compiler.disable
    def _give_out(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Computes the exits' losses at the end of the model's forward and ties them to what it returns.

        FSDP2 gathers sharded parameters when the gradient of a forward's output comes: the exits' must wait for it.
        """
        if not self.in_step:
            return output
        self._add_exits()
        if self._earlier is not None and not isinstance(output, tuple):
            name = next(n for n, v in output.items() if isinstance(v, torch.Tensor) and v.requires_grad)
            output[name] = _Tied.apply(output[name], self._earlier)
        return output

    def total(self, last_loss: torch.Tensor, factor: int) -> torch.Tensor:
        """``Σ ẽ · CE`` of the batch, scaled as ``last_loss`` is.

        Raises:
            UnsupportedModelError: the model's layers did not run.
        """
        assert self._targets is not None
        tokens = int((self._targets != _IGNORED).sum())
        self.table[-1, 0] += (last_loss.detach() * self._count / factor).to(self.table.device)
        self.table[-1, 1] += tokens
        if not self._weights:
            return last_loss
        if self._earlier is None:
            raise UnsupportedModelError(
                f"EarlyExitLoss had no effect: no training forward went through the layers of "
                f"{self.exits.anatomy.model_name}. The weights were not changed."
            )
        return self._last_weight * last_loss + self._earlier.to(last_loss.device) * factor / self._count


_IGNORED = -100


def _targets(inputs: dict[str, Any]) -> torch.Tensor:
    """Token ids ``[b, s]`` that each position is to predict, -100 where it is to predict nothing."""
    shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
    if isinstance(shifted, torch.Tensor):
        return shifted
    if not isinstance(labels, torch.Tensor):
        raise UnsupportedOptionError(
            f"EarlyExitLoss needs `labels` in the batches, got {sorted(inputs)}. Use a data collator that makes them, "
            "such as DataCollatorForLanguageModeling(tokenizer, mlm=False)."
        )
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


class _Tied(torch.autograd.Function):
    """The first tensor as it is; backward comes to the second one after it has come here."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.view_as(first) if first.dim() else first.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.new_zeros(())
