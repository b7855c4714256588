"""A draft while it grows, one depth at a time: a line, and siblings beside it."""

from dataclasses import dataclass

import torch

from ..batch import Draft, Text
from ..errors import SettingError
from ..learned.saving import register
from ..validation import MOST_CANDIDATES, check_count, check_share


@register
@dataclass(frozen=True)
class TopKTree:
    """Top-k siblings at each depth; only the first token is extended (SWIFT §4.2).

    The more confident the draft, the fewer siblings. With sampling, the siblings are drawn without replacement.

    Args:
        widths: ``(confidence, k)`` pairs in order of increasing confidence: a token whose top-1 probability is at most
            ``confidence`` gets ``k`` candidates in all, 256 at most. The last confidence must be 1. The default is the
            paper's.
    """

    widths: tuple[tuple[float, int], ...] = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))

    def __post_init__(self) -> None:
        pairs = self.widths if isinstance(self.widths, tuple) else ()
        are_pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
        for edge, width in pairs if are_pairs else ():
            check_share("TopKTree(widths): a confidence", edge, zero=False, one=True)
            check_count("TopKTree(widths): k", width, most=MOST_CANDIDATES)
        edges = [edge for edge, _ in pairs] if are_pairs else []
        if not edges or edges != sorted(set(edges)) or edges[-1] != 1.0:
            raise SettingError(
                "TopKTree(widths) must be a tuple of (confidence, k) pairs whose confidences rise from above 0 to 1, "
                f"as ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1)), got {self.widths!r}."
            )

    @property
    def most(self) -> int:
        """The most candidates at one depth."""
        return max(width for _, width in self.widths)

    def width(self, lowest: float) -> int:
        """Returns the number of candidates, given a draft's highest probability (or NaN), of all rows the lowest."""
        return next((width for edge, width in self.widths if lowest <= edge + 1e-6), self.widths[-1][1])


@dataclass
class DraftStep:
    """What is predicted after one token: ``logits`` ``[b, v]`` from ``state`` ``[b, d]``, the states ``[b, n, d]`` from
    which verification can start, if any, and for each row whether it proposes a token (``None``: all do)."""

    logits: torch.Tensor
    state: torch.Tensor
    prefix_state: torch.Tensor | None
    is_sure: list[bool] | None = None


class GrowingDraft:
    """What was drafted so far: for each row whether its draft is continued (``drafting``) and how many tokens count
    (``lengths``). ``write_to_text`` where processors or rules read the draft in the text."""

    def __init__(self, text: Text, max_new: list[int], write_to_text: bool = True) -> None:
        self.drafting = [count > 0 for count in max_new]
        self.lengths = [0] * text.batch_size
        self._text = text
        self._max_new = max_new
        self._write_to_text = write_to_text
        self._picks: list[torch.Tensor] = []  # [b, width] for each depth, the token of the line first
        self._qs: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []

    @property
    def depth(self) -> int:
        """Number of tokens of the longest line."""
        return len(self._picks)

    @property
    def size(self) -> int:
        """Number of tokens of the longest line and beside it."""
        return sum(picks.shape[1] for picks in self._picks)

    def add(self, picks: torch.Tensor, q: torch.Tensor | None, state: torch.Tensor | None = None) -> None:
        """Adds the next depth: tokens ``[b, width]``, the one to extend first, what they were drawn from, and states
        ``[b, n, d]`` of the tokens that were fed, from which verification can start."""
        if self._write_to_text:
            self._text.write_draft(picks[:, 0], self.depth)
        self._picks.append(picks)
        if q is not None:
            self._qs.append(q)
        if state is not None:
            self._states.append(state)

    def keep_rows(self, rows: list[bool]) -> None:
        """Ends the draft of the other rows, before its next token."""
        self.drafting = [on and stays for on, stays in zip(self.drafting, rows, strict=True)]

    def close_rows(self, ends: list[bool]) -> None:
        """Counts the last token in the rows that are still drafting, and ends the drafts that stop with it."""
        self.lengths = [length + on for length, on in zip(self.lengths, self.drafting, strict=True)]
        self.drafting = [
            on and not end and self.depth < wanted
            for on, end, wanted in zip(self.drafting, ends, self._max_new, strict=True)
        ]

    def draft(self, prefix: int) -> Draft:
        """Returns the draft so far; verification starts from states at layer ``prefix`` if there are any."""
        if not (t := max(self.lengths)):
            return Draft.none(self._text)
        columns, parents = [picks[:, :1] for picks in self._picks[:t]], None
        # Siblings come after the line, those of its first token first.
        beside = {depth: picks[:, 1:] for depth, picks in enumerate(self._picks[:t]) if picks.shape[1] > 1}
        if beside:
            places = list(range(t))
            for depth, tokens in beside.items():
                places += [depth] * tokens.shape[1]
            parents = [[parent if parent < length else -1 for parent in places] for length in self.lengths]
        return Draft(
            tokens=_joined([*columns, *beside.values()]),
            lengths=self.lengths,
            parents=parents,
            q=_joined([q[:, None] for q in self._qs[:t]]) if self._qs else None,
            states=_joined(self._states)[:, :t] if self._states else None,
            prefix=prefix if self._states else 0,
        )


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
