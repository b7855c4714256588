"""Measures searches for blocks to skip on a model whose best set is known (synthetic acceptance)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import TopKLogitsWarper

from ..draft.skip_layers import SkipLayers
from ..model.anatomy import Anatomy
from ..model.given_cache import cache_for
from ..model.layout import TreeLayout
from ..model.plan import LayerPlan
from ..model.target import Target
from ..pictures import new_figure, save
from ..search.on_the_fly import ClosestLayers, OnTheFlySearch, Search
from ..search.replay import trace
from ..search.skip_search import SkipSearch
from ..selfspec import SelfSpec
from ..stop.rules import ConfidenceThreshold, confidence
from .synthetic import random_prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Greedy texts of random models soon repeat themselves, so that agreement there shows little.
_TOP_K = 50
_SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": _TOP_K, "top_p": 1.0}
_WINDOW, _PROMPT, _TOKENS = 32, 64, 256
_HELD_OUT_ROWS, _HELD_OUT_TOKENS, _HELD_OUT_SEED = 16, 96, 1 << 20
# A set counts as equally good if its matchness is at most this much below the known set's.
NEAR = 0.02


def proposers(steps: int, seed: int = 1) -> dict[str, Search]:
    """Returns the searches that are compared: each tries ``steps`` sets, whatever their scores.

    Args:
        steps: number of trials of each search.
        seed: seed of the random sets; not that of the model, with which the known set was drawn.
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
    """The course of one search; the entries of the lists are for the leading sets in order, on held-out text.

    Attributes:
        steps: number of trials after which each set led.
        seconds: time in proposals and trials until then.
        matchness: matchness of each set.
        found: number of blocks of the known set in each.
        total_steps, total_seconds: trials and time of the whole search.
        known_matchness: matchness of the known set.
        known_blocks: number of blocks in the known set.
    """

    steps: list[int]
    seconds: list[float]
    matchness: list[float]
    found: list[int]
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

    def row(self, name: str) -> str:
        """A row of the table below :data:`HEAD`."""
        cells = (
            name,
            f"{self.total_steps}",
            f"{self.total_seconds:.1f}",
            f"{self.matchness[-1]:.3f}",
            f"{self.known_matchness:.3f}",
            f"{100 * (self.matchness[-1] - self.known_matchness):+.1f}",
            f"{self.found[-1]}/{self.known_blocks}",
            "never" if self.near_from is None else f"{self.near_from}",
        )
        return "| " + " | ".join(cells) + " |"


_COLUMNS = (
    "proposer", "steps", "search s", "held-out matchness", "known set's", "points", "known blocks",
    "within 2 points from step",
)  # fmt: skip
HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def follow(model: LlamaForCausalLM, known: SkipLayers, ratio: float, settings: Search) -> Course:
    """Generates sampled text until a search is over, and measures each set that led on text that it did not see.

    Args:
        model: the model, see :func:`known_skips_llama`.
        known: the blocks that hardly matter.
        ratio: share of the blocks that proposed sets skip.
        settings: settings of the search.
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
    steps, leaders = zip(*search.found, strict=True)
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

    Args:
        model: the model.
        plans: the sets.

    Returns:
        The matchness of each set.
    """
    torch.manual_seed(_HELD_OUT_SEED)
    prompt = random_prompt(model, _HELD_OUT_ROWS, _PROMPT, _HELD_OUT_SEED)
    ids = model.generate(**prompt, max_new_tokens=_HELD_OUT_TOKENS, **_SAMPLED)
    assert isinstance(ids, torch.Tensor)
    anatomy, (b, s) = Anatomy.of(model), ids.shape
    target = Target(model, anatomy, cache_for(model, b, s + _WINDOW))
    target.last_slots = [s - 1] * b
    warpers = LogitsProcessorList([TopKLogitsWarper(_TOP_K)])

    def scores(plan: LayerPlan) -> torch.Tensor:
        logits = target.step(
            ids[:, -_WINDOW - 1 : -1], target.last_slots, plan, nodes=TreeLayout.replay(_WINDOW)
        ).logits
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


def plot(courses: dict[str, Course], title: str, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws the held-out matchness of the leading sets against steps and against seconds.

    Args:
        courses: the searches, by name, on one model.
        title: the model of the searches; a note that acceptance is synthetic is added.
        path: where to save the plot, in the format that its suffix names.

    Returns:
        The figure, which is not shown and not registered with pyplot.

    Raises:
        SettingError: matplotlib is not installed.
    """
    figure = new_figure("known_answer.plot", 10, 4)
    by_step, by_second = figure.subplots(1, 2, sharey=True)
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
    if path is not None:
        save("known_answer.plot", figure, path)
    return figure
