"""What forwards over part of a model cost, measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from ..model.partial import LayerPlan
from ..model.target import Target

# Tokens in the forward of several.
MANY = 8


def wait_for(device: torch.device) -> None:
    """Waits until ``device`` has done what it was asked to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of ``run``."""
    wait_for(device)
    begun = perf_counter()
    run()
    wait_for(device)
    return perf_counter() - begun


@dataclass(frozen=True)
class ForwardCosts:
    """Seconds of a forward over ``k`` layers and ``m`` tokens, ``fixed + k (layer + token (m - 1))``.

    Attributes:
        fixed: embedding, masks, head and whatever else does not depend on the layers.
        layer: a layer with one token.
        token: what each further token adds to a layer.
        step: what drafting a token takes beside its forward.
        num_layers: ``L``.
    """

    fixed: float
    layer: float
    token: float
    step: float
    num_layers: int

    @classmethod
    def fit(
        cls, early: int, early_one: float, full_one: float, full_many: float, many: int, layers: int, step: float = 0.0
    ) -> ForwardCosts:
        """Costs from three measured forwards.

        Args:
            early: an exit layer.
            early_one: seconds of one token through the first ``early`` layers and the head.
            full_one: seconds of one token through all layers.
            full_many: seconds of ``many`` tokens through all layers.
            many: tokens of the third forward.
            layers: ``L``.
            step: seconds that drafting a token takes beside its forward.
        """
        layer = max(full_one - early_one, 0.0) / (layers - early)
        fixed = max(full_one - layers * layer, 0.0)
        token = max(full_many - full_one, 0.0) / (layers * (many - 1))
        return cls(fixed, layer, token, step, layers)

    def draft(self, exit_layer: int) -> float:
        """Drafting one token."""
        return self.fixed + exit_layer * self.layer + self.step

    def plain(self) -> float:
        """One token through the whole model."""
        return self.fixed + self.num_layers * self.layer

    def verify(self, exit_layer: int, drafted: int) -> float:
        """Verifying ``drafted`` tokens after a draft from ``exit_layer``, with KVQ reuse where it pays."""
        whole = self.plain() + self.num_layers * self.token * drafted
        if drafted < self.reuse_from(exit_layer):
            return whole
        return whole + self.fixed - exit_layer * self.token * drafted

    def reuse_from(self, exit_layer: int) -> int:
        """From how many drafted tokens on KVQ reuse pays (LayerSkip §4.3).

        It spares them the first ``exit_layer`` layers, but the last of them has to go through these on its own, in one
        forward more. Either way each layer runs once, so what counts is what a further token adds to it.
        """
        spared = exit_layer * self.token
        return math.ceil(self.fixed / spared) if spared > 0 else sys.maxsize


@dataclass
class Stopwatch:
    """Repeated timings of the forwards from which costs follow, and of drafting a token.

    Attributes:
        early: the exit layer of the early forwards.
        layers: ``L``.
        seconds: all times of the forwards ``early``, ``full`` and ``many``, and of ``draft``.
    """

    early: int
    layers: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, other: Stopwatch) -> None:
        """Takes in the times of another one."""
        for name, times in other.seconds.items():
            self.seconds.setdefault(name, []).extend(times)

    def measure(
        self,
        target: Target,
        ids: torch.Tensor,
        starts: list[int],
        roots: list[int],
        repeats: int,
        draft: Callable[[], object] | None,
    ) -> None:
        """Times each forward ``repeats`` times in turn, at the end of the text and without changing it.

        Args:
            target: the prepared model.
            ids: ``[b, MANY]`` the last tokens of each row, of which all but the last are in the cache.
            starts: slot of the first of them.
            roots: slot of each row's last token.
            repeats: how often; one round more comes first and does not count.
            draft: drafts one token with the early layers, ``None`` to leave drafting out.
        """
        plan = LayerPlan.early_exit(self.layers, self.early)
        last = ids[:, -1:]
        runs: dict[str, Callable[[], object]] = {
            "early": lambda: target.step(last, roots, plan),
            "full": lambda: target.step(last, roots),
            "many": lambda: target.step(ids, starts),
        }
        if draft is not None:
            runs["draft"] = draft
        for turn in range(repeats + 1):
            for name, run in runs.items():
                found = seconds_of(run, ids.device)
                if turn:
                    self.seconds.setdefault(name, []).append(found)

    def costs(self, of: Callable[[list[float]], float] = min) -> ForwardCosts:
        """The costs that follow from the times so far.

        Args:
            of: what counts of repeated times; the shortest by default, since what disturbs a time makes it longer.
        """
        found = {name: of(times) for name, times in self.seconds.items()}
        step = max(found["draft"] - found["early"], 0.0) if "draft" in found else 0.0
        return ForwardCosts.fit(self.early, found["early"], found["full"], found["many"], MANY, self.layers, step)
