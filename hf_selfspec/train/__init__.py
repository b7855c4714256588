"""Training models whose early layers predict, and fitting small modules to frozen ones, with the stock ``Trainer``."""

from .curriculum import Gradual, Rotational
from .early_exit_loss import EarlyExitLoss, even, loss_scale
from .fitting import fit_adapter, fit_exit_heads, fit_probe
from .layer_dropout import LayerDropout, constant, exponential

__all__ = [
    "EarlyExitLoss",
    "Gradual",
    "LayerDropout",
    "Rotational",
    "constant",
    "even",
    "exponential",
    "fit_adapter",
    "fit_exit_heads",
    "fit_probe",
    "loss_scale",
]
