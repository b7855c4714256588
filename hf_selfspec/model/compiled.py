"""Bypasses the graphs of compiled models while only some of their blocks run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from .modules import all_modules

_stance_lock = threading.Lock()
_stance_users = 0
_stance: Any = None


@contextmanager
def eagerly() -> Iterator[None]:
    """Bypasses compiled graphs; the switch is global to the process, so all threads that need it share it."""
    global _stance, _stance_users
    with _stance_lock:
        if _stance_users == 0:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        _stance_users += 1
    try:
        yield
    finally:
        with _stance_lock:
            _stance_users -= 1
            if _stance_users == 0:
                _stance.__exit__(None, None, None)


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a model, or a module in it, runs as a compiled graph."""
    if hasattr(model.forward, "_torchdynamo_orig_callable"):
        return True
    return any(module._compiled_call_impl is not None for module in all_modules(model))
