"""Models whose layers are spread over several processes, which have to make the same decisions."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed
from transformers import PreTrainedModel


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Returns whether each layer of the model is spread over several processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def clock_of(model: PreTrainedModel, forwards: Callable[[], int]) -> Callable[[], float]:
    """Returns a clock in seconds; all processes of a model read that of the first one, together.

    So decisions based on timings are the same everywhere. Each reading is then a broadcast, which waits for the device,
    so the clock stands still until another forward has run: what the host does between two forwards counts as time of
    the second.
    """
    if not is_tensor_parallel(model):
        return perf_counter
    mesh: Any = getattr(model, "_device_mesh", None)
    group = None if mesh is None else mesh.get_group("tp" if "tp" in (mesh.mesh_dim_names or ()) else 0)
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)

    known: dict[int, float] = {}

    def now() -> float:
        count = forwards()
        if count not in known:
            seconds = torch.tensor([perf_counter()], dtype=torch.float64, device=model.device)
            torch.distributed.broadcast(seconds, first, group)
            known.clear()
            known[count] = float(seconds)
        return known[count]

    return now
