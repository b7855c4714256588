"""Searching for blocks to skip while the text is generated (SWIFT §4.1)."""

import torch

from ...batch import Text, Verdict
from ...model.forward_pass import ForwardPass
from ...model.layout import TreeLayout
from ...model.plan import LayerPlan
from ...model.transfer import read, upload
from ...search.budget import Budget
from ...search.skip_search import SkipSearch
from ...search.skip_space import OnTheFlySearch, SkipSpace, usual_ratio
from ...stats import GenerationStats
from ..source import Session
from ..stop.rules import ConfidenceThreshold
from .partial import PlanDrafter

# Where the call has no stop rule (SWIFT §4.2).
USUAL_STOP = ConfidenceThreshold()
# The time of a trial until one was timed, in one-token rounds. By the first guesses of what rounds cost, a forward over
# SWIFT's 32 tokens takes 1.15 to 3.2.
_FIRST_TRIAL = 4
# Fewer tokens of each row, behind the shortest prompts, are not worth a trial.
_LEAST = 8


class SearchingDraft(PlanDrafter):
    """Drafts with the best set of skipped blocks so far, and tries another one after each round, by a forward over the
    last generated tokens in slots beyond the text."""

    expected_speedup = None

    def __init__(self, session: Session, start: LayerPlan, search: OnTheFlySearch, ratio: float | str) -> None:
        super().__init__(session.with_usual_stop(USUAL_STOP), start)
        self._window = search.context_window

        def make(other: SkipSearch | None) -> SkipSearch:
            share = usual_ratio(self.target.model.num_parameters()) if isinstance(ratio, str) else ratio
            return SkipSearch(search, SkipSpace.of(session.anatomy), share, start if other is None else other.best)

        self.search: SkipSearch = session.knowledge.of(f"skip search {session.name}".rstrip(), make)
        self._budget = Budget(search.budget, self.target.clock)
        self._generated = 0
        self.target.cache.reserve(min(self._window, session.new_tokens))
        self.target.cache.look_back(self._window)
        self._use_best()

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Reports the accepted tokens to the search, and tries a set if its budget allows that."""
        super().update(text, verdicts, logits)
        self._learn(text, *self._acceptance.totals)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """As :meth:`update`, after a round in which another source drafted, or none."""
        self._learn(text, 0, 0)

    def report(self, stats: GenerationStats) -> None:
        self.search.report(stats)

    def _learn(self, text: Text, drafted: int, accepted: int) -> None:
        generated = sum(text.lengths) - text.prompt_width * text.batch_size
        self.search.watch(self.plan, drafted, accepted, generated - self._generated)
        self._generated = generated
        if not self.search.is_over:
            self._try(text)
        self._use_best()

    def _use_best(self) -> None:
        self.needs_ended_rows = not self.search.is_over
        self.plan = self.variant = self.search.best

    def _try(self, text: Text) -> None:
        """Tries a set on the last tokens, if all of them were generated and there is time."""
        search, clock = self.search, self.target.clock
        generated = max(text.lengths[row] for row in self.target.rows) - text.prompt_width
        window = min(self._window, *text.last_slots())
        expected = search.trial_seconds or _FIRST_TRIAL * self._budget.elapsed / max(generated, 1)
        if generated <= self._window or window < min(_LEAST, self._window) or not self._budget.allows(expected):
            return
        begun = clock()
        with self._budget.spending():
            if (plan := search.propose()) is not None:
                proposed = clock()
                search.register(plan, self._matchness(text, plan, window))
                search.trial_seconds = clock() - proposed
        search.search_seconds += clock() - begun

    @torch.no_grad()
    def _matchness(self, text: Text, plan: LayerPlan, window: int) -> float:
        """The share of the last ``window`` tokens of all rows that ``plan`` predicts after the text before them."""
        ends = torch.tensor(text.lengths, device="cpu")[:, None]
        columns = (ends - 1 - window + torch.arange(window + 1, device="cpu")).clamp(min=0).to(text.ids.device)
        tokens = text.ids.gather(1, columns)
        step = self.target.step(tokens[:, :-1], text.last_slots(), ForwardPass(plan), TreeLayout.replay(window))
        assert step.logits is not None
        scores = self.scorer.roughly(step.logits.to(tokens.device, torch.float32))
        # In rows that ended early the window reaches into the prompt, which the model did not generate.
        own = [min(window, length - text.prompt_width) for length in text.lengths]
        own = [count if row in self.target.rows else 0 for row, count in enumerate(own)]
        last = torch.arange(window, 0, -1, device=tokens.device) <= upload(own, tokens.device)[:, None]
        return read(((scores.argmax(-1) == tokens[:, 1:]) & last).sum())[0] / sum(own)
