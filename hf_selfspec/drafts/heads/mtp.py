"""Drafting with MTP layers, which read the model's last states (DeepSeek-V3, arXiv 2412.19437, §2.2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.nn.functional import pad
from typing_extensions import Self

from ...batch import Draft, Text
from ...errors import SettingError, SettingTypeError
from ...learned.saving import register
from ...model.attention.interface import MaskSpec, at_positions
from ...model.cache.speculative_cache import SpeculativeCache
from ...model.forward_pass import ForwardPass
from ...model.head import HeadRows
from ...model.patching import within
from ...model.transfer import RowNumbers, at_places
from ...modules.assistant import AssistantHead
from ...modules.mtp import MtpHead
from ...modules.published import EAGLE3
from ...modules.shipped import shipped_mtp
from ..growing import DraftStep
from ..source import Drafter, FittedSource, Session
from ..states import StatesDraft, picked
from ..stop import FixedLength, ProductThreshold
from .assistant import AssistantDraft


@register
@dataclass(frozen=True)
class MTP(FittedSource[MtpHead]):
    """Drafts with MTP layers, each of which predicts one token from the model's last states, and the model's own head.

    Args:
        head: an :class:`MtpHead`, or the folder or Hub repository of one or of an assistant of Gemma 4; ``None`` for
            the layers that ship with the model, see :func:`hf_selfspec.load_mtp`, which loads them if there are none.

    Raises:
        SettingError, SettingTypeError: there is no such head.
    """

    head: MtpHead | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.head is None:
            return
        self._load("head", MtpHead)
        if any(part.is_meta for part in self.module.parameters()):
            raise SettingError(
                "MTP(head) has no weights yet: load them with MtpHead.from_pretrained(folder) or load_state_dict(..., "
                "assign=True), or make a head by MtpHead.of(model)."
            )

    @classmethod
    def from_eagle3(cls, checkpoint: str | os.PathLike[str], state_layers: Sequence[int] = ()) -> Self:
        """Returns drafts with a head of EAGLE-3 (arXiv 2503.01840) or P-EAGLE (arXiv 2602.01469) that others publish.

        Args:
            checkpoint: the folder or Hub repository, in the original format (``midlayer.*``) or that of speculators.
            state_layers: the layers of the model whose entering states the head reads; by default those that its
                configuration names, else 2, ``L // 2`` and ``L - 3``.

        Raises:
            SettingError, SettingTypeError: there is no such head, it is damaged, or a variant that is not served. One
                of another model is refused by ``generate``.
        """
        if not isinstance(checkpoint, (str, os.PathLike)):
            raise SettingTypeError(f"MTP.from_eagle3 takes a folder or a name on the Hub, got {checkpoint!r}.")
        return cls(cast(MtpHead, EAGLE3.load(checkpoint, state_layers)))

    def start(self, session: Session) -> Drafter:
        head = shipped_mtp(session.target.model) if self.head is None else self.module
        if isinstance(head, AssistantHead):
            return AssistantDraft(session.with_usual_stop(ProductThreshold()), head)
        head.check(session.knowledge.fingerprint)
        tokens = head.tokens if head.output is None else None
        rows = None if tokens is None else HeadRows(session.target.model, tokens)
        if head.mask_state is not None:
            session = replace(session, max_draft=min(session.max_draft, head.num_tokens))
            if session.target.model.device.type != "cpu":  # as of blocks, which a GPU need not look at
                session = session.with_usual_stop(FixedLength(head.num_tokens))
        return MtpDraft(session.with_usual_stop(ProductThreshold()), head, rows)


class MtpDraft(StatesDraft):
    """Drafts with MTP layers. Entry ``e`` of a layer's cache is made of one token and what was known before it: of the
    model's states where these are known, else of the head's own."""

    def __init__(self, session: Session, head: MtpHead, head_rows: HeadRows | None) -> None:
        self.in_one_forward, target = head.mask_state is not None, session.target
        super().__init__(session, head.read_layers(target.model), head_rows=head_rows)
        self._mtp, self._last = head, len(head.layers) - 1
        rows, capacity = len(self._entered_count), target.cache.capacity
        self._caches = [SpeculativeCache(layer.depth, rows, capacity) for layer in head.layers]
        # Of the draft: tokens and states that enter the next layer, how many of them count, and the layers so far.
        self._tokens = self._states = torch.empty(0, device="cpu", dtype=torch.float32)
        self._counts = [0] * len(self._entered_count)
        self._depth = self._masked = 0  # and in one forward the places behind the first

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        steps, self._depth = self.steps, 0
        self._masked = min(self.session.longest, max(max_new)) - 1 if self.in_one_forward else 0
        draft = super().propose(text, max_new)
        if self._depth:
            self._end()
            self.steps = steps + 1 if self.in_one_forward else self.steps
        return draft

    def take_in(self, text: Text) -> None:
        self._depth = self._masked = 0
        self._begin(text)
        self._end(least=1)  # a draft begins with the state that leaves the first layer

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        if self._mtp.output is not None:
            states = self._predicted(text, feed)
            with within(self.target.autocast):
                logits = self._mtp.on(states.device, states.dtype).own_logits(states)
            return DraftStep(logits[:, -1], states[:, -1], None)
        # All layers pass on what they get: the model's own code brings the head's states to the logits.
        run = ForwardPass(
            self.plan,
            start=self.plan.num_layers,
            head_input_fn=lambda states: self._predicted(text, feed).to(states),
            head_rows=self.head,
        )
        step = self.target.step(feed, cursors, run)
        assert step.logits is not None
        return DraftStep(step.logits[:, -1], at_places(self._states, self._ends)[:, -1], None)

    @property
    def _ends(self) -> list[int]:
        """For each row the last of the states that enter the next layer."""
        return [max(count - 1, 0) for count in self._counts]

    def _predicted(self, text: Text, feed: torch.Tensor) -> torch.Tensor:
        """The states ``[b, 1, d]`` that predict what follows the tokens ``[b, 1]``."""
        if not self._depth:
            self._begin(text)
        elif self.in_one_forward:
            self._counts, self._depth = [count + 1 for count in self._counts], self._depth + 1
        else:
            self._follow(feed)
        return at_places(self._states, self._ends)

    def _begin(self, text: Text) -> None:
        """Takes in the tokens since the last draft, with the model's states before them."""
        for row, base in enumerate(text.base):  # embedded prompts have no tokens
            if (late := base - self._first_slot[row]) > 0:
                del self._columns[row][:late]
                self._first_slot[row] = base
        self._counts = [len(places) for places in self._columns]
        self._waiting = [picked(torch.cat(self._waiting, dim=1), self._columns)]
        rows = zip(self._first_slot, self._entered_count, text.base, strict=True)
        begins = RowNumbers([first + taken - base for first, taken, base in rows])
        states = self._waiting[0]
        columns = begins.onwards(states.shape[1], text.device).clamp(max=text.ids.shape[1] - 1)
        self._tokens = text.ids.gather(1, columns.expand(text.batch_size, -1)).clamp(0, self.session.vocabulary - 1)
        if self._masked:
            states = self._with_masks(states)
        self._run(states, self._entered_count)

    def _with_masks(self, states: torch.Tensor) -> torch.Tensor:
        """States ``[b, s + n, d]`` of ``[b, s, d]``, with those of masked places behind each row's, as its tokens."""
        head = self._mtp.on(states.device, states.dtype)
        assert head.mask_state is not None
        states, tokens = pad(states, (0, 0, 0, self._masked)), pad(self._tokens, (0, self._masked))
        is_masked = torch.arange(states.shape[1], device=states.device) >= RowNumbers(self._counts).on(states.device)
        self._tokens = tokens.masked_fill(is_masked.to(tokens.device), head.mask_token)
        return torch.where(is_masked[..., None], head.mask_state, states)

    def _follow(self, feed: torch.Tensor) -> None:
        """Runs the next layer with the tokens ``[b, 1]`` that were drafted, or the last one on its own state."""
        ends = RowNumbers(self._ends)
        if self._depth <= self._last:
            places = ends.on(feed.device).expand(len(feed), 1)
            self._tokens = self._tokens.roll(-1, 1).scatter(1, places, feed)
            self._run(self._states, self._entered_count)
        else:
            states, starts = at_places(self._states, ends), zip(self._entered_count, self._entered, strict=True)
            self._tokens, self._counts = feed, [1] * len(feed)
            self._run(states, [taken + count + self._depth - 1 - self._last for taken, count in starts])

    def _run(self, states: torch.Tensor, starts: Sequence[int]) -> None:
        """Runs a layer over tokens and states, which are entries from ``starts`` on."""
        layer, tokens = min(self._depth, self._last), self._tokens
        (b, s), device, target = tokens.shape, states.device, self.target
        cache, begun = self._caches[layer], RowNumbers(starts)
        cache.seek(begun, s)
        slots = begun.onwards(s, device).expand(b, s)
        spec = MaskSpec(slots, max(starts) + s, is_even=begun.are_equal) if max(starts) else None
        positions = self._positions(slots, ahead=layer + 1)
        if (limit := target.anatomy.position_limit) is not None:
            positions = positions.clamp(max=limit - 1)
        head = self._mtp.on(device, states.dtype)
        embedding = head.embedding
        embedded = target.model.get_input_embeddings()(tokens) if embedding is None else embedding(tokens.to(device))
        with torch.no_grad(), within(target.autocast), at_positions(spec):
            states = states if self._depth else head.fused(states)
            self._states = head(embedded.to(device), states, target.following.positions(positions, None), cache, layer)
        self._depth += 1
        if self._depth == 1:
            self._entered = self._counts

    def _end(self, least: int = 0) -> None:
        """Runs the layers that a short draft has not come to, since all have to know the text; then what is known of
        the text stays, except for entries in which a later layer has a drafted token, and the ``least`` last ones."""
        while self._depth <= self._last:
            self._follow(self._tokens[:, -1:])
        self._counts = self._entered
        kept = max(self._last, least)
        late = [list(range(max(count - kept, 0), count)) for count in self._counts]
        ends = zip(self._entered_count, self._counts, late, strict=True)
        self._entered_count = [taken + count - len(columns) for taken, count, columns in ends]
        self._columns = [list(range(len(columns))) for columns in late]
        self._waiting = [picked(self._waiting[0], late)] if kept else []
