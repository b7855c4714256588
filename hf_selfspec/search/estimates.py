"""Estimates what sets of blocks score on average text, from trials on windows of text and from drafts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Weight of the prior (no effect) against the trials, for each block and for each window of text: the variance of the
# noise divided by that of effects. For a block it counts like one trial, for a window hardly: texts differ freely.
_NO_EFFECT, _USUAL_TEXT = 1.0, 1e-3
# After trials on this many windows of text a set's own scores weigh as much as what other sets suggest. Among many sets
# some score high by luck.
_DOUBT = 4.0
# A set whose expected score is this far below the best has the weight 1/e, provided that the effective number of trials
# is then at least this: more than the 60 effects of a model with 32 layers. Otherwise the scale grows by this factor.
_NEAR, _LEAST, _WIDER = 0.1, 80, 1.3
# Weights follow from expected scores and these from weights, so both are computed alternately.
_ROUNDS = 3
# Degrees of freedom that each effect uses up, less than one since it is shrunk towards 0; also the least share of the
# trials that remains.
_DEGREES = 0.3
# Text has become hard if, over this many drafted tokens, less than this share of the usual number is accepted. The
# share has a standard error of at most 0.031: if half of the tokens are usually accepted, that is more than five of
# them.
_WATCHED, _FAR_BELOW = 256, 0.65


class Scores(NamedTuple):
    """The scores of all trials ``[n]``, how much text each covered, and the indices of its set and its window.

    ``blocks`` ``[sets, blocks]`` is 1 for the blocks that each set skips.
    """

    blocks: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    sets: np.ndarray
    windows: np.ndarray


@dataclass(frozen=True)
class Estimates:
    """Estimated scores of sets ``[sets]`` on average text, and the effects of skipping each block ``[blocks]``.

    ``doubt`` ``[blocks, blocks]`` is a square root of the effects' covariance.
    """

    sets: np.ndarray
    effects: np.ndarray
    doubt: np.ndarray

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Samples effects ``[blocks]`` from their posterior (Thompson sampling, Agrawal and Goyal, arXiv:1209.3352)."""
        return np.asarray(self.effects + self.doubt @ rng.standard_normal(len(self.effects)))


def estimate(scores: Scores) -> Estimates:
    """Fits scores as a function of the skipped blocks and of the window of text.

    The model is ``s = level + x' beta + b(window) + noise / sqrt(weight)``, with ``x`` the skipped blocks and a normal
    prior around 0 for ``beta``: Bayesian linear regression. Its posterior mean is ``A^-1 X' W s`` and its covariance
    ``noise A^-1`` with ``A = X' W X + _NO_EFFECT I``; the windows are eliminated from both first (the Schur complement
    of their diagonal block), since there may be many. The residual is a set's own effect, shrunk towards 0: the best
    linear unbiased prediction (Robinson 1991, "That BLUP is a good thing").

    Effects are additive only among sets that are about as good, so trials near the best count most: a trial's weight is
    multiplied by ``exp((expected - best) / scale)``, with a scale at which the effective number of trials
    ``(sum w)^2 / sum w^2`` (Kish 1965) is large enough.
    """
    blocks, values, weights, sets, windows = scores
    rows, width = blocks[sets], blocks.shape[1]
    near = np.ones(len(values))
    for _ in range(_ROUNDS):
        counted = weights * near
        middle, level = np.average(rows, axis=0, weights=counted), np.average(values, weights=counted)
        skipped, above = rows - middle, values - level
        per_window = np.bincount(windows, counted) + _USUAL_TEXT
        in_window = np.zeros((len(per_window), width))
        np.add.at(in_window, windows, skipped * counted[:, None])
        score_in_window = np.bincount(windows, counted * above)
        normal = (skipped * counted[:, None]).T @ skipped + _NO_EFFECT * np.eye(width)
        inverse = np.linalg.inv(normal - in_window.T @ (in_window / per_window[:, None]))
        effects = inverse @ (skipped.T @ (counted * above) - in_window.T @ (score_in_window / per_window))
        text = (score_in_window - in_window @ effects) / per_window
        near = _nearness(skipped @ effects)
    left = above - skipped @ effects - text[windows]
    total = counted.sum()
    noise = (counted * left**2).sum() / max(total - _DEGREES * width, _DEGREES * total)
    own = np.bincount(sets, weights * left) / (np.bincount(sets, weights) + _DOUBT)
    usual = level + np.average(text[windows], weights=weights)
    doubt = np.linalg.cholesky(inverse * noise + 1e-12 * np.eye(width))
    return Estimates(usual + (blocks - middle) @ effects + own, effects, doubt)


def _nearness(suggested: np.ndarray) -> np.ndarray:
    """The weights ``[n]`` of trials with these expected scores, 1 for the best."""
    below, scale = suggested - suggested.max(), _NEAR
    while True:
        near = np.exp(below / scale)
        if near.sum() ** 2 / (near**2).sum() >= min(_LEAST, 0.9 * len(near)):
            return np.asarray(near)
        scale *= _WIDER


class Feedback:
    """How many of the last drafted tokens were accepted."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int]] = deque(maxlen=_WATCHED)
        self._usual: float | None = None

    def add(self, drafted: int, accepted: int) -> None:
        """Records a round."""
        if drafted:
            self._rounds.append((drafted, accepted))

    def has_become_hard(self) -> bool:
        """Whether drafts are accepted much less often than at the first call of this method."""
        drafted = sum(count for count, _ in self._rounds)
        if drafted < _WATCHED:
            return False
        while drafted - self._rounds[0][0] >= _WATCHED:
            drafted -= self._rounds.popleft()[0]
        share = sum(accepted for _, accepted in self._rounds) / drafted
        if self._usual is None:
            self._usual = share
        return share < _FAR_BELOW * self._usual
