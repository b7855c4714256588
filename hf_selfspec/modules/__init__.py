"""Small modules that are fitted to a frozen model."""

from .adapter import Adapter
from .heads import ExitHeads
from .lora import DraftLora
from .probe import LinearProbe
from .reduced_head import ReducedHead

__all__ = ["Adapter", "DraftLora", "ExitHeads", "LinearProbe", "ReducedHead"]
