"""Training models whose early layers predict, and fitting small modules to frozen ones, with the stock ``Trainer``."""

from .early_exit_loss import even, loss_scale
from .layer_dropout import constant, exponential
from .texts import write_answers
from .trainer import training

__all__ = ["constant", "even", "exponential", "loss_scale", "training", "write_answers"]
