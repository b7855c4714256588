"""Measures how fast a trained model generates with drafts of its own layers, and how fast it could at best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..model import anatomy as anatomies
from ..model.anatomy import Anatomy, Architecture, register_architecture
from ..model.exits import Exits
from ..model.given_cache import cache_for
from ..model.plan import LayerPlan
from ..model.target import Target
from ..search.choice import ExitChoice, LayerArm, replayed_arm
from ..search.costs import MANY, ForwardCosts, Stopwatch
from ..search.exit_study import choose_exit, exits_to_try
from ..search.replay import Trace, rules, trace
from ..selfspec import SelfSpec
from ..stats import GenerationStats
from ..stop.rules import confidence
from ..transfer import wait_for

Way = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Speed:
    """One way of generating, over many prompts, including the prompts' own forwards.

    Attributes:
        seconds: for each prompt the median over the repeats.
        tokens: number of new tokens for each prompt.
        runs: statistics of the ``SelfSpec`` for each prompt.
        same: for each prompt whether the ids are those of the first way.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    runs: list[GenerationStats] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token over all prompts."""
        return 1e3 * sum(self.seconds) / sum(self.tokens)

    @property
    def acceptance_rate(self) -> float:
        """α over all prompts."""
        drafted = sum(run.drafted for run in self.runs)
        return sum(run.accepted for run in self.runs) / drafted if drafted else 0.0

    @property
    def mean_generated_length(self) -> float:
        """M over all prompts."""
        rounds = sum(run.rounds for run in self.runs)
        return sum(run.tokens - len(run.from_draft) for run in self.runs) / rounds if rounds else 1.0


@dataclass(frozen=True)
class Asked:
    """A model and arguments of ``generate``.

    Attributes:
        model: the model, for one prompt at a time.
        options: arguments of ``generate``, the same for all ways.
    """

    model: PreTrainedModel
    options: dict[str, Any]

    def plain(self, **extra: Any) -> Way:
        """Returns a call of ``generate`` with further arguments."""

        def run(ids: torch.Tensor) -> torch.Tensor:
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), **self.options, **extra)
            assert isinstance(found, torch.Tensor)
            return found

        return run

    def early_exit(self, layer: int, num_draft: int) -> Way:
        """Returns transformers' ``assistant_early_exit`` with drafts of one length."""
        config: GenerationConfig = self.model.generation_config
        run = self.plain(assistant_early_exit=layer)

        def configured(ids: torch.Tensor) -> torch.Tensor:
            names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
            kept = {name: getattr(config, name) for name in names}
            for name, value in zip(names, (num_draft, "constant", 0.0), strict=True):
                setattr(config, name, value)
            try:
                return run(ids)
            finally:
                for name, value in kept.items():
                    setattr(config, name, value)

        return configured


def compare(
    ways: dict[str, Way],
    prompts: Sequence[torch.Tensor],
    repeats: int,
    specs: dict[str, SelfSpec] | None = None,
    warm_up: bool = True,
) -> dict[str, Speed]:
    """Times all ways on all prompts, in turn, each prompt ``repeats`` times.

    Args:
        ways: what to compare; ids are compared with the first one's.
        prompts: ids ``[1, s]``.
        repeats: runs of each way on each prompt; the median is taken.
        specs: the ``SelfSpec`` of each way that has one, for its statistics.
        warm_up: whether all ways run once before; otherwise only the first does, so that others learn in the stream.

    Returns:
        The speed of each way.
    """
    found = {name: Speed() for name in ways}
    for run in list(ways.values())[: None if warm_up else 1]:
        run(prompts[0])
    for ids in prompts:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        results: dict[str, torch.Tensor] = {}
        for turn in range(repeats):
            for name, run in ways.items():
                torch.manual_seed(turn)
                begun = perf_counter()
                results[name] = run(ids)
                wait_for(ids.device)
                seconds[name].append(perf_counter() - begun)
        first = next(iter(results.values()))
        for name, speed in found.items():
            speed.seconds.append(median(seconds[name]))
            speed.tokens.append(results[name].shape[1] - ids.shape[1])
            speed.same.append(torch.equal(results[name], first))
            stats = specs[name].stats if specs and name in specs else None
            if stats is not None:
                speed.runs.append(stats)
    return found


def attainable(
    model: PreTrainedModel, texts: Sequence[torch.Tensor], prompt: int, warpers: LogitsProcessorList | None = None
) -> ExitChoice:
    """Finds the best speed-up that drafts of an early exit can have on texts that the model wrote.

    It follows from the agreement of each exit along the texts and the measured costs of forwards, for the best exit and
    stop rule for all texts together; nothing but forwards is counted.

    Args:
        model: the model.
        texts: ids ``[1, s]``, prompts included.
        prompt: number of tokens in the prompts.
        warpers: the warpers of sampling, ``None`` for greedy.
    """
    anatomy = Anatomy.of(model)
    layers = exits_to_try(anatomy.num_layers)
    traces: dict[int, list[Trace]] = {layer: [] for layer in layers}
    for ids in texts:
        for layer, found in _traces(model, ids, prompt, layers, warpers).items():
            traces[layer].append(found)
    return choose_exit(traces, rules(25), forward_costs(model, texts[0]), 25)


@torch.no_grad()
def attainable_with(model: PreTrainedModel, plan: LayerPlan, texts: Sequence[torch.Tensor], prompt: int) -> LayerArm:
    """Finds the best speed-up that greedy drafts of one set of blocks can have on texts that the model wrote.

    The set predicts each token after the whole model's keys and values, as the first token of a draft is predicted.
    Costs of forwards are measured, and nothing but forwards is counted.

    Args:
        model: the model.
        plan: the blocks that draft.
        texts: ids ``[1, s]``, prompts included.
        prompt: number of tokens in the prompts.

    Returns:
        The set with the best stop rule for all texts together.
    """
    anatomy = Anatomy.of(model)
    traces: list[Trace] = []
    stopwatch = Stopwatch(plan, LayerPlan(plan.num_layers, frozenset(), plan.skipped_mlp))
    for ids in texts:
        last = ids.shape[1] - 1
        target = Target(model, anatomy, cache_for(model, 1, last + 2))
        agrees, sure = [], []
        with target.prepared():
            target.prefill(ids[:, :prompt], [0], [prompt])
            for place in range(prompt, last):
                logits = target.step(ids[:, place : place + 1], [place], plan).logits
                assert logits is not None
                agrees.append(float(logits[0, -1].argmax() == ids[0, place + 1]))
                sure.append(float(confidence(logits[0])[-1]))
                target.step(ids[:, place : place + 1], [place])
            if not traces:
                stopwatch.measure(target, ids[:, last - MANY : last], [last - MANY], [last - 1], 25, draft=None)
        traces.append(Trace(np.array([agrees]), np.array([sure])))
    return replayed_arm(plan, rules(25), traces, stopwatch.costs(median), 25)


@torch.no_grad()
def _traces(
    model: PreTrainedModel, ids: torch.Tensor, prompt: int, layers: Sequence[int], warpers: LogitsProcessorList | None
) -> dict[int, Trace]:
    def scores(logits: torch.Tensor) -> torch.Tensor:
        return logits if warpers is None else warpers(ids[:, :0].expand(logits.shape[0], -1), logits)

    written = slice(prompt - 1, ids.shape[1] - 1)
    exits = Exits(model)
    exits.attach()
    try:
        exits.chosen = tuple(layers)
        full = scores(model(input_ids=ids).logits[0, written].float())
        assert exits.states is not None
        found = {}
        for layer, states in zip(layers, exits.states, strict=True):
            logits = exits.head(states[0, written]).float()
            found[layer] = trace(scores(logits)[None], full[None], confidence(logits)[None], warpers is not None)
        return found
    finally:
        exits.chosen = ()
        exits.detach()


@torch.no_grad()
def forward_costs(model: PreTrainedModel, ids: torch.Tensor, repeats: int = 25) -> ForwardCosts:
    """Times forwards of one and of several tokens at the end of ``ids`` ``[1, s]`` (medians, in turn)."""
    anatomy = Anatomy.of(model)
    layers, s = anatomy.num_layers, ids.shape[1]
    target = Target(model, anatomy, cache_for(model, 1, s + 1))
    stopwatch = Stopwatch(LayerPlan.early_exit(layers, max(1, layers // 4)))
    with target.prepared():
        target.prefill(ids[:, :-MANY], [0], [s - MANY])
        target.step(ids[:, -MANY:], [s - MANY])
        stopwatch.measure(target, ids[:, -MANY:], [s - MANY], [s - 1], repeats, draft=None)
    return stopwatch.costs(median)


@contextmanager
def without_reuse(model: PreTrainedModel) -> Iterator[None]:
    """Makes verification run all layers for all drafted tokens: no KVQ reuse (LayerSkip, Table 7)."""
    kind = model.config.model_type
    known = anatomies._ARCHITECTURES.get(kind)
    register_architecture(kind, replace(known or Architecture(), replay=False))
    try:
        yield
    finally:
        if known is None:
            del anatomies._ARCHITECTURES[kind]
        else:
            register_architecture(kind, known)
