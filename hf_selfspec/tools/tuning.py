"""Tuning in advance: finds the blocks to skip with the least measured time (Self-SD, arXiv 2309.08168 §3.2)."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..drafts.growing import TopKTree
from ..drafts.layers.skip_layers import SkipLayers
from ..drafts.stop import AdaptiveThreshold, ConfidenceThreshold, StopRule
from ..errors import SettingTypeError, UnsupportedModelError
from ..model.anatomy import Anatomy, causal_lm
from ..model.encoding import checked_texts, encoded
from ..model.module_tools import is_tensor_parallel
from ..model.plan import LayerPlan
from ..model.transfer import wait_for
from ..search.skip_search import SkipSpace
from ..selfspec import SelfSpec
from ..validation import check_count

# How many sets are timed again at the end, and how often, so that none wins by luck.
_LAST_ROUND, _REPEATS = 3, 3
_RATIOS = (0.2, 0.6)
# How many of the first sets are random, before Bayesian optimisation proposes the others.
_RANDOM = 10


@dataclasses.dataclass(frozen=True)
class OfflineSearch:
    """Self-SD's search: Bayesian optimisation of the measured time per token, over sets of any size.

    The first ten sets are random.

    Args:
        max_steps: sets to propose, each of which is timed once (1,000 in the paper, on 8 texts).
        seed: seed of the random sets.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    max_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("OfflineSearch(max_steps)", self.max_steps)
        check_count("OfflineSearch(seed)", self.seed, least=0)


def tune(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    search: OfflineSearch | None = None,
    stop: StopRule | None = None,
    tree: TopKTree | None = None,
    max_new_tokens: int = 64,
    max_prompt_tokens: int | None = None,
) -> SelfSpec:
    """Finds the blocks to skip for a kind of text by timing drafts on it, with a progress bar.

    Args:
        model: a causal LM of transformers or a PEFT model around one.
        tokenizer: the model's tokenizer.
        texts: prompts like those that the model will get; 4 to 8 are enough (8 in the paper).
        search: how long to search.
        stop: when drafts end, at a confidence that adapts as in the paper by default.
        tree: siblings at each depth.
        max_new_tokens: tokens to generate for each text.
        max_prompt_tokens: a text is cut after this many tokens; ``None`` for no limit.

    Returns:
        A ``SelfSpec`` with the fastest set, to be kept with ``save_pretrained``. Warns if it is not faster than plain
        ``generate``.

    Raises:
        SettingError, SettingTypeError: there are no texts, the model has fewer than 4 layers, or an argument is not
            allowed.
        UnsupportedModelError: the model is spread over several processes.
    """
    inner = causal_lm(model, "tune")
    if is_tensor_parallel(inner):
        raise UnsupportedModelError(
            "tune goes by timings, which differ between the processes of a tensor-parallel model. Name the blocks to "
            "skip, or tune in one process."
        )
    check_count("tune(max_new_tokens)", max_new_tokens)
    if max_prompt_tokens is not None:
        check_count("tune(max_prompt_tokens)", max_prompt_tokens)
    if search is not None and not isinstance(search, OfflineSearch):
        raise SettingTypeError(f"tune(search) must be OfflineSearch(...) or None, got {search!r}.")
    prompts = checked_texts("tune", texts)
    rows = [encoded(tokenizer, prompt, inner.device, max_prompt_tokens)["input_ids"] for prompt in prompts]
    search, rule = search or OfflineSearch(), stop or AdaptiveThreshold(ConfidenceThreshold())
    space, speeds, rng = SkipSpace.of(Anatomy.of(inner)), dict[LayerPlan, float](), np.random.default_rng(search.seed)

    def spec_of(plan: LayerPlan) -> SelfSpec:
        return SelfSpec(SkipLayers(tuple(plan.skipped_attention), tuple(plan.skipped_mlp)), rule, tree)

    def seconds(spec: SelfSpec | None, of: Sequence[torch.Tensor] = rows) -> float:
        """Time per token over texts; with plain ``generate`` for ``None``."""
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
        wait_for(of[0].device)
        begun = perf_counter()
        for ids in of:
            inner.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, assistant=spec or False, **options
            )
        wait_for(of[0].device)
        return (perf_counter() - begun) / (len(of) * max_new_tokens)

    seconds(None)
    plain = [seconds(None, [row]) for row in rows]
    with logging.tqdm(total=search.max_steps, desc="tuning", unit="set") as bar:
        for step in range(search.max_steps):
            if step < _RANDOM:
                plan = space.random(rng, float(rng.uniform(*_RATIOS)))
            else:
                from ..search.bayes import suggest  # needs scikit-learn and SciPy, which the rest does not

                plan = suggest(space, speeds, rng, resize=True)
            if plan not in speeds:
                # Plain generate on one of the texts, in turn, shows how fast the machine is at the moment.
                turn = len(speeds) % len(plain)
                now = seconds(None, [rows[turn]]) / plain[turn]
                speeds[plan] = now * float(np.mean(plain)) / seconds(spec_of(plan))
            bar.set_postfix_str(f"best {max(speeds.values()):.2f}x")
            bar.update()
    # The best sets in turn with each other and with plain ``generate``.
    specs = [spec_of(plan) for plan in sorted(speeds, key=lambda plan: -speeds[plan])[:_LAST_ROUND]]
    rounds = [[seconds(spec) for spec in (None, *specs)] for _ in range(_REPEATS)]
    usual, *ours = np.median(rounds, axis=0).tolist()
    if (speedup := usual / min(ours)) <= 1:
        warnings.warn(
            f"tune: no set of blocks to skip made {type(inner).__name__} faster on these texts (the best one "
            f"{speedup:.2f}x). Generate without it, or use SelfSpec(), which drafts only where that pays.",
            stacklevel=2,
        )
    return specs[int(np.argmin(ours))]
