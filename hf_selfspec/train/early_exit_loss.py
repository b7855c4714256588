"""Early-exit loss: every layer learns to predict through the model's own head (LayerSkip §4.1.2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from ..model.exits import Exits
from ..settings import check_share
from .curriculum import Curriculum, Rotational
from .losses import weighted_exit_losses
from .trainer import ModelCallback


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


def loss_weights(layers: Iterable[int], num_layers: int, e_scale: float) -> dict[int, float]:
    """``ẽ(t, l)`` of the enabled ``layers`` and the last one, which add up to 1 (LayerSkip, equation 6)."""
    scales = {layer: loss_scale(layer, num_layers, e_scale) for layer in {*layers, num_layers - 1}}
    total = sum(scales.values())
    return {layer: scale / total for layer, scale in sorted(scales.items())} if total else {num_layers - 1: 1.0}


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

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    def __init__(
        self,
        e_scale: float = 1.0,
        curriculum: Curriculum | None = Rotational(),  # noqa: B008 (frozen)
        layers: Sequence[int] | None = None,
    ) -> None:
        check_share("EarlyExitLoss(e_scale)", e_scale, zero=True, one=True)
        if curriculum is not None and (isinstance(curriculum, type) or not hasattr(curriculum, "enabled")):
            raise SettingTypeError(
                f"EarlyExitLoss(curriculum) must be Rotational(R), Gradual() or None, got {curriculum!r}."
            )
        self.e_scale = float(e_scale)
        self.curriculum = curriculum
        self.layers = None if layers is None else _exit_layers(layers)
        self._run: _Run | None = None

    def check(self, trainer: Trainer) -> None:
        args = trainer.args
        refused = {
            "compute_loss_func": getattr(trainer, "compute_loss_func", None) is not None,
            f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor != 0,
            "use_liger_kernel=True": bool(getattr(args, "use_liger_kernel", False)),
        }
        for option, is_set in refused.items():
            if is_set:
                raise UnsupportedOptionError(
                    f"EarlyExitLoss weighs the loss that the model computes itself, and {option} replaces that loss. "
                    "Train without it, or without EarlyExitLoss."
                )

    def attach(self, model: PreTrainedModel, args: TrainingArguments, state: TrainerState) -> None:
        exits = Exits(model)
        exits.check("EarlyExitLoss(layers)", self.layers or ())
        if model.loss_function is not ForCausalLMLoss:
            raise UnsupportedModelError(
                f"EarlyExitLoss trains exits with the cross entropy that causal LMs share, but the loss function of "
                f"{type(model).__name__} is {model.loss_function!r}. Train without EarlyExitLoss."
            )
        self._run = _Run(model, exits)
        self._run.attach()

    def detach(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.detach()

    def weights(self, step: int, steps: int, num_layers: int) -> dict[int, float]:
        """``ẽ(t, l)`` of the layers ``l`` whose exits are on in step ``t`` of ``T``; they add up to 1."""
        enabled: Iterable[int] = range(num_layers)
        if self.curriculum is not None:
            enabled = self.curriculum.enabled(step, steps, num_layers)
        if self.layers is not None:
            enabled = [layer for layer in enabled if layer + 1 in self.layers]
        return loss_weights(enabled, num_layers, self.e_scale)

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
        run = self._run
        assert run is not None
        if not run.seen:
            raise UnsupportedModelError(
                f"EarlyExitLoss had no effect: {type(run.model).__name__} did not call its loss_function in this "
                "training step. Either the model computes its loss in another way, or compute_loss was overridden, or "
                "the data has no labels. The weights were not changed."
            )
        run.end_step()

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
    """What one training changes on the model, and what it counts.

    Attributes:
        seen: the model's loss function was called in this step.
        table: ``[L, 2]`` for each exit the summed cross entropy since the last log, and the tokens behind it.
    """

    def __init__(self, model: PreTrainedModel, exits: Exits) -> None:
        self.model = model
        self.exits = exits
        self.seen = False
        self.table = torch.zeros(exits.anatomy.num_layers, 2, dtype=torch.float64, device=model.device)
        self._weights: list[float] = []
        self._last_weight = 1.0
        self._in_step = False

    def attach(self) -> None:
        self.exits.attach()
        self.model.loss_function = torch.compiler.disable(self.loss)

    def detach(self) -> None:
        self.exits.detach()
        self.model.__dict__.pop("_loss_function", None)

    def begin_step(self, weights: dict[int, float]) -> None:
        last = self.exits.anatomy.num_layers - 1
        self._last_weight = weights[last]
        earlier = {layer: weight for layer, weight in weights.items() if layer != last and weight > 0}
        self.exits.chosen = tuple(layer + 1 for layer in earlier)
        self._weights = list(earlier.values())
        self._in_step, self.seen = True, False

    def end_step(self) -> None:
        self.exits.chosen = ()
        self.exits.release()
        self._in_step = False

    def loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``Σ ẽ · CE`` in the place of the model's own loss; the same as it outside training steps."""
        last_loss = ForCausalLMLoss(*args, **kwargs)
        if not self._in_step or not self.model.training:
            return last_loss
        self.seen = True
        given = _LOSS_SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        targets, tokens = _targets(**given.arguments)
        count = given.arguments["num_items_in_batch"]
        count = len(tokens) if count is None else count
        self.table[-1, 0] += last_loss.detach() * count
        self.table[-1, 1] += len(tokens)
        states = self.exits.states
        if states is None:
            return last_loss
        total, sums = weighted_exit_losses(
            self.exits.head,
            self.exits.head_parameters(),
            states.flatten(1, 2).index_select(1, tokens),
            targets,
            self._weights,
            given.arguments["vocab_size"],
        )
        for layer, loss in zip(self.exits.chosen, sums, strict=True):
            self.table[layer - 1, 0] += loss
            self.table[layer - 1, 1] += len(tokens)
        return self._last_weight * last_loss + total.to(last_loss.device) / count


_LOSS_SIGNATURE = inspect.signature(ForCausalLMLoss)


def _targets(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, shift_labels: torch.Tensor | None, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[n]`` that count, and where in ``[b * s]`` they are predicted."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    places = (targets != ignore_index).nonzero().flatten()
    return targets[places], places
