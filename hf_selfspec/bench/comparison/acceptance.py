"""How many drafted tokens were accepted, under the names that vLLM and AIPerf use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .calls import Call

# The most places in a draft, and the fewest rounds that reach a place, for which a rate is shown.
_POSITIONS = 16
_FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over all calls of one way.

    Attributes:
        num_rounds: verification passes of each row; a round without a draft is one.
        num_draft_tokens: drafted tokens (siblings in a tree do not count), ``None`` where this is not known.
        num_accepted_tokens: drafted tokens that were kept.
        mean_acceptance_length: mean tokens of a round, including the bonus token.
        draft_acceptance_rate: share of the drafted tokens that were kept.
        acceptance_histogram: how often a round kept that many drafted tokens.
        conditional_acceptance: for each place in a draft how often its token was kept if those before it were; a
            draft that had ended counts as not kept.
        simulated_free_verification: tokens for each one-token forward's worth of verification, if a forward over up to
            32 tokens cost as much as one over a single token; forwards of a draft's own layers are not counted.
            ``None`` where the sizes of rounds are not known.
    """

    num_rounds: int
    num_draft_tokens: int | None
    num_accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_histogram: dict[str, int]
    conditional_acceptance: list[float]
    simulated_free_verification: float | None


def acceptance(calls: Sequence[Call]) -> Acceptance | None:
    """Returns the acceptance over these calls; ``None`` if none had rounds."""
    rounds = [call.rounds for call in calls if call.rounds is not None and call.rounds.rounds]
    if not rounds:
        return None
    histogram: Counter[int] = Counter()
    for one in rounds:
        histogram.update(one.histogram)
    count = sum(one.rounds for one in rounds)
    accepted = sum(one.accepted for one in rounds)
    known = [one.drafted for one in rounds if one.drafted is not None]
    drafted = sum(known) if len(known) == len(rounds) else None
    costs = [one.cost_where_free for one in rounds]
    cost = None if None in costs else sum(cost for cost in costs if cost is not None)
    return Acceptance(
        num_rounds=count,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        mean_acceptance_length=1 + accepted / count,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram={str(length): histogram[length] for length in sorted(histogram)},
        conditional_acceptance=_conditional(histogram),
        simulated_free_verification=(count + accepted) / cost if cost else None,
    )


def _conditional(histogram: Counter[int]) -> list[float]:
    """For each place, the share of rounds that kept its token among those that kept all before it."""
    found = []
    for place in range(1, min(max(histogram, default=0), _POSITIONS) + 1):
        before = sum(times for length, times in histogram.items() if length >= place - 1)
        kept = sum(times for length, times in histogram.items() if length >= place)
        if before < _FEWEST_ROUNDS:
            break
        found.append(kept / before)
    return found
