"""When drafting stops."""

from .rules import ConfidenceThreshold, FixedLength, StopRule

__all__ = ["ConfidenceThreshold", "FixedLength", "StopRule"]
