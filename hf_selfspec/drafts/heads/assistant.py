"""Drafting with an assistant of Gemma 4, which attends to the model's own keys and values."""

from __future__ import annotations

import torch

from ...batch import Text
from ...errors import UnsupportedModelError
from ...model.patching import within
from ...model.transfer import RowNumbers, at_places
from ...modules.assistant import AssistantHead, stored
from ..growing import DraftStep
from ..source import Session
from ..states import StatesDraft


class AssistantDraft(StatesDraft):
    """Drafts as transformers does with an ``assistant_model``: from the place of the text's last token. Of the model's
    keys an assistant sees those that the model sees from there, and none of rejected tokens. It is never a graph."""

    def __init__(self, session: Session, head: AssistantHead) -> None:
        if session.is_tensor_parallel:
            raise UnsupportedModelError("an assistant reads keys of which tensor-parallel processes have a part each.")
        super().__init__(session, head.read_layers(session.target.model))
        self._head, self._stored = head, stored(session.target.model)

    def _enter(self, states: torch.Tensor, entries: RowNumbers) -> None:
        self._states = at_places(states, [max(len(places) - 1, 0) for places in self._columns])

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        target, rows = self.target, self.target.active_rows
        if cursors == text.last_slots():
            self._begin(text)
        embedded = target.model.get_input_embeddings()(feed)
        entered = torch.cat([embedded.to(self._states), self._states], dim=-1)
        entered = entered if rows is None else rows.pick(entered, 0)
        with within(target.autocast):
            output = self._head.on(entered.device, entered.dtype).assistant(inputs_embeds=entered, **self._seen)
        found = output.logits, output.last_hidden_state
        logits, states = found if rows is None else map(rows.spread, found)
        self._states = states.to(self._states)
        return DraftStep(logits[:, -1], states[:, -1], None)

    def _begin(self, text: Text) -> None:
        """Takes in the last state, and finds the keys and values in the rows that are still generating."""
        self.take_in(text)
        target, kept, device = self.target, list(self.target.rows), self._states.device
        ends = text.last_slots().of_rows(kept)
        slots, n = ends.on(device), max(ends)
        self._seen = {
            "position_ids": target.following.positions(slots.expand(len(kept), 1), kept),
            "attention_mask": None if ends.are_equal else torch.arange(n, device=device) >= n - slots,
            "shared_kv_states": {kind: target.cache.layers[at].before(ends) for kind, at in self._stored.items()},
        }
