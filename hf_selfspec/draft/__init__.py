"""Which part of the model drafts."""

from .early_exit import EarlyExit, EarlyExitOnly
from .skip_layers import SkipLayers

__all__ = ["EarlyExit", "EarlyExitOnly", "SkipLayers"]
