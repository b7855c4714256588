"""Training models whose early layers predict, and fitting small modules to frozen ones, with the stock ``Trainer``."""

from typing import Any

from .adapter import AdapterFit, fit_adapter
from .early_exit_loss import EarlyExitLoss, Gradual, Rotational, even, loss_scale
from .fit import Fit
from .heads import HeadsFit, calibrate_exit_heads, fit_exit_heads
from .layer_dropout import LayerDropout, constant, exponential
from .lora import LoraFit, fit_draft_lora
from .probe import ProbeFit, fit_probe
from .reduced_head import ReducedHeadFit, fit_reduced_head

# Those that are commands of `hf-selfspec fit`.
FITS: tuple[type[Fit[Any]], ...] = (AdapterFit, HeadsFit, LoraFit, ProbeFit, ReducedHeadFit)

__all__ = [
    "EarlyExitLoss",
    "Gradual",
    "LayerDropout",
    "Rotational",
    "calibrate_exit_heads",
    "constant",
    "even",
    "exponential",
    "fit_adapter",
    "fit_draft_lora",
    "fit_exit_heads",
    "fit_probe",
    "fit_reduced_head",
    "loss_scale",
]
