"""What a draft source learns about a model and keeps from call to call."""

from typing import Any

from ..stats import GenerationStats


class Findings:
    """What a source has learned about one model for one kind of call; a source overrides what it needs."""

    def report(self, stats: GenerationStats) -> None:
        """Adds what was learned to the statistics of a call."""

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned; raises and changes nothing for anything else."""

    def forget(self) -> None:
        """Drops users' texts, if there are any, and what follows from them."""
