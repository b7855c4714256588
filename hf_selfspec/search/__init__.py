"""Searches for the part of a model to draft with, by measuring."""

from .choice import ExitChoice, SkipChoice
from .on_the_fly import ClosestLayers, OnTheFlySearch

__all__ = ["ClosestLayers", "ExitChoice", "OnTheFlySearch", "SkipChoice"]
