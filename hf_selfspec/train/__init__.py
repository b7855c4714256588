"""Training models whose early layers predict (LayerSkip), with the stock ``transformers.Trainer``."""

from .curriculum import Gradual, Rotational
from .early_exit_loss import EarlyExitLoss, even, loss_scale
from .layer_dropout import LayerDropout, constant, exponential

__all__ = ["EarlyExitLoss", "Gradual", "LayerDropout", "Rotational", "constant", "even", "exponential", "loss_scale"]
