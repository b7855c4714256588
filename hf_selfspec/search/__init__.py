"""Searches for the part of a model to draft with, by measuring."""

from .choice import ExitChoice, SkipChoice
from .proposers import ClosestLayers, OnTheFlySearch

__all__ = ["ClosestLayers", "ExitChoice", "OnTheFlySearch", "SkipChoice"]
