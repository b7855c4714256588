"""Early-exit loss: every layer learns to predict through the model's own head (LayerSkip §4.1.2)."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from ..model.anatomy import causal_lm
from ..validation import check_count, check_share
from .exit_training import ExitTraining
from .exits import Exits
from .trainer import ModelCallback

Scale = Callable[[int, int, float], float]


class Curriculum(Protocol):
    """``C(t, l)`` of LayerSkip, equation 6: the layers ``l`` (0 to ``L-1``, the exit being after the layer) whose loss
    counts in step ``t`` of ``T``. The last layer always counts, whatever is returned."""

    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]: ...


@dataclass(frozen=True)
class Rotational:
    """Trains every ``every``-th layer, shifted by one each step, so that each exit is trained once in ``every`` steps.

    Args:
        every: ``R``, at least 1 (1: all exits in all steps). The paper uses 8 for continual pre-training of 32 layers
            and 16 for fine-tuning them.
    """

    every: int = 16

    def __post_init__(self) -> None:
        check_count("Rotational(R)", self.every)

    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]:
        return frozenset(range(step % self.every, num_layers, self.every))


@dataclass(frozen=True)
class Gradual:
    """Adds exits from the last layer down to the first, one every ``T / (2 L)`` steps; from half-way on all."""

    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]:
        count = min(num_layers, 1 + step * 2 * num_layers // max(steps, 1))
        return frozenset(range(num_layers - count, num_layers))


def loss_scale(layer: int, num_layers: int, e_scale: float) -> float:
    """``e(l)``, the weight of the exit after layer ``l`` (from 0) before normalisation (LayerSkip, equation 7)."""
    below = min(layer, num_layers - 2)
    scale = e_scale * below * (below + 1) / 2
    return scale if layer < num_layers - 1 else num_layers - 1 + scale


def even(layer: int, num_layers: int, e_scale: float) -> float:
    """Returns ``e_scale`` for each exit before the last and 1 for the last.

    The paper's ``e(l)`` gives the exits in the first third of the layers a few per cent of the loss, and drafts from
    them were then hardly faster than plain ``generate`` (the demo model).
    """
    return e_scale if layer < num_layers - 1 else 1.0


class EarlyExitLoss(ModelCallback):
    """Trains the exits after earlier layers together with the last one, with the stock ``Trainer``.

    ``J = Σ_l ẽ(t, l) · CE(g(x_{l+1}), Y)`` with the model's own final norm and output head ``g`` for all exits. The
    logits of the earlier exits are computed for a chunk of tokens at a time. Each exit's loss goes into the Trainer's
    log as ``loss/exit_E`` (nats per token, mean since the last log), where exit ``E`` is after the first ``E`` layers.

    Args:
        e_scale: weight of the exits before the last, from 0 to 1. With 0.1, four exits and :class:`Gradual` the last
            layer of a pretrained model lost nothing on one task in 500 steps, with 1.0 in 300 steps 15 points
            (examples/RESULTS.md, trained exits). The demo model was trained from scratch with 1.0.
        curriculum: which exits count in a step: :class:`Rotational`, :class:`Gradual`, or ``None`` for all of
            ``layers`` in all steps.
        layers: exit layers ``E`` that take part. ``None`` means all layers of the curriculum, and without a curriculum
            the layers after an eighth, a quarter and half of the model. The last layer always takes part.
        scale: ``e(l)`` as a function of ``(l, L, e_scale)``: :func:`even`, or :func:`loss_scale` of the paper, or any
            other that returns numbers of at least 0, and one above 0 for the last layer.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    def __init__(
        self,
        e_scale: float = 0.1,
        curriculum: Curriculum | None = None,
        layers: Sequence[int] | None = None,
        scale: Scale = even,
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
        if layers is not None and (not isinstance(layers, Collection) or not layers):
            raise SettingTypeError(f"EarlyExitLoss(layers) must be a list of exit layers, or None, got {layers!r}.")
        for layer in layers or ():
            check_count("EarlyExitLoss(layers): an exit layer", layer)
        self.e_scale, self.scale, self.curriculum = float(e_scale), scale, curriculum
        self.layers = None if layers is None else frozenset(layers)

    def check(self, trainer: Trainer) -> None:
        args = trainer.args
        of_trl = [base.__name__ for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
        refused = {
            f"TRL's {' '.join(of_trl[:1])}": bool(of_trl) and of_trl[0] != "SFTTrainer",
            "compute_loss_func": trainer.compute_loss_func is not None,
            f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor != 0,
            "use_liger_kernel=True": args.use_liger_kernel,
            f"loss_type={getattr(args, 'loss_type', None)!r}": getattr(args, "loss_type", None) == "dft",
        }
        for option, is_set in refused.items():
            if is_set:
                raise UnsupportedOptionError(
                    f"EarlyExitLoss adds the cross entropy of earlier exits to that of the last layer, and {option} "
                    "trains the last layer with another loss. Train without it, or without EarlyExitLoss."
                )

    def check_model(self, model: PreTrainedModel) -> None:
        if (loss := model.loss_function) is not ForCausalLMLoss:
            raise UnsupportedModelError(
                f"EarlyExitLoss trains exits with the cross entropy that causal LMs share, but the loss function of "
                f"{type(model).__name__} is {loss!r}. Train without EarlyExitLoss."
            )

    def make_run(self, model: Any, seed: int) -> ExitTraining:
        exits = Exits(causal_lm(model, "EarlyExitLoss"))
        num_layers = exits.anatomy.num_layers
        for layer in self.layers or ():
            check_count("EarlyExitLoss(layers): an exit layer", layer, most=num_layers)
        self._shares(range(num_layers), num_layers)  # raises if a weight is not allowed
        named = [layer - 1 for layer in self.layers or () if layer < num_layers]
        if named and self.e_scale and not any(self.scale(layer, num_layers, self.e_scale) for layer in named):
            raise SettingError(
                f"EarlyExitLoss(layers={sorted(self.layers or ())}) trains no exit: e(l) of LayerSkip is 0 for the "
                "first layer. Name a later one, or set scale=hf_selfspec.train.even."
            )
        return ExitTraining(exits, self.weights)

    def weights(self, step: int, steps: int, num_layers: int) -> dict[int, float]:
        """``ẽ(t, l)`` of the layers ``l`` whose exits are on in step ``t`` of ``T``; they add up to 1."""
        if self.curriculum is None:
            # The demo model's drafts are made from the usual exits.
            exits = self.layers or {max(num_layers // part, 1) for part in (8, 4, 2)}
            return self._shares({exit_layer - 1 for exit_layer in exits}, num_layers)
        enabled = self.curriculum.enabled(step, steps, num_layers)
        return self._shares({layer for layer in enabled if not self.layers or layer + 1 in self.layers}, num_layers)

    def _shares(self, layers: Collection[int], num_layers: int) -> dict[int, float]:
        """``ẽ(t, l)`` of the enabled ``layers`` and the last one, which add up to 1 (LayerSkip, equation 6)."""
        if wrong := sorted(layer for layer in layers if not 0 <= layer < num_layers):
            raise SettingError(
                f"EarlyExitLoss(curriculum) enabled layer {wrong[0]}, but the model has layers 0 to {num_layers - 1}."
            )
        scales = {layer: self.scale(layer, num_layers, self.e_scale) for layer in sorted({*layers, num_layers - 1})}
        if not all(0 <= weight < math.inf for weight in scales.values()):
            raise SettingError(f"EarlyExitLoss(scale) must return numbers of at least 0, got {scales} for the layers.")
        total = sum(scales.values())  # 0 for the one layer of a model that has no other
        return {layer: weight / total for layer, weight in scales.items()} if total else {num_layers - 1: 1.0}
