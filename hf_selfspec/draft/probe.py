"""Early exit whose layer and draft length are found by a timed probe on the first texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import SettingError, UnsupportedModelError
from ..model.exits import LOGIT_ELEMENTS, Exits
from ..model.head_rows import HeadRows
from ..model.plan import LayerPlan
from ..model.target import Target
from ..search.choice import ExitChoice
from ..search.costs import Stopwatch
from ..search.exit_study import ENOUGH, ExitStudy, exits_to_try
from ..search.replay import Rule, Trace, rules_for, trace
from ..stop.fitted import check_fitted_rule
from ..stop.rules import StopRule, confidence
from ..types import Draft, Text, Verdict
from ..verify.scoring import Scorer
from .partial import PartialDraft
from .source import Limits, RoundSeconds, Session

# Tokens of text after which only the exits that look fastest are compared, and their number. Maximum number of tokens
# that one look covers, and the fewest that are worth it.
_SHORTLIST, _LISTED = 256, 3
_WINDOW = 128
_LEAST = 8
# Generated tokens after which the first look takes place, without waiting for the end of the text.
_SOON = 32
_TIMED_TEXTS = 4
_TIMINGS = 5


@dataclass(frozen=True)
class ProbeSettings:
    """What a probe may choose from.

    Attributes:
        layers: exit layers to compare.
        rules: stop rules to compare.
        stop: the user's own stop rule, which is used whatever the probe finds, or ``None``.
        head: the head of all drafts, ``None`` for the model's own.
    """

    layers: Sequence[int]
    rules: Sequence[Rule]
    stop: StopRule | None = None
    head: HeadRows | None = None


def start_probe(
    session: Session, layer: int | None, limits: Limits, name: str, head: HeadRows | None = None
) -> PartialDraft:
    """Returns the drafter that finds its exit layer, its stop rule, or both on the first texts.

    Args:
        session: the generation.
        layer: the exit layer, ``None`` to find it.
        limits: the limits of drafts, with the stop rule to use until one is chosen.
        name: name of the source, for errors.
        head: runs in place of the model's output head while drafting, ``None`` for that head itself.

    Raises:
        SelfSpecError: the model cannot be probed.
    """
    anatomy, model_name = session.anatomy, session.anatomy.model_name
    advice = "Give SelfSpec.layerskip an exit_layer and a num_draft."
    if anatomy.num_layers < 2:
        raise SettingError(
            f"{model_name} has one layer, so there is no earlier exit. Call generate without `assistant`."
        )
    if not anatomy.exits:
        raise UnsupportedModelError(
            f"{model_name} fixes the batch after its last layer, so a probe cannot run its exits together. {advice}"
        )
    plan = None if layer is None else LayerPlan.early_exit(anatomy.num_layers, layer)
    check_fitted_rule(session.stop, plan, name, session.scorer.do_sample, session.knowledge.fingerprint)
    settings = ProbeSettings(
        layers=exits_to_try(anatomy.num_layers) if layer is None else (layer,),
        rules=rules_for(session.stop, session.max_draft),
        stop=session.stop,
        head=head,
    )
    kind = "exit probe" if head is None else f"exit probe with {head.size} tokens"
    study = session.knowledge.of(kind, lambda _: ExitStudy(anatomy.num_layers))
    exits = Exits(session.target.model)
    draft = ProbingDraft(session.target, limits, session.scorer, settings, exits, study, session.round_seconds)
    draft.reserve(session)
    session.target.cache.look_back(_WINDOW)
    return draft


class ProbingDraft(PartialDraft):
    """Drafts from a middle exit until there is enough text, then from the best one.

    One forward over the last tokens shows what every exit would have predicted after each of them, and a few forwards
    over one and several tokens show what they cost. A model's first text is looked at once it has 32 tokens, and again
    at its end; later texts at their end, until 1,024 tokens were seen. Each choice is based on all texts so far.

    Args:
        target, limits, scorer: see :class:`PartialDraft`.
        settings: what to choose from.
        exits: the model's exits, not attached.
        study: what earlier generations with this model showed; this one adds to it.
        round_seconds: see :attr:`Session.round_seconds`.
    """

    def __init__(
        self,
        target: Target,
        limits: Limits,
        scorer: Scorer,
        settings: ProbeSettings,
        exits: Exits,
        study: ExitStudy,
        round_seconds: RoundSeconds,
    ) -> None:
        self.middle = settings.layers[len(settings.layers) // 3]
        plan = LayerPlan.early_exit(target.anatomy.num_layers, self.middle)
        super().__init__(target, plan, limits, scorer, settings.head)
        self.settings = settings
        self.exits = exits
        self.study = study
        self._round_seconds = round_seconds
        self._seen_columns: list[int] | None = None
        self._used: ExitChoice | None = None
        self._use_choice()

    @property
    def expected_speedup(self) -> float | None:
        """Expected speed-up over rounds without a draft; 0 where no draft pays, or before the first look."""
        choice = self.study.choice
        return 0.0 if choice is None or choice.layer is None else choice.expected_speedup

    @property
    def needs_ended_rows(self) -> bool:
        """Whether exits are still compared, on all rows."""
        return self.study.tokens < ENOUGH

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """See :meth:`PartialDraft.propose`; drafts nothing where the probe found no draft that pays."""
        if not self.plan.skipped_layers:
            return Draft.none(text)
        return super().propose(text, max_new)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Looks at a model's first text as soon as there is enough of it."""
        super().update(text, verdicts, logits)
        self.observe(text, verdicts, logits)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """As :meth:`update`, after a round in which another source drafted."""
        if self.study.choice is None and max(self._unseen(text)) > _SOON:
            self._probe(text)
        self._use_choice()

    def finish(self, text: Text) -> None:
        """Looks at the rest of the text, while the model is new."""
        if self.study.tokens < ENOUGH and sum(self._unseen(text)) >= _LEAST:
            self._probe(text)

    def _use_choice(self) -> None:
        """Switches to the latest choice, which another thread may have made."""
        choice = self.study.choice
        if choice is None or choice is self._used:
            return
        self._used, layers = choice, self.target.anatomy.num_layers
        self.plan = LayerPlan(layers) if choice.layer is None else LayerPlan.early_exit(layers, choice.layer)
        self.limits = replace(self.limits, stop=self.settings.stop or choice.stop)
        self.reuse_from = choice.reuse_from

    def _unseen(self, text: Text) -> list[int]:
        """For each row how many generated tokens' continuations have not been looked at."""
        if self._seen_columns is None:
            self._seen_columns = [text.prompt_width] * text.batch_size
        return [length - 1 - seen for length, seen in zip(text.lengths, self._seen_columns, strict=True)]

    @torch.no_grad()
    def _probe(self, text: Text) -> None:
        self.target.last_slots = text.last_slots()
        traces = self._traces(text)
        stopwatch = None
        if self.study.timings.count < _TIMED_TEXTS:
            early = LayerPlan.early_exit(self.target.anatomy.num_layers, self.middle)
            stopwatch = Stopwatch(early)
            self.measure(text, stopwatch, _TIMINGS)
        self.study.add(traces, stopwatch, self.settings.rules, self.limits.max_draft, self._round_seconds())

    def _traces(self, text: Text) -> dict[int, list[Trace]]:
        """What each exit predicts along the unseen part of each row."""
        unseen = self._unseen(text)
        n = min(max(unseen), max(_LEAST, _WINDOW // text.batch_size))
        roots = text.last_slots()
        starts, tokens = text.tokens_before(roots, n, self.target.first_slots())
        # Where in its window the unseen tokens of each row are; short rows have junk after them.
        new = [
            (max(root - count, start) - start, root - start) if self.target.is_active(row) else (0, 0)
            for row, (root, count, start) in enumerate(zip(roots, unseen, starts, strict=True))
        ]
        self._seen_columns = [length - 1 for length in text.lengths]
        self.target.obey()  # the exits' head is run in place of a forward, which must not change meanwhile
        self.exits.attach()
        try:
            few = self.study.tokens >= _SHORTLIST
            self.exits.chosen = tuple(self.study.best(_LISTED) if few else self.settings.layers)
            logits = self.target.step(tokens, starts).logits
            assert logits is not None
            assert self.exits.states is not None
            active = self.target.active_rows
            exits = self.exits.states if active is None else active.spread(self.exits.states)
            scores = self.scorer.roughly(logits.float())
            traces = {}
            for layer, states in zip(self.exits.chosen, exits, strict=True):
                chunk = max(1, LOGIT_ELEMENTS // (logits.shape[-1] * n))
                rows: list[Trace] = []
                for start in range(0, text.batch_size, chunk):
                    some = slice(start, start + chunk)
                    drafted = self.exits.head(states[some].flatten(0, 1)).to(scores.device).unflatten(0, (-1, n))
                    drafted = drafted if self.head is None else self.head.only(drafted)
                    found = trace(
                        self.scorer.roughly(drafted.float()), scores[some], confidence(drafted), self.scorer.do_sample
                    )
                    rows += [found.part(row, *span) for row, span in enumerate(new[some])]
                traces[layer] = [row for row in rows if row.accept.size]
            return traces
        finally:
            self.exits.chosen = ()
            self.exits.detach()
