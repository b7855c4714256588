"""Choosing an exit layer and a stop rule on the first texts that a model generates."""

import math
from dataclasses import replace

import torch

from ...batch import Draft, Text, Verdict
from ...errors import SettingError, UnsupportedModelError
from ...model.exits import LOGIT_ELEMENTS, Exits
from ...model.forward_pass import ForwardPass
from ...model.head import HeadRows
from ...model.plan import LayerPlan
from ...search.choice import ExitChoice
from ...search.exit_study import ExitStudy
from ...search.forward_costs import Budget, share_of
from ...search.replay import Trace, trace
from ..free.looking import LookingDraft
from ..source import Session
from ..stop.rules import FixedLength, confidence

# Share of the time of all calls that may be spent on looking at exits, and the share while an exit seems to pay but was
# not compared yet: a first look takes as long as about 18 rounds, so a call of 256 tokens has time for it.
_BUDGET, _PROMISING = 0.03, 0.3
# The rounds that a first look takes. Half of what the exit may save in the rest of the call has to make up for them;
# where an earlier call has found the exit, further calls are expected.
_LOOK = 18
# Tokens on which one exit is tried. Logits are kept for a trial from the time on when this share of it can be paid for.
_TRIED, _SAVING = 16, 0.7
# Tokens of text after which only the exits that look fastest are compared, and their number. Maximum number of tokens
# that one look covers, and the fewest that are worth it.
_SHORTLIST, _LISTED = 256, 3
_WINDOW = 128
_LEAST = 8
# Generated tokens after which the first look at all exits takes place, without waiting for the end of the text, and how
# many of all rows it covers.
_SOON, _FIRST = 32, 24
# Number of texts on which forwards are timed, and how often each forward is timed on the first of them.
_TIMED_TEXTS = 4
_TIMINGS = 2
_FIRST_STOP = FixedLength(2)


class ProbingDraft(LookingDraft):
    """Drafts nothing until an exit is known to pay, then from the best exit: that at ``layer``, where this is not
    ``None``, is the only one. A stop rule of the session is kept; ``head`` runs in place of the model's own."""

    def __init__(self, session: Session, layer: int | None, head: HeadRows | None) -> None:
        num_layers, model_name = session.anatomy.num_layers, session.anatomy.model_name
        if num_layers < 2:
            raise SettingError(
                f"{model_name} has one layer, so there is no earlier exit. Call generate without `assistant`."
            )
        if not session.anatomy.exits:
            raise UnsupportedModelError(
                f"{model_name} fixes the batch after its last layer, so a probe cannot run its exits together. Give "
                "SelfSpec.layerskip an exit_layer and a num_draft."
            )
        none = LayerPlan(num_layers)
        plan = none if layer is None else LayerPlan.early_exit(num_layers, layer)
        super().__init__(session, _FIRST_STOP, plan, _TRIED, head)
        self.plan = none  # until an exit is chosen
        name = "exit probe" if head is None else f"exit probe with {len(head.tokens)} tokens"
        self.study: ExitStudy = session.knowledge.of(name, lambda _: ExitStudy(num_layers, layer))
        self.exits = Exits(self.target.model)
        self._timings = self.study.timings
        self._budget = Budget(0.0, self.target.clock, self.study.unspent)
        self.study.unspent = 0.0
        self._covered: list[int] | None = None
        self._used: ExitChoice | None = None
        self._round_begun: float | None = None
        self._tried_at = 0
        # Tokens that the call, or the later ones with it, may still get.
        self._left = math.inf if session.max_new is None or self.study.is_promising else session.max_new
        self.target.cache.look_back(_WINDOW)
        self._use_choice()

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """See :meth:`PartialDraft.propose`; drafts nothing before an exit is known to pay."""
        if not self.plan.skipped_layers:
            return Draft.none(text)
        return super().propose(text, max_new)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Looks at the text as far as the budget allows."""
        super().update(text, verdicts, logits)
        self.observe(text, verdicts, logits)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """As :meth:`update`, after a round in which another source drafted."""
        study = self.study
        self._left -= max(len(verdict.tokens) for verdict in verdicts)
        if not study.is_over:
            now = self.target.now()
            if self._round_begun is not None and logits.shape[1] == 1:
                self._timings.add_round(now - self._round_begun)
            if study.choice is None and not study.is_promising:
                self._try_exit(text, verdicts, logits)
            elif max(self._unseen(text)) > (_SOON if study.choice is None else _WINDOW) and self._has_time(_LEAST):
                self._probe(text)
            self._round_begun = self.target.now()
        self._use_choice()

    def finish(self, text: Text) -> None:
        """Looks at the rest of the text, while the model is new."""
        study = self.study
        knows_what_to_do = study.choice is not None or study.is_promising
        if not study.is_over and knows_what_to_do and sum(self._unseen(text)) >= _LEAST and self._budget.left > 0:
            self._probe(text)
        self._use_choice()
        left = self._budget.left
        study.unspent += left if math.isfinite(left) else 0.0

    def _use_choice(self) -> None:
        """Switches to the latest choice, which another thread may have made, and to its share of the time."""
        study, choice = self.study, self.study.choice
        self.needs_ended_rows = not study.is_over
        self.expected_speedup = 0.0 if choice is None or choice.layer is None else choice.expected_speedup
        is_worth = choice is None and study.is_promising and self._left * (1 - 1 / study.bound) > 2 * _LOOK
        self._budget.share = _PROMISING if is_worth else share_of(_BUDGET, choice is not None and choice.drafts)
        if choice is None or choice is self._used:
            return
        if self._used is None and self._covered is not None and choice.drafts:
            self._budget = Budget(self._budget.share, self.target.clock)  # what it gains is worth the first look
        self._used, layers = choice, self.target.anatomy.num_layers
        self.plan = LayerPlan(layers) if choice.layer is None else LayerPlan.early_exit(layers, choice.layer)
        self.session = replace(self.session, stop=self._stop or choice.stop)
        self.reuse_from = choice.reuse_from

    def _unseen(self, text: Text) -> list[int]:
        """For each row how many generated tokens' continuations have not been looked at."""
        if self._covered is None:
            self._covered = [text.prompt_width] * text.batch_size
        return [length - 1 - covered for length, covered in zip(text.lengths, self._covered, strict=True)]

    @torch.no_grad()
    def _try_exit(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Looks at what one exit predicts along the last tokens, if there is time for it."""
        study, left, target = self.study, self._budget.left, self.target
        self._tried_at = self._tried_at or text.prompt_width
        layer, num_layers = study.next_exit(), target.anatomy.num_layers
        share = layer / num_layers
        cost = share * self._timings.expected(_TRIED)
        if left < _SAVING * cost:
            return
        with self._budget.spending():
            self._last_logits.add(text, verdicts, logits)
            counts = self._last_logits.counts([length - self._tried_at for length in text.lengths])
            n = min(_TRIED, max(counts))
            if left < cost or n < _LEAST:
                return
            begun, ends = target.now(), [root + 1 for root in text.last_slots()]
            starts, ids = text.tokens_before(ends, n + 1, target.first_slots())
            run = ForwardPass(LayerPlan.early_exit(num_layers, layer), head_rows=self.head)
            predicted = self._trace(target.step(ids[:, :-1], starts, run).logits, ids[:, 1:])
            if rows := [row for row, count in enumerate(counts) if count >= n and row in target.rows]:
                trial = Trace(predicted.accept[rows], predicted.confidence[rows])
                study.add_trial(layer, trial, self._rules, self.session.max_draft)
            self._timings.add_forward(n, (target.now() - begun) / share)
            self._tried_at = max(text.lengths)

    @torch.no_grad()
    def _probe(self, text: Text) -> None:
        """Times forwards and looks at what all exits predict along the unseen text, as far as there is time."""
        study = self.study
        with self._budget.spending():
            is_timed = study.timings.texts < _TIMED_TEXTS
            repeats = _TIMINGS if study.choice is None else 1
            if is_timed and not self.measure(text, repeats):
                return
            n = min(max(self._unseen(text)), max(_LEAST, _WINDOW // text.batch_size))
            if self._budget.share < 1.0:
                most = self._timings.most_tokens(self._budget.left / study.look)
                if study.choice is None:  # the first look chooses, so it waits until it can take in enough
                    n = min(n, max(_LEAST, _FIRST // text.batch_size))
                    most = most if most >= n else 0
                n = min(n, most)
                if n < min(_LEAST, max(self._unseen(text))):
                    return
            begun, expected = self.target.now(), self._timings.expected(n)
            traces = self._traces(text, n)
            study.look = (self.target.now() - begun) / expected or study.look
            rounds = self._round_seconds() if is_timed else None
            study.add(traces, self._rules, self.session.max_draft, rounds)

    def _traces(self, text: Text, n: int) -> dict[int, list[Trace]]:
        """What each exit predicts along the last ``n`` tokens of each row, as far as they are unseen."""
        unseen = self._unseen(text)
        roots = text.last_slots()
        starts, tokens = text.tokens_before(roots, n, self.target.first_slots())
        # Where in its window the unseen tokens of each row are; short rows have junk after them.
        new = [
            (max(root - count, start) - start, root - start) if row in self.target.rows else (0, 0)
            for row, (root, count, start) in enumerate(zip(roots, unseen, starts, strict=True))
        ]
        self._covered = [length - 1 for length in text.lengths]
        self.target.install()  # the exits' head is run in place of a forward, which must not change meanwhile
        self.exits.attach()
        try:
            few = self.study.tokens >= _SHORTLIST
            self.exits.chosen = tuple(self.study.best(_LISTED) if few else self.study.layers)
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
                    part = slice(start, start + chunk)
                    drafted = self.exits.head(states[part].flatten(0, 1)).to(scores.device).unflatten(0, (-1, n))
                    drafted = drafted if self.head is None else self.head.only(drafted)
                    roughly = self.scorer.roughly(drafted.float())
                    along = trace(roughly, scores[part], confidence(drafted), self.scorer.do_sample)
                    rows += [along.part(row, *span) for row, span in enumerate(new[part])]
                traces[layer] = [row for row in rows if row.accept.size]
            return traces
        finally:
            self.exits.chosen = ()
            self.exits.detach()
