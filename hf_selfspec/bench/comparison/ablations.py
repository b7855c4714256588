"""Parts of this package that a comparison can leave out, and free verification, which it can pretend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ...control import costs as clock
from ...control.costs import RoundCosts
from ...draft.source import Session
from ...errors import SettingError
from ...lookup import SuffixIndex
from ...lookup.successors import Successors
from ...model import linear

# The number of nodes in a tree whose size is not decided by costs.
_ALWAYS = 7


def _ablations() -> dict[str, tuple[AbstractContextManager[Any], ...]]:
    costs = RoundCosts.of(lambda count: 1.0 if count <= _ALWAYS else 1e6, clock.SIZES[-1])
    return {
        # Linear layers are torch's own in all ways of generating.
        "kernels": (patch.object(linear, "_has_ways", lambda weight: False),),
        "trees": (patch.object(Session, "takes_trees", False),),
        "suffix": (patch.object(SuffixIndex, "match", lambda self, tail, shortest=1: None),),
        "successors": (patch.object(Successors, "get", lambda self, before, token: None),),
        # Drafts have 7 nodes wherever there are that many candidates.
        "costs": (patch.object(clock.CostCurve, "costs", costs), patch.object(clock.CostCurve, "pace", 1e-3)),
    }


def _free_verification() -> tuple[AbstractContextManager[Any], ...]:
    flat = (1.0,) * len(clock._TOKENS)
    return (
        patch.object(clock, "_ON_CPU", flat),
        patch.object(clock, "_ELSEWHERE", flat),
        patch.object(clock.CostCurve, "add", lambda self, drafted, tokens, seconds: None),
    )


ABLATIONS = tuple(_ablations())


def check_ablations(names: Sequence[str]) -> None:
    """Checks the names of parts.

    Raises:
        SettingError: there is no such part.
    """
    for name in names:
        if name not in ABLATIONS:
            raise SettingError(f"--without {name}: there is no such part. Give one of {', '.join(ABLATIONS)}.")


@contextmanager
def changed(without: Sequence[str], free_verification: bool) -> Iterator[None]:
    """Runs all ways without some parts of this package.

    Args:
        without: names in ``ABLATIONS``.
        free_verification: drafts are as large as if 32 tokens took as long to verify as one; the figure
            ``simulated_free_verification`` is simulated from their rounds.
    """
    known = _ablations()
    with ExitStack() as stack:
        for change in [*(one for name in without for one in known[name])]:
            stack.enter_context(change)
        for change in _free_verification() if free_verification else ():
            stack.enter_context(change)
        yield
