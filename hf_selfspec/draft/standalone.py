"""Drafting outside of this package's decode loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..batch import Text
from ..errors import SettingTypeError, UnsupportedModelError
from ..learned.knowledge import KnowledgeOfCall
from ..model.anatomy import Anatomy
from ..model.cache import SpeculativeCache
from ..model.partial import ForwardPass
from ..model.target import Target
from ..stop.rules import StopRule
from ..verify.scoring import Scorer
from .early_exit import EarlyExit
from .partial import PartialDraft
from .source import DraftSource, Session

# Initial cache slots, since the final length of the text is not known.
_SLOTS = 1024


class StandaloneDraft(PartialDraft, CandidateGenerator):
    """An early exit for any loop that calls :meth:`get_candidates`, with a cache of its own (one row).

    All its blocks come before the first altered layer, so its keys and values are exact and are kept.
    """

    _seen: tuple[int, ...] = ()

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns candidates for transformers' assisted generation.

        Args:
            input_ids: ``[1, s]`` the text so far.

        Returns:
            ``[1, s + t]`` the text with the draft, and ``[1, t, v]`` the draft's scores (``None`` when greedy).
        """
        ids = input_ids[0].tolist()
        known = self._seen
        same = next((i for i, (a, c) in enumerate(zip(known, ids, strict=False)) if a != c), min(len(known), len(ids)))
        start = min(same, len(ids) - 1)
        limit = self.target.anatomy.position_limit
        count = self.limits.longest if limit is None else max(0, min(self.limits.longest, limit - len(ids)))
        text = Text.of(input_ids, [0], count)
        self.target.commit(text.last_slots())
        with self.target.prepared():
            if start < len(ids) - 1:
                self.target.step(input_ids[:, start:-1], [start], ForwardPass(self.plan))
            draft = self.propose(text, [count])
        t = draft.lengths[0]
        # What went through the early layers: the text and all drafted tokens but the last.
        self._seen = (*ids, *draft.tokens[0, : max(t - 1, 0)].tolist())
        scores = None if draft.q is None else draft.q.log()
        return torch.cat([input_ids, draft.tokens[:, :t]], dim=1), scores

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to learn: which blocks run is fixed."""


def standalone_draft(
    source: DraftSource,
    stop: StopRule | None,
    max_draft: int,
    model: PreTrainedModel,
    knowledge: KnowledgeOfCall,
    processors: LogitsProcessorList | None,
    do_sample: bool,
) -> StandaloneDraft:
    """Returns an early exit as a ``CandidateGenerator`` with a cache of its own."""
    anatomy = Anatomy.of(model)
    plan = source.plan(anatomy) if isinstance(source, EarlyExit) else None
    if not isinstance(source, EarlyExit) or plan is None or stop is None:
        raise SettingTypeError(
            f"only EarlyExit(layer) with a stop rule can draft on its own outside this package's loop, got {source!r} "
            f"and {stop!r}: other drafts read keys and values that only the full model writes."
        )
    if anatomy.is_recurrent:
        raise UnsupportedModelError(
            f"{anatomy.model_name} has recurrent states, which other loops cannot restore when a draft is rejected. "
            "Use generate(assistant=...)."
        )
    session = Session(
        target=Target(model, anatomy, SpeculativeCache(anatomy.num_layers, 1, _SLOTS)),
        scorer=Scorer(processors or LogitsProcessorList(), 1, do_sample).for_drafts,
        stop=stop,
        tree=None,
        max_draft=max_draft,
        eos_tokens=frozenset(),
        new_tokens=_SLOTS,
        max_new=None,
        stateful=(),
        knowledge=knowledge,
    )
    return StandaloneDraft(session, plan, repr(source), source.head_rows(model))
