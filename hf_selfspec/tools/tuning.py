"""Tuning in advance: finds the blocks to skip with the least measured time (Self-SD, arXiv 2309.08168 §3.2)."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
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
# After this many proposals in a row that were timed already, the search assumes that there are no others.
_ALL_TIMED = 100


@dataclasses.dataclass(frozen=True)
class OfflineSearch:
    """Self-SD's search: Bayesian optimisation of the measured time per token, over sets of any size.

    The first sets are random.

    Args:
        max_steps: sets to time (1,000 in the paper, on 8 texts).
        random_steps: how many of these are random, before Bayesian optimisation proposes the others.
        seed: seed of the random sets.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    max_steps: int = 100
    random_steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("OfflineSearch(max_steps)", self.max_steps)
        check_count("OfflineSearch(random_steps)", self.random_steps)
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
    rule = stop or AdaptiveThreshold(ConfidenceThreshold())
    return _Tuning(inner, rows, search or OfflineSearch(), rule, tree, max_new_tokens).run()


@dataclasses.dataclass
class _Tuning:
    model: PreTrainedModel
    rows: list[torch.Tensor]
    search: OfflineSearch
    stop: StopRule
    tree: TopKTree | None
    max_new_tokens: int

    def __post_init__(self) -> None:
        self.space = SkipSpace.of(Anatomy.of(self.model))
        self.speeds: dict[LayerPlan, float] = {}

    def run(self) -> SelfSpec:
        search, speeds = self.search, self.speeds
        self.seconds(None)
        plain = [self.seconds(None, [row]) for row in self.rows]
        rng, repeated = np.random.default_rng(search.seed), 0
        with logging.tqdm(total=search.max_steps, desc="tuning", unit="set") as bar:
            while len(speeds) < search.max_steps and repeated < _ALL_TIMED:
                plan = self._propose(rng)
                if plan in speeds:
                    repeated += 1
                    continue
                repeated = 0
                # Plain generate on one of the texts, in turn, shows how fast the machine is at the moment.
                turn = len(speeds) % len(plain)
                now = self.seconds(None, [self.rows[turn]]) / plain[turn]
                speeds[plan] = now * float(np.mean(plain)) / self.seconds(self._spec(plan))
                bar.set_postfix_str(f"best {max(speeds.values()):.2f}x")
                bar.update()
        return self._finish()

    def _spec(self, plan: LayerPlan) -> SelfSpec:
        draft = SkipLayers(tuple(plan.skipped_attention), tuple(plan.skipped_mlp))
        return SelfSpec(draft, self.stop, self.tree)

    def seconds(self, spec: SelfSpec | None, rows: Sequence[torch.Tensor] | None = None) -> float:
        """Time per token over all texts, or some; with plain ``generate`` for ``None``."""
        texts, count = rows or self.rows, self.max_new_tokens
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "assistant": spec or False}

        wait_for(texts[0].device)
        begun = perf_counter()
        for ids in texts:
            self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        wait_for(texts[0].device)
        return (perf_counter() - begun) / (len(texts) * count)

    def _propose(self, rng: np.random.Generator) -> LayerPlan:
        if len(self.speeds) < self.search.random_steps:
            return self.space.random(rng, float(rng.uniform(*_RATIOS)))
        from ..search.bayes import suggest  # needs scikit-learn and SciPy, which the rest of the package does not

        return suggest(self.space, self.speeds, rng, resize=True)

    def _finish(self) -> SelfSpec:
        """Times the best sets in turn with each other and with plain ``generate``."""
        best = sorted(self.speeds, key=lambda plan: -self.speeds[plan])[:_LAST_ROUND]
        specs = [self._spec(plan) for plan in best]
        rounds = [[self.seconds(spec) for spec in (None, *specs)] for _ in range(_REPEATS)]
        plain, *ours = np.median(rounds, axis=0).tolist()
        spec, speedup = specs[int(np.argmin(ours))], plain / min(ours)
        if speedup <= 1:
            warnings.warn(
                f"tune: no set of blocks to skip made {type(self.model).__name__} faster on these texts (the best "
                f"one {speedup:.2f}x). Generate without it, or use SelfSpec(), which drafts only where that pays.",
                stacklevel=4,
            )
        return spec
