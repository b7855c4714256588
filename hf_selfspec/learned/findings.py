"""What a draft source learns about a model and keeps from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..stats import GenerationStats


class Findings:
    """What is known of one model for one kind of call; a source overrides what it needs.

    Attributes:
        changed: called when there is something new to save, or ``None``.
    """

    changed: Callable[[], None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the next call can skip drafting and does not need to look at its text."""
        return False

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Records a call that did neither."""

    def report(self, stats: GenerationStats) -> None:
        """Adds what is known to the statistics of a call."""

    def state(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is something else; nothing is changed then.
        """


class TextFindings(Findings):
    """Findings that hold users' texts: they can be forgotten, and processes that share a file merge them."""

    def forget(self) -> None:
        """Drops the texts and what follows from them."""
        raise NotImplementedError

    def merge(self, state: dict[str, Any]) -> None:
        """Adds what another process knows, as :meth:`state` returned it there; raises what :meth:`restore` does."""
        raise NotImplementedError
