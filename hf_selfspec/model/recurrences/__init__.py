"""Recurrent states of hybrid and state-space models: which kinds can be rolled back, and how each is updated."""

from .linear_attention import GatedDelta, KimiDelta, StateSpace
from .recurrence import Recurrence, SelectiveScan

KINDS: tuple[type[Recurrence], ...] = (GatedDelta, KimiDelta, StateSpace, SelectiveScan)
