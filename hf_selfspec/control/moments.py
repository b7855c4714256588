"""When the phases of a round end: on the host, or on a GPU, to which the host only hands its work."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

# Devices whose events have times, with the interface of ``torch.cuda``.
TIMED = ("cuda",)

# Seconds of the host's clock, or an event of a device.
Moment = Any


def moment(device: torch.device) -> Moment:
    """Returns now; on a GPU the moment at which it has done what it was handed so far. Nothing waits for that."""
    if device.type not in TIMED:
        return perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def seconds_between(begun: Moment, ended: Moment) -> float:
    """Returns the seconds between two moments; waits for the second one, unless the host has waited for later work."""
    if isinstance(begun, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3
