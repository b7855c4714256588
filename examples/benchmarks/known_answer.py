"""How well searches find the half of the blocks that hardly matters, on a model where it is known."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from synthetic import add_random_models, known_skips_llama, random_prompt, shapes
from timing import print_head, print_row, print_table_head
from transformers import LlamaForCausalLM, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import TopKLogitsWarper

from hf_selfspec import ClosestLayers, ConfidenceThreshold, OnTheFlySearch, SelfSpec, SkipLayers
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import cache_for
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.partial import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.model.transfer import RowNumbers
from hf_selfspec.search.replay import trace
from hf_selfspec.search.skip_search import SkipSearch
from hf_selfspec.stop.rules import confidence

_AGREEMENT, _RATIO = 0.95, 0.5
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
    common: dict[str, Any] = {
        "context_window": _WINDOW,
        "max_steps": steps,
        "patience": steps,
        "target_matchness": 1.0,
        "budget": 1.0,
    }
    drawn: dict[str, Any] = {**common, "seed": seed}
    return {
        "random": OnTheFlySearch(bayes_interval=steps + 1, **drawn),
        "random, every 25th Bayesian (SWIFT)": OnTheFlySearch(bayes_interval=25, **drawn),
        "Bayesian": OnTheFlySearch(bayes_interval=1, **drawn),
        "closest layers (CLaSp)": ClosestLayers(**common),
    }


@dataclass(frozen=True)
class Course:
    """The course of one search; the entries of the lists are for the leading sets in order, on held-out text."""

    steps: list[int]  # trials after which each set led
    seconds: list[float]  # of proposals and trials until then
    matchness: list[float]
    found: list[int]  # blocks of the known set in each
    total_steps: int
    total_seconds: float
    known_matchness: float
    known_blocks: int

    @property
    def near_from(self) -> int | None:
        """The step from which on the leading set was within 2 points of the known one, ``None`` if it never was."""
        near = None
        for step, matchness in zip(self.steps, self.matchness, strict=True):
            if matchness < self.known_matchness - NEAR:
                near = None
            elif near is None:
                near = step
        return near

    def cells(self) -> list[str]:
        """The cells of a row below :data:`COLUMNS`."""
        return [
            f"{self.total_steps}",
            f"{self.total_seconds:.1f}",
            f"{self.matchness[-1]:.3f}",
            f"{self.known_matchness:.3f}",
            f"{100 * (self.matchness[-1] - self.known_matchness):+.1f}",
            f"{self.found[-1]}/{self.known_blocks}",
            "never" if self.near_from is None else f"{self.near_from}",
        ]


COLUMNS = (
    "proposer", "steps", "search s", "held-out matchness", "known set's", "points", "known blocks",
    "within 2 points from step",
)  # fmt: skip


def follow(model: LlamaForCausalLM, known: SkipLayers, ratio: float, settings: Any) -> Course:
    """Generates sampled text until a search is over, and measures each set that led on text that it did not see.

    ``known`` are the blocks that hardly matter, and ``ratio`` is the share of the blocks that proposed sets skip.
    """
    spec = SelfSpec(SkipLayers(search=settings, ratio=ratio), ConfidenceThreshold(0.8))
    watch = _Watch(model, spec)
    seed = 0
    while (search := watch.search) is None or not search.is_over:
        torch.manual_seed(seed)
        prompt = random_prompt(model, 1, _PROMPT, seed)
        criteria = StoppingCriteriaList([watch])
        model.generate(**prompt, max_new_tokens=_TOKENS, assistant=spec, stopping_criteria=criteria, **_SAMPLED)
        seed += 1
    watch.note(search)
    steps, leaders = zip(*search.best_sets, strict=True)
    known_plan = known.plan(Anatomy.of(model))
    places = search.space.places(known_plan)
    *matchness, known_matchness = held_out_matchness(model, [*leaders, known_plan])
    return Course(
        steps=list(steps),
        seconds=np.interp(steps, list(watch.seconds), list(watch.seconds.values())).tolist(),
        matchness=matchness,
        found=[len(search.space.places(plan) & places) for plan in leaders],
        total_steps=search.steps,
        total_seconds=search.search_seconds,
        known_matchness=known_matchness,
        known_blocks=len(places),
    )


class _Watch(StoppingCriteria):
    """Records the time of each step of a search, and ends the text when the search is over."""

    def __init__(self, model: LlamaForCausalLM, spec: SelfSpec) -> None:
        self._model, self._spec = model, spec
        self.seconds: dict[int, float] = {}

    @property
    def search(self) -> SkipSearch | None:
        """The search, once there is one."""
        found = self._spec._knowledge.latest(self._model)
        assert found is None or isinstance(found, SkipSearch)
        return found

    def note(self, search: SkipSearch) -> None:
        self.seconds.setdefault(search.steps, search.search_seconds)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        search = self.search
        assert search is not None
        self.note(search)
        return torch.full((input_ids.shape[0],), search.is_over, device=input_ids.device)


@torch.no_grad()
def held_out_matchness(model: LlamaForCausalLM, plans: Sequence[LayerPlan]) -> list[float]:
    """How often sampled drafts of each set would be accepted (``Σ min(p, q)``) on texts of the model's own.

    As in a search's trials, a set predicts the last 32 tokens with the whole model's keys and values before them.
    """
    torch.manual_seed(_HELD_OUT_SEED)
    prompt = random_prompt(model, _HELD_OUT_ROWS, _PROMPT, _HELD_OUT_SEED)
    ids = model.generate(**prompt, max_new_tokens=_HELD_OUT_TOKENS, **_SAMPLED)
    assert isinstance(ids, torch.Tensor)
    anatomy, (b, s) = Anatomy.of(model), ids.shape
    target = Target(model, anatomy, cache_for(model, anatomy, b, s + _WINDOW))
    roots = RowNumbers([s - 1] * b)
    target.commit(roots)
    warpers = LogitsProcessorList([TopKLogitsWarper(_TOP_K)])

    def scores(plan: LayerPlan) -> torch.Tensor:
        logits = target.step(ids[:, -_WINDOW - 1 : -1], roots, ForwardPass(plan), TreeLayout.replay(_WINDOW)).logits
        assert logits is not None
        flat = logits.float().flatten(0, 1)
        return warpers(ids.new_zeros(len(flat), 0), flat).view_as(logits)

    found: dict[LayerPlan, float] = {}
    with target.prepared():
        first = s - 1 - _WINDOW
        target.prefill(ids[:, :first], [0] * b, [first] * b)
        target.step(ids[:, first:-1], [first] * b)
        whole = scores(target.full_plan)
        for plan in plans:
            if plan not in found:
                drafted = scores(plan)
                found[plan] = float(trace(drafted, whole, confidence(drafted), do_sample=True).accept.mean())
    return [found[plan] for plan in plans]


def plot(courses: dict[str, Course], title: str, path: str) -> None:
    """Draws the held-out matchness of the leading sets against steps and against seconds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (by_step, by_second) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4), layout="constrained")
    for name, course in courses.items():
        matchness = [*course.matchness, course.matchness[-1]]
        by_step.step([*course.steps, course.total_steps], matchness, where="post", label=name)
        by_second.step([*course.seconds, course.total_seconds], matchness, where="post")
    known = next(iter(courses.values())).known_matchness
    for axes, label in ((by_step, "sets tried"), (by_second, "seconds of search")):
        axes.axhline(known, color="black", linestyle=":", label="known set")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_second.set_xscale("symlog", linthresh=0.1)
    by_second.set_xlim(left=0)
    by_step.set_ylabel("matchness of the leading set, held out")
    by_step.legend(fontsize="small")
    figure.suptitle(f"{title}; synthetic acceptance", fontsize="medium")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_random_models(parser)
    parser.add_argument("--agreement", type=float, default=_AGREEMENT, help="how often the known set agrees")
    parser.add_argument("--steps", type=int, default=552, help="number of sets that each search tries")
    parser.add_argument("--plot", help="file for a plot")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, shape = next(shapes(args))
    model, known = known_skips_llama(shape, agreement=args.agreement)
    print_head(args.device, "synthetic acceptance", str(shape))
    print_table_head(*COLUMNS)
    courses = {}
    for name, settings in proposers(args.steps).items():
        courses[name] = follow(model, known, _RATIO, settings)
        print_row(name, *courses[name].cells())
    if args.plot is not None:
        plot(courses, f"{args.layers} layers of width {args.width[0]}", args.plot)


if __name__ == "__main__":
    main()
