"""Drafting with a shallow exit, an adapter and the model's own head (Kangaroo §3.1)."""

from dataclasses import dataclass

import torch

from ...batch import Text
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.cache.speculative_cache import SpeculativeCache
from ...model.forward_pass import ForwardPass
from ...model.plan import LayerPlan
from ...model.transfer import RowNumbers
from ...modules.adapter import Adapter
from ...validation import StrPath
from ..growing import DraftStep
from ..layers.early_exit import FittedExit
from ..source import Drafter, Session
from ..states import StatesDraft
from ..stop import ConfidenceThreshold


@register
@dataclass(frozen=True)
class EarlyExitAdapter(FittedExit[Adapter]):
    """Drafts with layers ``0 .. E-1``, an adapter that was fitted to them, and the model's own head.

    Args:
        adapter: the adapter, or the folder or Hub repository that holds one, see ``fit_adapter``.

    Raises:
        SettingError, SettingTypeError: there is no such adapter.
    """

    adapter: Adapter | StrPath

    def __post_init__(self) -> None:
        self._load("adapter", Adapter)

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        return self.exit_at(self.module.exit_layer, anatomy)

    def start(self, session: Session) -> Drafter:
        plan = self.plan(session.anatomy)
        self.module.check(session.knowledge.fingerprint)
        return AdapterDraft(session.with_usual_stop(ConfidenceThreshold()), plan, self.module)


class AdapterDraft(StatesDraft):
    """Drafts with the layers below an exit, an adapter, which has keys and values of its own, and a head."""

    def __init__(self, session: Session, plan: LayerPlan, adapter: Adapter) -> None:
        super().__init__(session, (adapter.exit_layer,), plan)
        self._adapter = adapter
        self._cache = SpeculativeCache(1, len(self._entered_count), session.target.cache.capacity)

    def _enter(self, states: torch.Tensor, entries: RowNumbers) -> None:
        self._adapted(states, entries)

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        self.take_in(text)
        entries = cursors.minus(RowNumbers([first - 1 for first in self._first_slot]))
        run = ForwardPass(self.plan, head_input_fn=lambda states: self._adapted(states, entries).to(states.dtype))
        step = self.target.step(feed, cursors, run)
        logits, states = step.logits, step.exit_state
        assert logits is not None
        assert states is not None
        return DraftStep(logits[:, -1], states[:, -1], states)

    def _adapted(self, states: torch.Tensor, entries: RowNumbers) -> torch.Tensor:
        """The adapter's output for states ``[b, s, d]``, which are its entries from ``entries`` on."""
        s, device = states.shape[1], states.device
        self._cache.seek(entries, s)
        slots, mask = entries.onwards(s, device).expand(len(entries), s), None
        if max(entries) and not (s == 1 and entries.are_equal):
            keys = torch.arange(max(entries) + s, device=device)
            mask = (keys <= slots[:, :, None])[:, None]
        with torch.no_grad():
            hidden: torch.Tensor = self._adapter.on(device)(states, self._positions(slots), self._cache, mask)
        return hidden
