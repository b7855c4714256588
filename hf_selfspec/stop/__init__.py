"""Rules for when drafting stops."""

from .adaptive import AdaptiveThreshold
from .calibrated import CalibratedEntropy
from .rules import ConfidenceThreshold, FixedLength, ProductThreshold, StopRule

__all__ = [
    "AdaptiveThreshold",
    "CalibratedEntropy",
    "ConfidenceThreshold",
    "FixedLength",
    "ProductThreshold",
    "StopRule",
]
