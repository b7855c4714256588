"""Which part of the model drafts."""

from .adapter import EarlyExitAdapter
from .early_exit import EarlyExit, EarlyExitOnly
from .exit_heads import DynamicExit
from .skip_layers import SkipLayers

__all__ = ["DynamicExit", "EarlyExit", "EarlyExitAdapter", "EarlyExitOnly", "SkipLayers"]
