"""Drafting with a block head: all tokens of a draft in one forward (DFlash, arXiv 2602.06036; DFlash2; DSpark, arXiv
2607.05147)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ...batch import Draft, Text
from ...errors import UnsupportedModelError
from ...learned.saving import register
from ...model.cache.speculative_cache import SpeculativeCache
from ...model.forward_pass import ForwardPass, obeying
from ...model.head import output_head, spread
from ...model.patching import within
from ...model.transfer import RowNumbers
from ...modules.block import BlockHead
from ..growing import DraftStep
from ..source import Drafter, FittedSource, Session
from ..states import StatesDraft
from ..stop import FixedLength, ProductThreshold, StopRule


@register
@dataclass(frozen=True)
class Block(FittedSource[BlockHead]):
    """Drafts with a block head that others publish: DFlash (arXiv 2602.06036), DFlash2 or DSpark (arXiv 2607.05147).

    One forward of a few layers, which read some of the model's states, drafts all tokens of a block; a Markov head adds
    to each slot's logits what the token before it suggests, and DFlash2's selector chooses by that token. A draft ends
    below a confidence on a CPU, by the confidence head where there is one, see :class:`ProductThreshold`. On a GPU, so
    that nothing waits, the whole block is verified, or in a cascade as much of it as pays, by how often tokens of
    earlier blocks were right.

    Args:
        head: the folder or Hub repository of a checkpoint of speculators (``dflash``, ``dflash2``, ``dspark``), of
            z-lab, or of transformers' assistants with ``speculation_type="dflash"``.

    Raises:
        SettingError, SettingTypeError: there is no such head, it is damaged, or a variant that is not served. One of
            another model is refused by ``generate``.
    """

    head: BlockHead | str | os.PathLike[str]

    def __post_init__(self) -> None:
        self._load("head", BlockHead)

    def start(self, session: Session) -> Drafter:
        head, model = self.module, session.target.model
        weight, has_head = model.get_input_embeddings().weight, output_head(model) is not None
        # Parameters that are spread over processes have a device mesh, or no values in this process.
        is_plain = weight.is_floating_point() and not (weight.is_meta or hasattr(weight, "device_mesh"))
        if not is_plain or not (has_head or head.lm_head is not None):
            raise UnsupportedModelError(
                f"{session.anatomy.model_name} has no plain embedding in this process's memory (quantised, offloaded, "
                "spread over processes?) or no output head, which block heads need. Use another draft."
            )
        session = replace(session, max_draft=min(session.max_draft, head.num_tokens))
        return BlockDraft(session, head)


class BlockDraft(StatesDraft):
    """Drafts with a block head. Entry ``e`` of its cache is made of the state of one verified token; what a block
    writes behind these is overwritten."""

    in_one_forward = True

    def __init__(self, session: Session, head: BlockHead) -> None:
        target = session.target
        usual: StopRule = FixedLength(head.num_tokens)
        if target.model.device.type == "cpu":  # to look at confidences costs nothing; a GPU would have to send them
            usual = ProductThreshold(confidence=None if head.confidence_head is None else self._confidence)
        super().__init__(session.with_usual_stop(usual), head.read_layers(target.model))
        self._block = head
        self._cache = SpeculativeCache(len(head.layers), len(self._entered_count), target.cache.capacity)
        self._cache.owner = "block"
        # Of the draft: the slots so far, and for each the state [b, d] and logits [b, r]; what a Markov head remembers,
        # and how sure a confidence head is of the last slot, [b].
        self._slot = self._most = 0
        nothing = torch.empty(0, device="cpu", dtype=torch.float32)
        self._states = self._logits = self._memory = self._sure = self._like = nothing
        self._key: tuple[object, ...] = ()  # what its graph is for
        self._tokens: torch.Tensor | None = None  # that can be drafted, where the head is

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        steps, self._slot, self._most = self.steps, 0, min(self.session.longest, max(max_new))
        draft = super().propose(text, max_new)
        self.steps = steps + (self._slot > 0)
        return draft

    def _confidence(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self._sure.to(logits.device)

    def _enter(self, states: torch.Tensor, entries: RowNumbers) -> None:
        head, slots = self._block.on(states.device, states.dtype), entries.onwards(states.shape[1], states.device)
        self._cache.pool = self.target.cache.pool  # known since the prompt
        self._cache.seek(entries, states.shape[1])
        with torch.no_grad(), within(self.target.autocast):
            head.take_in(states, self._positions(slots.expand(len(states), -1)), self._cache)
        self._like = states.new_empty(0)  # tells where and in what type the head runs

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        if not self._slot:
            self._run(text, feed)
        states, logits = self._states[:, self._slot], self._logits[:, self._slot]
        head = self._block.on(states.device, states.dtype)
        features = states  # of the confidence head
        if head.candidate_selector is not None:
            with within(self.target.autocast):
                logits = head.candidate_selector(logits.to(states.device), states, feed[:, -1].to(states.device))
        if head.markov_head is not None:
            with within(self.target.autocast):
                embedded = head.markov_head.markov_w1(feed[:, -1].to(states.device))
                added, self._memory = head.markov_head(embedded, states, self._memory)
            logits = logits + added.to(logits)
            if head.confidence_head is not None and head.settings["confidence_head_with_markov"]:
                features = torch.cat([states, embedded], dim=-1)
        if head.confidence_head is not None:
            self._sure = head.confidence_head["proj"](features)[:, 0].float().sigmoid()
        self._slot += 1
        if self._tokens is not None:
            logits = spread(logits, self._tokens, head.vocabulary)
        return DraftStep(logits, states, None)

    def _run(self, text: Text, feed: torch.Tensor) -> None:
        """Runs the block behind the tokens ``[b, 1]``: states and logits of the slots that are drafted."""
        self.take_in(text)
        device, graphs, cache = self._like.device, self.target.graphs, self._cache
        head, ends, b = self._block.on(device, self._like.dtype), RowNumbers(self._entered_count), len(feed)
        self._tokens = head.tokens if self._tokens is None else self._tokens
        cache.seek(ends, head.block_size)
        slots = ends.onwards(head.block_size, device).expand(b, -1)

        def eager(feed: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
            return self._forward(head, feed, slots, positions, max(ends) + head.block_size, ends.are_equal)

        def fixed(feed: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
            with cache.written_at(slots):
                return self._forward(head, feed, slots, positions, cache.capacity, False)

        inputs = feed, slots.contiguous(), self._positions(slots).contiguous()
        if graphs is None or feed.device != device:
            states, self._logits = eager(*inputs)
        else:
            self._key = self._key or (head, *(weight.data_ptr() for weight in head.parameters()))
            states, self._logits = graphs.run_head(self._key, fixed, eager, inputs, cache)
        first = head.first_slot
        self._states = states[:, first:]
        if head.markov_head is not None:
            with torch.no_grad(), within(self.target.autocast):
                self._memory = states.new_zeros(b, head.markov_head.rank)
                if first and head.markov_head.way == "rnn":  # the slot of the text's last token comes before
                    embedded = head.markov_head.markov_w1(feed[:, -1].to(device))
                    _, self._memory = head.markov_head(embedded, states[:, 0], self._memory)

    def _forward(
        self,
        head: BlockHead,
        feed: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        is_even: bool,
    ) -> list[torch.Tensor]:
        """States ``[b, B, d]`` of a block, and logits of the slots that draft, on a CPU those that are wanted."""
        model = self.target.model
        embedding = model.get_input_embeddings().weight  # without norms or scales of the model's own
        masks = feed.new_full((len(feed), head.block_size - 1), head.mask_token)
        embedded = functional.embedding(torch.cat([feed, masks], dim=1).to(embedding.device), embedding)
        with torch.no_grad(), within(self.target.autocast), obeying(ForwardPass(self.plan)):
            embedded = embedded.to(self._like) * head.settings["embedding_scale"]
            states = head(embedded, slots, positions, length, is_even, self._cache)
            wanted = self._most if slots.device.type == "cpu" else head.num_tokens
            drafted = states[:, head.first_slot : head.first_slot + wanted]
            if head.lm_head is not None:
                return [states, head.scaled(head.lm_head(drafted))]
            output = output_head(model)
            assert output is not None
            weight = next(output.parameters())  # one that is offloaded has a hook that loads it and moves states
            return [states, head.scaled(output(drafted if weight.is_meta else drafted.to(weight.device)))]
