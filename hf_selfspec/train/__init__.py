"""Training models whose early layers predict, and fitting small modules to frozen ones, with the stock ``Trainer``."""

from .adapter import fit_adapter
from .early_exit_loss import EarlyExitLoss, Gradual, Rotational, even, loss_scale
from .heads import calibrate_exit_heads, fit_exit_heads
from .layer_dropout import LayerDropout, constant, exponential
from .lora import fit_draft_lora
from .probe import fit_probe
from .reduced_head import fit_reduced_head

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
