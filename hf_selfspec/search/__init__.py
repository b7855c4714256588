"""Which part of a model to draft with, found by measuring."""

from .exit_choice import ExitChoice
from .on_the_fly import ClosestLayers, OnTheFlySearch
from .tries import SkipChoice

__all__ = ["ClosestLayers", "ExitChoice", "OnTheFlySearch", "SkipChoice"]
