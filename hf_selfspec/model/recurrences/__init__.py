"""Recurrent states of hybrid and state-space models: which are supported, and how each is updated."""

from .linear_attention import GatedDelta, KimiDelta, StateSpace
from .recurrence import Recurrence, SelectiveScan

# Model types whose states are proven to roll back exactly, each with its recurrence; None for convolutions alone.
SERVED: dict[str, type[Recurrence] | None] = {
    "bailing_hybrid": KimiDelta,
    "bamba": StateSpace,
    "falcon_h1": StateSpace,
    "falcon_mamba": SelectiveScan,
    "granitemoehybrid": StateSpace,
    "inkling2_text": None,
    "inkling_text": None,
    "jamba": SelectiveScan,
    "kimi_linear": KimiDelta,
    "lfm2": None,
    "lfm2_moe": None,
    "lfm3": None,
    "mamba": SelectiveScan,
    "mamba2": StateSpace,
    "nemotron_h": StateSpace,
    "olmo_hybrid": GatedDelta,
    "qwen3_5_moe_text": GatedDelta,
    "qwen3_5_text": GatedDelta,
    "qwen3_next": GatedDelta,
    "zamba": SelectiveScan,
    "zamba2": StateSpace,
}
