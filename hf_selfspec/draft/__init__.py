"""Draft sources: what proposes tokens, from free lookups to parts of the model."""

from .adapter import EarlyExitAdapter
from .cascade import Cascade
from .early_exit import EarlyExit, EarlyExitLora, EarlyExitOnly
from .exit_heads import DynamicExit
from .lookup import Lookup
from .mtp import MTP
from .quantized import Quantized
from .skip_layers import SkipLayers
from .source import Drafter, DraftSource, FixedDrafter, Session

__all__ = [
    "MTP",
    "Cascade",
    "Drafter",
    "DraftSource",
    "DynamicExit",
    "EarlyExit",
    "EarlyExitAdapter",
    "EarlyExitLora",
    "EarlyExitOnly",
    "FixedDrafter",
    "Lookup",
    "Quantized",
    "Session",
    "SkipLayers",
]
