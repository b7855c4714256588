"""Drafts outside of this package's loop."""

from __future__ import annotations

from transformers import LogitsProcessorList, PreTrainedModel

from ..errors import SettingTypeError, UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.cache import SpeculativeCache
from ..model.target import Target
from ..stop.rules import StopRule
from ..verify.scoring import Scorer
from .early_exit import EarlyExit
from .partial import PartialDraft
from .reduced import head_rows
from .source import DraftSource, Limits

# Slots to begin with, since it is not known how long the text will be.
_SLOTS = 1024


def standalone_draft(
    source: DraftSource,
    stop: StopRule | None,
    max_draft: int,
    model: PreTrainedModel,
    processors: LogitsProcessorList | None,
    do_sample: bool,
) -> PartialDraft:
    """An early exit as a ``CandidateGenerator`` with a cache of its own.

    Args:
        source, stop, max_draft: see ``SelfSpec``.
        model: the model to draft with.
        processors: logits processors of the generation.
        do_sample: whether tokens are drawn.

    Raises:
        SettingTypeError: the source is not an early exit with a stop rule.
        UnsupportedModelError: the model has recurrent states.
    """
    plan = source.plan(anatomy := Anatomy.of(model)) if isinstance(source, EarlyExit) else None
    if plan is None or stop is None:
        raise SettingTypeError(
            f"only EarlyExit(layer) with a stop rule can draft on its own outside this package's loop, got {source!r} "
            f"and {stop!r}: other drafts read keys and values that only the full model writes."
        )
    if anatomy.is_recurrent:
        raise UnsupportedModelError(
            f"{anatomy.model_name} has recurrent states, which other loops cannot take back when a draft is rejected. "
            "Use generate(assistant=...)."
        )
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, 1, _SLOTS))
    scorer = Scorer(processors or LogitsProcessorList(), 1, do_sample)
    head = head_rows(source, model) if isinstance(source, EarlyExit) else None
    return PartialDraft(target, plan, Limits(stop, max_draft), scorer.for_drafts, head)
