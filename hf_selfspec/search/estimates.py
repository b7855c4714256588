"""What sets of blocks are worth, when each was tried on other windows of text."""

from __future__ import annotations

import numpy as np

_ROUNDS = 8


def effects(
    values: np.ndarray,
    weights: np.ndarray,
    sets: np.ndarray,
    windows: np.ndarray,
    sizes: np.ndarray,
    near: int,
    doubt: float,
) -> tuple[np.ndarray, float]:
    """The part of each score that is the set's own, and not the text's.

    Texts differ more than sets do: what a set scores is taken to be its own effect plus that of the window. Both are
    fitted in turn; a set's effect is drawn towards the mean effect of sets of about its size, the less text it was
    tried on the more.

    Args:
        values: ``[n]`` scores of the tries.
        weights: ``[n]`` how much text each saw.
        sets: ``[n]`` index of the set that was tried.
        windows: ``[n]`` index of the window it was tried on.
        sizes: ``[sets]`` blocks that each set skips.
        near: difference up to which sizes are about the same.
        doubt: weight of the usual effect against that of the set's own tries.

    Returns:
        ``[sets]`` effects, and the mean effect of the windows.
    """
    per_set, per_window = np.bincount(sets, weights), np.bincount(windows, weights)
    distinct, place = np.unique(sizes, return_inverse=True)
    close = np.abs(distinct[:, None] - distinct) <= near
    found = np.zeros(len(sizes))
    text = np.zeros(len(per_window))
    for _ in range(_ROUNDS):
        text = np.bincount(windows, weights * (values - found[sets])) / np.maximum(per_window, 1e-9)
        sums = np.bincount(sets, weights * (values - text[windows]), len(sizes))
        usual = (close @ np.bincount(place, sums)) / (close @ np.bincount(place, per_set))
        found = (sums + doubt * usual[place]) / (per_set + doubt)
    return found, float(np.average(text[windows], weights=weights))
