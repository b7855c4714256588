"""The schedule of a search: when it tries which set, when it times forwards, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

from ..model.plan import LayerPlan
from .estimates import Scores
from .on_the_fly import Search
from .proposers import ProposeLayers, Proposer

# How many of the best sets are tried again on each new window.
_TRIED_AGAIN = 3
# On how many windows a set has to be good enough to end the search.
_CONFIRMED = 3
# Windows after which a set that does not pay is tried once more.
_IDLE = 16
# Number of texts on which forwards are timed in a search, and of trials between them.
_TIMED_TEXTS, _TIMED_AFTER = 2, 4


class Schedule:
    """The course of one search.

    Args:
        settings: what is tried, and when the search ends.
        proposer: proposes new sets.

    Attributes:
        window: index of the current window of text.
        steps: number of trials so far.
        is_over: whether the best set is final (SWIFT's acceleration phase).
        has_begun: whether the first set was chosen.
        queue: sets to try before new ones.
    """

    def __init__(self, settings: Search, proposer: Proposer) -> None:
        self.settings = settings
        self.proposer = proposer
        self.window = self.steps = 0
        self.is_over, self.has_begun = False, True
        self.queue: list[LayerPlan] = []
        self._since_better = self._last_retry = 0

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is tried in the current window or the next one."""
        return self.is_over and not self.queue and self.window + 1 < self._last_retry + _IDLE

    @property
    def retry_is_due(self) -> bool:
        """Whether a set that does not pay should be tried again."""
        return self.window >= self._last_retry + _IDLE

    @property
    def proposal_tokens(self) -> int:
        """Tokens of the forward that finds the closest layers before the next trial, 0 for none."""
        return 0 if self.has_begun and self.queue else self.proposer.proposal_tokens

    def wants_timings(self, count: int) -> bool:
        """Whether to time forwards, after ``count`` times: at first, after some trials, and when a set is retried."""
        if self.is_over:
            return bool(self.queue) or not count
        return count < _TIMED_TEXTS and self.steps >= _TIMED_AFTER * count

    def begin(self, propose_layers: ProposeLayers) -> LayerPlan | None:
        """Returns the set to start with and to try first, ``None`` if there is one already."""
        if self.has_begun:
            return None
        self.has_begun = True
        plan = self.proposer.first(propose_layers)
        if plan is not None:
            self.queue = [plan]
        return plan

    def next(self, scores: Callable[[], Scores], propose_layers: ProposeLayers) -> LayerPlan | None:
        """Returns the next set to try, ``None`` if there is nothing to try before the next window."""
        if self.queue:
            return self.queue.pop(0)
        return None if self.is_over else self.proposer.propose(scores(), self.steps, propose_layers)

    def begin_window(self, leaders: list[LayerPlan], best: LayerPlan, matchness: float) -> None:
        """Queues the best of ``leaders`` to be tried again, or ``best`` if there are none; new sets follow."""
        count = _TRIED_AGAIN if self.settings.tries_each_round or not self.steps else 1
        self.queue = leaders[:count] or [best]
        self.proposer.begin_window(best, matchness)

    def retry(self, plan: LayerPlan) -> None:
        """Queues the set of a search that is over to be tried once more."""
        self.queue, self._last_retry = [plan], self.window

    def resume(self, steps: int, window: int, is_over: bool) -> None:
        """Resumes a search that was saved."""
        self.steps, self.window, self.is_over, self._last_retry = steps, window, is_over, window

    def add_trial(self, is_better: bool, best: LayerPlan, matchness: float, trials: int) -> None:
        """Counts a trial, and ends the search if it is done.

        Args:
            is_better: whether the trial found a new best set.
            best, matchness, trials: the best set, its matchness and the number of its trials.
        """
        settings, self.has_begun = self.settings, True
        self.steps += 1
        self._since_better = 0 if is_better else self._since_better + 1
        is_good = matchness > settings.target_matchness and trials >= _CONFIRMED
        is_stuck = self._since_better >= settings.patience or (is_good and self.proposer.may_end_with(best))
        has_steps_left = self.steps < settings.max_steps
        if is_stuck and has_steps_left and self.proposer.go_on(best, matchness):
            self._since_better = 0
        elif is_stuck or not has_steps_left:
            self.end()

    def end(self) -> None:
        """Ends the search; the best set is final."""
        self.is_over, self.queue, self._last_retry = True, [], self.window
