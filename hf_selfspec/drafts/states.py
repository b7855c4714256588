"""What drafts with heads have in common that read the model's states and keep something of each verified token.

What each kind of head sees and keeps, for a text whose tokens up to ``n`` were verified:

============  ===================================  ==============================  ==================================
head          entry ``e`` of its cache is made of  a draft's first step reads      what a round leaves
============  ===================================  ==============================  ==================================
MTP, EAGLE-3  state of token ``e``, token e + 1    entries up to ``n``             entries made of the model's states;
                                                                                   those of drafted tokens are made anew
P-EAGLE       the same; behind ``n`` the mask's    the same, and the masked ones,  as EAGLE-3's; masked entries are
              state and token                      in one forward                  written over
block         state of token ``e``                 entries up to ``n``, and the    entries of verified tokens; the next
                                                   block's own, behind them        block is written over this one
assistant     nothing: it has no cache             state of ``n``, the model's      nothing
                                                   keys and values up to ``n``
adapter       state of token ``e`` after layer E   entries up to ``n`` and that    entries of verified tokens; those of
                                                   of its own token, from layer E  drafted ones are made anew
============  ===================================  ==============================  ==================================

States come with each verification, whoever drafted. They wait in ``_waiting``, of which ``_columns`` tells the columns
that count in each row, until a draft begins, or too many wait: then the head takes them in, and ``_entered_count``
grows.
"""

from collections.abc import Sequence

import torch

from ..batch import Text, Verdict
from ..errors import UnsupportedModelError
from ..model.head import HeadRows
from ..model.plan import LayerPlan
from ..model.transfer import RowNumbers, upload
from .layers.partial import PlanDrafter
from .source import Session

# So many states of the model wait at most until the head takes them in, where others draft.
_WAITING = 512


class StatesDraft(PlanDrafter):
    """Drafts with a head of its own caches. The states of verified tokens, whoever drafted these, wait until the head
    takes them in."""

    def __init__(
        self,
        session: Session,
        layers: tuple[int, ...],
        plan: LayerPlan | None = None,
        head_rows: HeadRows | None = None,
    ) -> None:
        target = session.target
        super().__init__(session, plan or LayerPlan(session.anatomy.num_layers), head_rows)
        rows = len(target.cache.cursors)
        # States of the model that the head has not taken in, in pieces [b, any, d], and for each row the columns that
        # count; the slot of the token after each row's first state, and its states that were taken in and stay.
        self._waiting: list[torch.Tensor] = []
        self._columns: list[list[int]] = [[] for _ in range(rows)]
        self._first_slot = [0] * rows
        self._entered_count = [0] * rows
        target.observe_prefill(layers, self._see_prompt, keeps_verified=True)

    def take_in(self, text: Text) -> None:
        """Takes in the states that wait, all that are known of ``text``."""
        if self._waiting:
            self._enter(picked(torch.cat(self._waiting, dim=1), self._columns), RowNumbers(self._entered_count))
            self._entered_count = [
                taken + len(places) for taken, places in zip(self._entered_count, self._columns, strict=True)
            ]
            self._waiting, self._columns = [], [[] for _ in self._entered_count]

    def _enter(self, states: torch.Tensor, entries: RowNumbers) -> None:
        """Makes entries of the head's cache, in each row from ``entries`` on, of states ``[b, s, n d]``: of the first
        ``len(self._columns[row])`` of a row, behind which there is junk that later entries write over."""
        raise NotImplementedError

    def _positions(self, entries: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """The positions in the text of entries ``[b, s]``, each made with the token so far ``ahead`` of its state."""
        return entries + RowNumbers([first - 1 + ahead for first in self._first_slot]).on(entries.device)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        super().update(text, verdicts, logits)
        self.observe(text, verdicts, logits)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:  # type: ignore[override]  # None by default
        """Keeps the states of the tokens before the new ones."""
        states, rows = self.target.verified, zip(self._first_slot, self._entered_count, self._columns, strict=True)
        assert states is not None
        begun = [first - 1 + taken + len(places) for first, taken, places in rows]
        ends = zip(verdicts, text.last_slots(), begun, strict=True)
        self._keep(states, [verdict.sources[: root - slot] for verdict, root, slot in ends])
        if sum(piece.shape[1] for piece in self._waiting) > _WAITING:
            self.take_in(text)

    def _see_prompt(self, states: torch.Tensor, cursors: Sequence[int], lengths: list[int]) -> None:
        if states.dim() != 3:
            raise UnsupportedModelError(
                f"{self.target.anatomy.model_name} has states of {list(states.shape)}, which no head can take."
            )
        if not self._waiting:
            self._first_slot = [cursor + 1 for cursor in cursors]
        new = []
        for cursor, length, first, places in zip(cursors, lengths, self._first_slot, self._columns, strict=True):
            # Rows whose prompt ended in an earlier piece get junk.
            next_slot = first - 1 + len(places)
            new.append(list(range(next_slot - cursor, length)) if next_slot >= cursor else [])
        self._keep(states, new)

    def _keep(self, states: torch.Tensor, columns: Sequence[Sequence[int]]) -> None:
        width = sum(piece.shape[1] for piece in self._waiting)
        self._waiting.append(picked(states, columns))
        for places, new in zip(self._columns, columns, strict=True):
            places += range(width, width + len(new))


def picked(values: torch.Tensor, columns: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of values ``[b, s, d]`` those at each row's columns, ``[b, n, d]``, with junk after short rows."""
    most = max(map(len, columns))
    if all(list(row) == list(range(len(row))) for row in columns):
        return values if most == values.shape[1] else values[:, :most].clone()  # a view would keep all of them
    index = upload([[*row, *[0] * (most - len(row))] for row in columns], values.device)
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[-1]))
