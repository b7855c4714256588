"""Which part of a model to draft with, found by measuring."""

from .choice import ExitChoice, SkipChoice
from .on_the_fly import ClosestLayers, OnTheFlySearch

__all__ = ["ClosestLayers", "ExitChoice", "OnTheFlySearch", "SkipChoice"]
