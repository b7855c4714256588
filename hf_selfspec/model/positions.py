"""The last positions that rows may reach."""

from __future__ import annotations

from collections.abc import Sequence

from .transfer import RowNumbers

_NO_END = 1 << 62


class LastPositions:
    """The last position that each row's tokens can have; rows that have ended may be past the end of their text.

    Args:
        reachable: for each row the last position that its text can reach, ``None`` if unlimited.
        limit: number of positions with an embedding, ``None`` if unlimited.
    """

    def __init__(self, reachable: Sequence[int] | None, limit: int | None) -> None:
        self._reachable = reachable
        self._limit = limit
        self._known = RowNumbers([_NO_END])

    def of(self, rows: Sequence[int], last_slots: Sequence[int]) -> RowNumbers:
        """The last positions of ``rows``, given the slots of all rows' last tokens."""
        found = tuple(self._one(row, last_slots[row]) for row in rows)
        if self._known != found:
            self._known = RowNumbers(found)
        return self._known

    def _one(self, row: int, last_slot: int) -> int:
        reachable = _NO_END if self._reachable is None else self._reachable[row]
        # A row's root is a real token, wherever it is; drafted ones stay within `anatomy.position_limit`.
        return reachable if self._limit is None else max(min(reachable, self._limit - 1), last_slot)
