"""Drafting with a shallow exit, an adapter and the model's own head (Kangaroo §3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import Draft, Text, Verdict
from ..errors import SettingError, UnsupportedModelError
from ..learned.saving import register
from ..model.anatomy import Anatomy
from ..model.cache import SpeculativeCache
from ..model.head import HeadRows
from ..model.partial import ForwardPass
from ..model.plan import LayerPlan
from ..model.transfer import RowNumbers, at_places
from ..modules.adapter import Adapter
from ..modules.reduced_head import ReducedHead
from ..stop.rules import ConfidenceThreshold
from ..validation import StrPath
from .early_exit import ExitSource
from .growing import DraftStep
from .partial import PartialDraft
from .source import Drafter, Session

# How many tokens of other sources the adapter can catch up on in models with recurrent states.
_LATE = 32


@register("draft")
@dataclass(frozen=True, repr=False)
class EarlyExitAdapter(ExitSource[Adapter]):
    """Drafts with layers ``0 .. E-1``, an adapter that was fitted to them, and the model's own head.

    Args:
        adapter: the adapter, or the folder or Hub repository that holds one, see ``fit_adapter``.
        head: a reduced head with the tokens that can be drafted, see :class:`EarlyExit`; for adapters that have no head
            of their own.

    Raises:
        SettingError, SettingTypeError: there is no such adapter or head, or they do not fit together.
    """

    adapter: Adapter | StrPath
    head: ReducedHead | StrPath | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", self._load("adapter", Adapter))
        self._load_head()
        if self.head is not None and self.module.head is not None:
            raise SettingError(
                "EarlyExitAdapter(head): this adapter has a head of its own, so the model's is not run. Leave `head` "
                "out, or fit an adapter with own_head=False."
            )

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        return self.exit_at(self.module.exit_layer, anatomy)

    def start(self, session: Session) -> Drafter:
        plan, head = self.plan(session.anatomy), self.head_rows(session.target.model)
        self.module.check(session.knowledge.fingerprint)
        return AdapterDraft(session.limits(ConfidenceThreshold()), plan, self.module, head)


class AdapterDraft(PartialDraft):
    """A :class:`PartialDraft` with an adapter after the exit, which has keys and values of its own."""

    def __init__(self, session: Session, plan: LayerPlan, adapter: Adapter, head: HeadRows | None) -> None:
        super().__init__(session, plan, head)
        self.adapter = adapter
        target = session.target
        rows = len(target.cache.cursors)
        self._cache = SpeculativeCache(1, rows, target.cache.capacity)
        # The slots of each row that the adapter has seen: from the first number up to, but excluding, the second.
        self._seen = [0] * rows
        self._first = [0] * rows
        self._roots = RowNumbers([0] * rows)
        self._began = False
        target.cache.look_back(_LATE)
        target.observe_prefill((adapter.exit_layer,), self._see_prompt)

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        self._roots = text.last_slots()
        return super().propose(text, max_new)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Corrects which slots the adapter has seen: not those of rejected tokens, nor those of accepted siblings."""
        super().update(text, verdicts, logits)
        for row, (verdict, root) in enumerate(zip(verdicts, text.last_slots(), strict=True)):
            line = 0
            while line < len(verdict.nodes) and verdict.nodes[line] == line + 1:
                line += 1
            self._seen[row] = min(self._seen[row], self._roots[row] + 1 + line, root)

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        late = max(cursor - seen for cursor, seen in zip(cursors, self._seen, strict=True))
        starts: Sequence[int] = cursors
        if late > 0:  # the last drafted token of a draft that was accepted as a whole
            starts, feed = text.tokens_before([cursor + 1 for cursor in cursors], late + 1, self.target.first_slots())
        self._seen = [cursor + 1 for cursor in cursors]
        # Rows whose tokens cannot all be fed again have junk after their last one.
        ends = [cursor - start for cursor, start in zip(cursors, starts, strict=True)]
        if self.adapter.head is None:
            run = ForwardPass(
                self.plan,
                keep=1 if min(ends) == feed.shape[1] - 1 else 0,
                head_input_fn=lambda states: self._adapted(states, starts).to(states.dtype),
                head_rows=self.head,
            )
            step = self.target.step(feed, starts, run)
            assert step.logits is not None
            assert step.exit_state is not None
            logits, states = at_places(step.logits, ends), at_places(step.exit_state, ends)
        else:
            run = ForwardPass(self.target.full_plan, stop=self.adapter.exit_layer)
            entered = self.target.step(feed, starts, run).captured
            assert entered is not None
            hidden = at_places(self._adapted(entered, starts), ends)
            head = self.adapter.on(hidden.device).head
            assert head is not None
            logits, states = head(hidden), at_places(entered, ends)
        return DraftStep(logits[:, -1], states[:, -1], states)

    def _see_prompt(self, states: torch.Tensor, cursors: Sequence[int], lengths: list[int]) -> None:
        if states.dim() != 3:
            raise UnsupportedModelError(
                f"{self.target.anatomy.model_name} has states of {list(states.shape)} between its layers, which an "
                "adapter cannot take."
            )
        if not self._began:
            self._began, self._first, self._seen = True, list(cursors), list(cursors)
        self._adapted(states, cursors)
        # Rows whose prompt ended in an earlier chunk get junk after it.
        for row, (cursor, length) in enumerate(zip(cursors, lengths, strict=True)):
            if cursor == self._seen[row]:
                self._seen[row] = cursor + length

    def _adapted(self, states: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """The adapter's output for states ``[b, s, d]`` of the tokens that start at the slots ``starts``."""
        s, device = states.shape[1], states.device
        self._cache.seek(starts, s)
        positions = (RowNumbers.of(starts).on(device) + torch.arange(s, device=device)).expand(len(starts), s)
        with torch.no_grad():
            mask = None if max(starts) == 0 and self.target.padding is None else self._mask(positions, max(starts) + s)
            hidden: torch.Tensor = self.adapter.on(device)(states, positions, self._cache, mask)
        return hidden

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Which of the first ``length`` slots the tokens at ``positions`` ``[b, s]`` see: ``[b, 1, s, length]``."""
        device = positions.device
        keys = torch.arange(length, device=device)
        first = RowNumbers(self._first).on(device)[:, None]
        mask = (keys <= positions[:, :, None]) & (keys >= first)
        if (padding := self.target.padding) is not None:
            real = padding.to(device).bool()[:, : len(keys)]
            mask[:, :, : real.shape[1]] &= real[:, None]
            mask |= keys == positions[:, :, None]  # a padded token sees itself, so that no row is empty
        return mask[:, None]
