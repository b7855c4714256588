"""Compares our forwards over a few tokens with transformers' own over one token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from ..model.anatomy import Anatomy
from ..model.given_cache import cache_for
from ..model.target import Target
from ..search.costs import seconds_of

COUNTS = (1, 2, 3, 4, 8, 16, 32)


def forward_seconds(
    model: PreTrainedModel, context: int, repeats: int, counts: Sequence[int] = COUNTS
) -> tuple[dict[int, float], dict[int, float]]:
    """Times forwards that continue the same random tokens, in turn; the first run of each does not count.

    Args:
        model: the model.
        context: number of tokens before.
        repeats: timings of each forward.
        counts: numbers of tokens in a forward.

    Returns:
        Median seconds by number of tokens, of transformers' forwards with a ``DynamicCache`` and of ours.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shape = 1, context + max(counts)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator, device="cpu").to(model.device)
    theirs: dict[int, list[float]] = {count: [] for count in counts}
    ours: dict[int, list[float]] = {count: [] for count in counts}
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        anatomy = Anatomy.of(model)
        target = Target(model, anatomy, cache_for(model, 1, ids.shape[1]))
        with target.prepared():
            target.prefill(ids[:, :context], [0], [context])

        def plain(tokens: torch.Tensor) -> None:
            model(tokens, past_key_values=cache, use_cache=True)

        def step(tokens: torch.Tensor) -> None:
            target.step(tokens, [context])

        for _ in range(1 + repeats):
            for count in counts:
                tokens = ids[:, context : context + count]
                theirs[count].append(seconds_of(partial(plain, tokens), ids.device))
                cache.crop(-count)
                with target.prepared():
                    ours[count].append(seconds_of(partial(step, tokens), ids.device))
    return _medians(theirs), _medians(ours)


def _medians(seconds: dict[int, list[float]]) -> dict[int, float]:
    return {count: statistics.median(times[1:]) for count, times in seconds.items()}
