"""When drafting stops."""

from .adaptive import AdaptiveThreshold
from .rules import ConfidenceThreshold, FixedLength, ProductThreshold, StopRule

__all__ = ["AdaptiveThreshold", "ConfidenceThreshold", "FixedLength", "ProductThreshold", "StopRule"]
