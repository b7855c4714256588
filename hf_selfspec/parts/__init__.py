"""Small modules that are fitted to a frozen model."""

from .adapter import Adapter
from .probe import LinearProbe

__all__ = ["Adapter", "LinearProbe"]
