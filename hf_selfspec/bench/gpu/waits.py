"""Finds what makes the host wait for the device in a round, as far as torch reports it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ... import transfer
from ...decoding import Decoder

# Rounds after which everything that is cached is there.
_WARM = 2


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Makes rounds, except the first two, raise where the host waits for the device outside ``transfer.read``."""
    original_round, original_read = Decoder._round, transfer.read
    readers = [
        module
        for name, module in sys.modules.items()
        if name.startswith("hf_selfspec.") and getattr(module, "read", None) is original_read
    ]

    def strict_round(decoder: Decoder) -> None:
        if len(decoder.stats.timeline) < _WARM:
            original_round(decoder)
            return
        with _mode("error"):
            original_round(decoder)

    def read(*tensors: torch.Tensor, **options: Any) -> list[Any]:
        with _mode("default"):
            return original_read(*tensors, **options)

    with ExitStack() as replaced:
        replaced.enter_context(patch.object(Decoder, "_round", strict_round))
        for module in readers:
            replaced.enter_context(patch.object(module, "read", read))
        yield


@contextmanager
def _mode(name: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(name)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
