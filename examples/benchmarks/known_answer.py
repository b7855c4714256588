"""How well searches find the half of the blocks that hardly matters, on a model where it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from synthetic import add_random_models, known_skips_llama, random_prompt, shapes
from timing import Table, parsed, parser_with, print_head
from transformers import LlamaForCausalLM, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import TopKLogitsWarper

from hf_selfspec import ConfidenceThreshold, OnTheFlySearch, SelfSpec, SkipLayers
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import cache_for
from hf_selfspec.model.forward_pass import ForwardPass
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.model.transfer import RowNumbers
from hf_selfspec.search.skip_search import SkipSearch

_RATIO = 0.5
# Greedy texts of random models soon repeat themselves, so that agreement there shows little.
_TOP_K = 50
_SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": _TOP_K, "top_p": 1.0}
_WINDOW, _PROMPT, _TOKENS = 32, 64, 256
_HELD_OUT_ROWS, _HELD_OUT_TOKENS, _HELD_OUT_SEED = 16, 96, 1 << 20
# A set counts as equally good if its matchness is at most this much below the known set's.
NEAR = 0.02


def proposers(steps: int, seed: int = 1) -> dict[str, Any]:
    """The searches that are compared: each tries ``steps`` sets, whatever their scores.

    The seed of the random sets is not that of the model, with which the known set was drawn.
    """
    common: dict[str, Any] = {"context_window": _WINDOW, "max_steps": steps, "patience": steps}
    common |= {"target_matchness": 1.0, "budget": 1.0}
    intervals = {"random": steps + 1, "random, every 25th Bayesian (SWIFT)": 25, "Bayesian": 1}
    return {name: OnTheFlySearch(bayes_interval=every, seed=seed, **common) for name, every in intervals.items()}


@dataclass(frozen=True)
class Course:
    """The course of one search: the leading sets in order, their matchness on held-out text, and since when they led.

    The last entries of ``steps`` and ``seconds`` are those of the end of the search.
    """

    steps: list[int]
    seconds: list[float]  # of proposals and trials until then
    matchness: list[float]
    answer: float  # the matchness of the blocks that hardly matter
    blocks: str  # how many of these the last set has

    def cells(self) -> list[str]:
        """The cells of a row below :data:`COLUMNS`."""
        last = self.matchness[-1]
        far = [place for place, matchness in enumerate(self.matchness) if matchness < self.answer - NEAR]
        near_from = 1 + max(far, default=-1)  # the first set from which on all are near
        near = "never" if near_from == len(self.matchness) else f"{self.steps[near_from]}"
        return [f"{self.steps[-1]}", f"{self.seconds[-1]:.1f}", f"{last:.3f}", f"{self.answer:.3f}", self.blocks, near]


COLUMNS = (
    "proposer", "steps", "search s", "held-out matchness", "known set's", "known blocks", "within 2 points from step",
)  # fmt: skip


def follow(model: LlamaForCausalLM, answer: SkipLayers, settings: Any) -> Course:
    """Generates sampled text until a search for the blocks that hardly matter, the ``answer``, is over, and measures
    each set that led on text that it did not see."""
    spec = SelfSpec(SkipLayers(search=settings, ratio=_RATIO), ConfidenceThreshold(0.8))
    watch = _Watch(model, spec)
    seed = 0
    while (search := watch.search) is None or not search.is_over:
        torch.manual_seed(seed)
        prompt = random_prompt(model, 1, _PROMPT, seed)
        criteria = StoppingCriteriaList([watch])
        model.generate(**prompt, max_new_tokens=_TOKENS, assistant=spec, stopping_criteria=criteria, **_SAMPLED)
        seed += 1
    watch.seconds[search.steps] = search.search_seconds
    starts, leaders = zip(*search.best_sets, strict=True)
    steps = [*starts, search.steps]
    plan = answer.plan(Anatomy.of(model))
    *matchness, best = held_out_matchness(model, [*leaders, plan])
    places = search.space.places(plan)
    blocks = f"{len(search.space.places(leaders[-1]) & places)}/{len(places)}"
    seconds = np.interp(steps, list(watch.seconds), list(watch.seconds.values())).tolist()
    return Course(steps, seconds, matchness, best, blocks)


class _Watch(StoppingCriteria):
    """Records the time of each step of a search, and ends the text when the search is over."""

    def __init__(self, model: LlamaForCausalLM, spec: SelfSpec) -> None:
        self._model, self._spec = model, spec
        self.seconds: dict[int, float] = {}

    @property
    def search(self) -> SkipSearch | None:
        """The search, once there is one."""
        return self._spec._knowledge.latest(self._model)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        search = self.search
        self.seconds.setdefault(search.steps, search.search_seconds)
        return torch.full((input_ids.shape[0],), search.is_over, device=input_ids.device)


@torch.no_grad()
def held_out_matchness(model: LlamaForCausalLM, plans: Sequence[LayerPlan]) -> list[float]:
    """How often sampled drafts of each set would be accepted (``Σ min(p, q)``) on texts of the model's own.

    A set predicts the last 32 tokens with the whole model's keys and values before them.
    """
    torch.manual_seed(_HELD_OUT_SEED)
    prompt = random_prompt(model, _HELD_OUT_ROWS, _PROMPT, _HELD_OUT_SEED)
    ids = model.generate(**prompt, max_new_tokens=_HELD_OUT_TOKENS, **_SAMPLED)
    anatomy, (b, s) = Anatomy.of(model), ids.shape
    target = Target(model, anatomy, cache_for(model, anatomy, b, s + _WINDOW))
    roots = RowNumbers([s - 1] * b)
    target.commit(roots)
    warpers = LogitsProcessorList([TopKLogitsWarper(_TOP_K)])

    def scores(plan: LayerPlan) -> torch.Tensor:
        logits = target.step(ids[:, -_WINDOW - 1 : -1], roots, ForwardPass(plan), TreeLayout.replay(_WINDOW)).logits
        flat = logits.float().flatten(0, 1)
        return warpers(ids.new_zeros(len(flat), 0), flat).view_as(logits)

    matchness: dict[LayerPlan, float] = {}
    with target.prepared():
        first = s - 1 - _WINDOW
        target.prefill(ids[:, :first], [0] * b, [first] * b)
        target.step(ids[:, first:-1], [first] * b)
        whole = scores(target.full_plan)
        for plan in dict.fromkeys(plans):
            likely = torch.minimum(scores(plan).softmax(-1), whole.softmax(-1)).sum(-1)  # that its tokens are accepted
            matchness[plan] = float(likely.mean())
    return [matchness[plan] for plan in plans]


def plot(courses: dict[str, Course], title: str, path: str) -> None:
    """Draws the held-out matchness of the leading sets against steps and against seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for name, course in courses.items():
        matchness = [*course.matchness, course.matchness[-1]]
        by_step.step(course.steps, matchness, where="post", label=name)
        by_second.step(course.seconds, matchness, where="post")
    for axes, label in ((by_step, "sets tried"), (by_second, "seconds of search")):
        axes.axhline(course.answer, color="black", linestyle=":", label="known set")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_second.set_xscale("symlog", linthresh=0.1)
    by_second.set_xlim(left=0)
    by_step.set_ylabel("matchness of the leading set, held out")
    by_step.legend(fontsize="small")
    figure.suptitle(f"{title}; synthetic acceptance", fontsize="medium")
    figure.savefig(path)


def main() -> None:
    parser = parser_with(__doc__)
    add_random_models(parser)
    parser.add_argument("--steps", type=int, default=552, help="number of sets that each search tries")
    parser.add_argument("--plot", help="file for a plot")
    args = parsed(parser)
    _, shape = next(shapes(args))
    model, answer = known_skips_llama(shape, _RATIO)
    print_head(args.device, "synthetic acceptance", str(shape))
    table = Table(*COLUMNS)
    courses = {}
    for name, settings in proposers(args.steps).items():
        courses[name] = follow(model, answer, settings)
        table.row(name, *courses[name].cells())
    if args.plot is not None:
        plot(courses, f"{args.layers} layers of width {args.width[0]}", args.plot)


if __name__ == "__main__":
    main()
