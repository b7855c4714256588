"""Searching for blocks to skip while the text is generated (SWIFT §4.1, CLaSp)."""

import math
from dataclasses import replace

import torch

from ...batch import Draft, Text, Verdict
from ...model.forward_pass import ForwardPass
from ...model.layout import TreeLayout
from ...model.plan import LayerPlan
from ...search.forward_costs import MANY, Budget, share_of
from ...search.proposers import Search, SkipSpace, closest_layers, usual_ratio
from ...search.replay import Trace
from ...search.skip_search import SkipSearch
from ...stats import GenerationStats
from ..free.looking import LookingDraft, lengths_before
from ..siblings import CostTree
from ..source import Session
from ..stop.rules import ConfidenceThreshold

# How often each forward is timed on a text.
_TIMINGS = 2
# What a sibling costs besides its pass through the layers (mask, moves), in units of that pass; measured on a CPU.
_TREE = 2.0
# Generated tokens after which the first sets are tried, and how many are worth a look at the end of a text.
_SOON, _LEAST = 32, 8
# A search that has no time to try anything hears of so many rounds at a time.
_RESTED = 8
# Where neither the call nor the search has chosen a stop rule.
USUAL_STOP = ConfidenceThreshold()


class SearchingDraft(LookingDraft):
    """Drafts with the best set of skipped blocks so far, and tries another one after each round, by a forward over the
    last generated tokens in slots beyond the text."""

    def __init__(self, session: Session, start: LayerPlan, search: Search, ratio: float | str) -> None:
        rows = 1 if search.tries_each_round else session.num_rows
        self._window = max(_LEAST, search.context_window // rows)
        super().__init__(session, USUAL_STOP, start, self._window)
        self._tree = session.tree

        def make(other: SkipSearch | None) -> SkipSearch:
            space = SkipSpace.of(session.anatomy)
            share = usual_ratio(self.target.model.num_parameters()) if isinstance(ratio, str) else ratio
            best = start if other is None else other.best
            return SkipSearch(search, space, share, best, ratio == "auto", self._rules, session.max_draft)

        self.search: SkipSearch = session.knowledge.of("skip search", make)
        self._timings = self.search.timings
        self._budget = Budget(0.0, self.target.clock)
        self._looked = 0
        self._behind = 0
        self._timed = self._tried = False
        self._used: tuple[object, object] | None = None
        self._lengths: list[int] | None = None
        self._begun = self.target.clock()
        # Rounds since the search was told of one, and whether another source drafted in any of them.
        self._waited, self._others_drafted = 0, False
        self.target.cache.reserve(min(search.context_window, session.new_tokens))
        self.target.cache.look_back(max(search.context_window, MANY), writes=False)
        self._use_best()

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """See :meth:`PartialDraft.propose`; drafts nothing where no draft pays."""
        self._begun = self.target.now()
        if self.search.choice.drafts:
            self._proposed = super().propose(text, max_new)
        else:
            self._proposed = Draft.none(text)
        return self._proposed

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Reports the accepted tokens to the search, and tries sets as far as its budget allows."""
        super().update(text, verdicts, logits)
        self._waited = 1
        self._learn(text, verdicts, logits, self._proposed)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """As :meth:`update`, after a round in which another source drafted, or none."""
        self._waited += 1
        self._others_drafted |= logits.shape[1] > 1
        self._lengths = self._lengths or lengths_before(text, verdicts)
        if self._waited < _RESTED and self._rests:
            return
        self._learn(text, verdicts, logits, None if self._others_drafted else Draft.none(text))

    @property
    def _rests(self) -> bool:
        """Whether nothing drafts, and logits are not needed yet, since there is no time to try a set for a while."""
        if self.search.choice.drafts or self._budget.share >= 1.0:
            return False
        if self.scorer.do_sample and 2 * self._budget.left >= self._timings.expected(_LEAST):
            return False
        self._last_logits.forget()
        return True

    def _learn(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor, draft: Draft | None) -> None:
        """Reports a round to the search, with the ``draft`` of this source, and tries sets as far as there is time."""
        search = self.search
        if search.is_idle:
            self._last_logits.forget()
            return
        begun = self.target.now()
        with self._budget.spending():
            before = self._lengths or lengths_before(text, verdicts)
            new = [after - length for after, length in zip(text.lengths, before, strict=True)]
            self._lengths, self._looked = list(text.lengths), self._looked or text.prompt_width
            if draft is None:
                search.generated += sum(new)
            else:
                # Tokens that other sources added to this draft do not count for it.
                accepted = sum(node >= 0 for verdict in verdicts for node in verdict.nodes)
                accepted = min(sum(new) - sum(count > 0 for count in new), accepted)
                self._timings.add_round((begun - self._begun) / self._waited)
                search.watch(self.plan, sum(draft.lengths), accepted, tokens=sum(new))
            if search.is_over:
                self._last_logits.forget()
            else:
                self._last_logits.add(text, verdicts, logits)
            unseen = max(text.lengths) - self._looked
            if unseen > (min(self._window, _SOON) if not search.trials else self._window):
                self._begin_window(text, unseen)
            self._work(text, self._behind)
            self._use_best()
        self._begun, self._waited, self._others_drafted = self.target.clock(), 0, False
        search.search_seconds += self._begun - begun

    def finish(self, text: Text) -> None:
        """Looks at the rest of the text, for searches that look at each token once."""
        begun, search = self.target.clock(), self.search
        self._looked = self._looked or text.prompt_width
        unseen = max(text.lengths) - self._looked
        if not search.settings.tries_each_round and unseen > _LEAST:
            self._begin_window(text, unseen)
        if self._behind and not (search.settings.tries_each_round and self._tried):
            with self._budget.spending():
                self._work(text, min(_LEAST, self._behind))
            search.search_seconds += self.target.clock() - begun

    def report(self, stats: GenerationStats) -> None:
        self.search.report(stats)

    def _use_best(self) -> None:
        search, choice = self.search, self.search.choice
        self.needs_ended_rows = not search.is_over
        self.expected_speedup = choice.expected_speedup if choice.drafts else 0.0
        if self._used == (choice, search.timings.latest):
            return
        self._budget.share = share_of(search.settings.budget, choice.drafts)
        self._used = (choice, search.timings.latest)
        self.plan = choice.plan
        self.session = replace(self.session, stop=self._stop or choice.stop or USUAL_STOP)
        costs = search.timings.latest
        self.reuse_from = costs.reuse_from(choice.plan.first_altered) if costs is not None else 0
        if costs is not None and isinstance(self._tree, CostTree) and self._tree.price is None:
            price = min(_TREE * costs.num_layers * costs.token / costs.plain(), 1.0)
            self.session = replace(self.session, tree=replace(self._tree, price=price))

    def _begin_window(self, text: Text, unseen: int) -> None:
        self._looked = max(text.lengths) - 1
        self._behind = min(unseen - 1, self._window, *text.last_slots())
        self.search.begin_window()

    def _work(self, text: Text, least: int) -> None:
        """Times forwards and tries sets, on at least ``least`` tokens, as long as there is time."""
        search = self.search
        if not self._behind or not self._has_time(least):
            return
        if search.wants_timings and not self._timed:
            if not self.measure(text, _TIMINGS):
                return
            self._timed = True
            self._timings.add_forward(MANY, min(self._timings.seconds["many"][-_TIMINGS:]))
            search.time(self._round_seconds())
        while self._try(text, least) and not search.settings.tries_each_round:
            pass

    def _try(self, text: Text, least: int) -> bool:
        if most := self.search.wants_closest:
            if not self._has_time(most + 1):
                return False
            self.search.closest = closest_layers(self.target, text, self.search.space.whole_layers, most)
        left = self._budget.left
        window = self._behind if left == math.inf else min(self._behind, self._timings.most_tokens(left))
        if window < least or not any(self._last_logits.counts([window] * text.batch_size)):
            return False
        plan = self.search.propose()
        if plan is None:
            return False
        begun = self.target.clock()
        traces = self._traces(text, plan, window)
        self._timings.add_forward(window, self.target.clock() - begun)
        self.search.register(plan, traces)
        self._tried = True
        return True

    @torch.no_grad()
    def _traces(self, text: Text, plan: LayerPlan, window: int) -> list[Trace]:
        """What ``plan`` would have predicted after each of the last tokens (SWIFT §4.1)."""
        ends = torch.tensor(text.lengths, device="cpu")[:, None]
        columns = (ends - 1 - window + torch.arange(window + 1, device="cpu")).clamp(min=0).to(text.ids.device)
        tokens = text.ids.gather(1, columns)
        run, nodes = ForwardPass(plan), TreeLayout.replay(window)
        trace = self._trace(self.target.step(tokens[:, :-1], text.last_slots(), run, nodes).logits, tokens[:, 1:])
        # In rows that ended early the window reaches into the prompt, which the model did not generate.
        counts = self._last_logits.counts([min(window, length - text.prompt_width) for length in text.lengths])
        counts = [count if row in self.target.rows else 0 for row, count in enumerate(counts)]
        return [trace.part(row, window - count, window) for row, count in enumerate(counts) if count]
