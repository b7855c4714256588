"""Which part of the model drafts."""

from .adapter import EarlyExitAdapter
from .early_exit import EarlyExit, EarlyExitOnly
from .skip_layers import SkipLayers

__all__ = ["EarlyExit", "EarlyExitAdapter", "EarlyExitOnly", "SkipLayers"]
