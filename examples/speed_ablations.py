"""What ``measure_speed.py`` can leave out or pretend."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import hf_selfspec
from hf_selfspec import Session
from hf_selfspec.control import clock
from hf_selfspec.lookup import SuffixIndex, VerifyCosts
from hf_selfspec.lookup.successors import Successors

# Nodes of a tree whose size no costs decide.
_ALWAYS = 7


def _ablations() -> dict[str, tuple[AbstractContextManager[Any], ...]]:
    costs = VerifyCosts.of(lambda count: 1.0 if count <= _ALWAYS else 1e6, clock.SIZES[-1])
    return {
        # Linear layers are torch's own in all ways.
        "kernels": (patch.object(hf_selfspec.model.linear, "_has_ways", lambda weight: False),),
        "trees": (patch.object(Session, "takes_trees", False),),
        "suffix": (patch.object(SuffixIndex, "match", lambda self, tail, shortest=1: None),),
        "successors": (patch.object(Successors, "get", lambda self, before, token: None),),
        # Drafts are of 7 nodes wherever there are so many candidates.
        "costs": (patch.object(clock.RoundClock, "costs", costs), patch.object(clock.RoundClock, "pace", 1e-3)),
    }


ABLATIONS = tuple(_ablations())


@contextmanager
def without(names: list[str]) -> Iterator[None]:
    """All ways do without parts of ours, see ``ABLATIONS``."""
    known = _ablations()
    with ExitStack() as stack:
        for name in names:
            for change in known[name]:
                stack.enter_context(change)
        yield


@contextmanager
def free_verification() -> Iterator[None]:
    """Drafts are as large as where 32 tokens take as long to verify as one; figures are simulated from their rounds."""
    flat = (1.0,) * len(clock._TOKENS)
    with (
        patch.object(clock, "_ON_CPU", flat),
        patch.object(clock, "_ELSEWHERE", flat),
        patch.object(clock.RoundClock, "add", lambda self, drafted, tokens, seconds: None),
    ):
        yield
