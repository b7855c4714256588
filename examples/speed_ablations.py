"""What ``measure_speed.py`` can leave out or pretend."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import hf_selfspec
from hf_selfspec.control import clock


def stock_linear() -> AbstractContextManager[Any]:
    """Linear layers are torch's own in all ways: an ablation of those that ours chooses by measuring."""
    return patch.object(hf_selfspec.model.linear, "_has_ways", lambda weight: False)


@contextmanager
def free_verification() -> Iterator[None]:
    """Drafts are as large as where 32 tokens take as long to verify as one; figures are simulated from their rounds."""
    flat = (1.0,) * len(clock.SIZES)
    with (
        patch.object(clock, "_ON_CPU", flat),
        patch.object(clock, "_ELSEWHERE", flat),
        patch.object(clock.RoundClock, "add", lambda self, drafted, tokens, seconds: None),
    ):
        yield
