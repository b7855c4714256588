"""Settings of the searches that run while text is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..learned.saving import register
from ..validation import MOST_WINDOW, check_count, check_share


def usual_ratio(parameters: int) -> float:
    """Returns the skip ratio that SWIFT uses for models with this number of parameters."""
    return 0.5 if parameters >= 30e9 else 0.45 if parameters >= 10e9 else 0.4


@register("search")
@dataclass(frozen=True)
class OnTheFlySearch:
    """Random sets, now and then one by Bayesian optimisation, tried on the last generated tokens (SWIFT §4.1).

    Args:
        context_window: number of generated tokens on which a set is tried (γ).
        max_steps: maximum number of sets to try (S).
        bayes_interval: Bayesian optimisation proposes one of this many sets; the others are random (β).
        patience: number of sets without a better one after which the search ends.
        target_matchness: matchness, over at least three windows, at which the search ends.
        budget: share of the time of each call that the search may take, including the first call, and half of it
            until a set was found that pays; 1 for no limit and a trial after each round, as in the paper. Calls in
            which a trial would take more than that try nothing.
        seed: seed of the random sets.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    tries_each_round: ClassVar[bool] = True
    context_window: int = 32
    max_steps: int = 1000
    bayes_interval: int = 25
    patience: int = 300
    target_matchness: float = 0.95
    budget: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)
        check_count("OnTheFlySearch(bayes_interval)", self.bayes_interval)
        check_count("OnTheFlySearch(seed)", self.seed, least=0)


@register("search")
@dataclass(frozen=True)
class ClosestLayers:
    """Sets without which the hidden states stay closest to the whole model's (CLaSp, arXiv 2505.24196).

    One forward over copies of the last token finds such sets, of whole layers and of all sizes. Whenever a window of
    text is complete, and at the end of the text, the best set so far and new ones are tried on it, and the best one is
    kept. (The paper uses a new set for each stretch of text.)

    Args:
        context_window: number of generated tokens on which sets are tried, all rows together; at most 32 for the first.
        max_steps: maximum number of trials.
        patience: number of trials without a better set after which the search ends.
        target_matchness: matchness, over at least three windows, at which the search ends.
        budget: as in :class:`OnTheFlySearch`.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    tries_each_round: ClassVar[bool] = False
    context_window: int = 64
    max_steps: int = 24
    patience: int = 12
    target_matchness: float = 0.95
    budget: float = 0.03

    def __post_init__(self) -> None:
        _check(self)


Search = OnTheFlySearch | ClosestLayers


def _check(search: Search) -> None:
    name = type(search).__name__
    check_count(f"{name}(context_window)", search.context_window, most=MOST_WINDOW)
    for setting in ("max_steps", "patience"):
        check_count(f"{name}({setting})", getattr(search, setting))
    for setting in ("target_matchness", "budget"):
        check_share(f"{name}({setting})", getattr(search, setting), zero=False, one=True)
