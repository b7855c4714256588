"""Measured costs of forwards over part of a model, and the share of the time that looking for drafts may take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from ..batch import Text
from ..learned.files import as_count, as_number
from ..model.forward_pass import ForwardPass
from ..model.plan import LayerPlan
from ..model.target import Target
from ..model.transfer import wait_for

# Numbers of tokens in the forwards over several tokens.
FEW, MANY = 2, 8
# How much of its share a search may take until it has found a draft that pays.
_UNPROVEN = 1 / 2
# What each further token adds to a forward, in one-token forwards, until that is measured. On CPUs in float32 it was
# 0.02 to 0.1 (SmolLM2 and the demo model, AMD EPYC, one thread), on GPUs less.
_TOKEN = 0.1
# Weight of the earlier rounds against the last one.
_MEMORY = 0.9


def seconds_of(run: Callable[[], object], device: torch.device, clock: Callable[[], float] = perf_counter) -> float:
    """The time of ``run`` by a clock, by default wall-clock time."""
    wait_for(device)
    begun = clock()
    run()
    wait_for(device)
    return clock() - begun


@dataclass(frozen=True)
class ForwardCosts:
    """Seconds of forwards: ``fixed + L (attention + mlp)`` over one token, ``further[m - 1]`` more over ``m > 1``, or
    ``several + L token (m - 1)`` where that was not timed."""

    fixed: float  # embedding, masks, head and everything else that does not depend on the blocks
    attention: float  # an attention block with one token
    mlp: float  # an MLP block with one token
    several: float  # extra cost of the kernels for more than one token, all layers together
    token: float  # each further token in a layer
    step: float  # drafting a token besides its forward
    num_layers: int
    further: tuple[float, ...] = ()  # 0, 1, 2, ... further tokens in a round, from timed rounds; empty without these

    @classmethod
    def of_state(cls, state: dict[str, Any], num_layers: int) -> ForwardCosts:
        """The inverse of ``asdict``; raises KeyError, TypeError or ValueError for anything else."""
        state = dict(state)
        layers, further = as_count(state.pop("num_layers")), tuple(map(as_number, state.pop("further", ())))
        numbers = {name: as_number(value) for name, value in state.items()}
        costs = cls(**numbers, num_layers=num_layers, further=further)
        if layers != num_layers or not costs.plain():
            raise ValueError(f"costs of another model, or of none: {state}")
        return costs

    def draft(self, plan: LayerPlan) -> float:
        attention = self.attention * (self.num_layers - len(plan.skipped_attention))
        return self.fixed + attention + self.mlp * (self.num_layers - len(plan.skipped_mlp)) + self.step

    def plain(self) -> float:
        return self.fixed + self.num_layers * (self.attention + self.mlp)

    def verify(self, prefix: int, drafted: int) -> float:
        """Time of verifying ``drafted`` tokens of a plan with first altered layer ``prefix``, reusing where it pays."""
        if drafted == 0:
            return self.plain()
        whole = self.plain() + self._further(drafted)
        if drafted < self.reuse_from(prefix):
            return whole
        # What reuse saves is at most these layers' share of the timed cost.
        spared = min(prefix * self.token * drafted, prefix / self.num_layers * self._further(drafted))
        return whole + self.fixed - spared

    def _further(self, drafted: int) -> float:
        timed = len(self.further) - 1
        if timed < 0:
            return self.several + self.num_layers * self.token * drafted
        return self.further[min(drafted, timed)] + self.num_layers * self.token * max(drafted - timed, 0)

    def reuse_from(self, prefix: int) -> int:
        """The number of drafted tokens from which it pays to start from their states (LayerSkip §4.3), which costs an
        extra forward of the last one through the first ``prefix`` layers."""
        spared = prefix * self.token
        return math.ceil(self.fixed / spared) if spared > 0 else sys.maxsize


@dataclass
class Stopwatch:
    """Times of forwards (``early`` without some layers, ``attention`` without MLP blocks, ``full``, ``few``, ``many``)
    and of ``draft``, on several texts; ``latest`` are the costs by the ``texts`` so far. What forwards take until these
    were timed follows from rounds and from the forwards of trials."""

    early: LayerPlan
    attention: LayerPlan | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    latest: ForwardCosts | None = None
    texts: int = 0
    _before: dict[str, int] = field(default_factory=dict)  # numbers of times of earlier texts
    _one: float = 0.0  # seconds of a one-token forward, 0 before the first round
    _token: float = _TOKEN  # what each further token adds, in one-token forwards

    def add_round(self, seconds: float) -> None:
        """Records the time of a round; without a draft it is that of a one-token forward."""
        self._one = _MEMORY * self._one + (1 - _MEMORY) * seconds if self._one else seconds

    def add_forward(self, tokens: int, seconds: float) -> None:
        if self._one and tokens:
            self._token = max(seconds / self._one - 1, 0.0) / tokens

    def expected(self, tokens: int) -> float:
        """Expected seconds of a forward over ``tokens`` tokens; infinite before the first round."""
        return self._one * (1 + self._token * tokens) if self._one else math.inf

    def most_tokens(self, seconds: float) -> int:
        """How many tokens a forward of at most ``seconds`` seconds can have, at least 0."""
        if not self._one or seconds < self._one:
            return 0
        further = (seconds / self._one - 1) / self._token if self._token else math.inf
        return int(min(further, 1 << 30))

    def measure(
        self, target: Target, text: Text, repeats: int, draft: Callable[[], object], may_run: Callable[[int], bool]
    ) -> bool:
        """Times the forwards ``repeats`` times in turn over the last tokens of the text, which they do not change;
        ``False`` if ``may_run`` has refused one, from which the next call continues."""
        ends = [root + 1 for root in text.last_slots()]

        def forward(tokens: int, plan: LayerPlan = target.full_plan) -> tuple[int, Callable[[], object]]:
            starts, ids = text.tokens_before(ends, tokens, target.first_slots())
            return tokens, lambda: target.step(ids, starts, ForwardPass(plan))

        runs = {"early": forward(1, self.early), "full": forward(1), "few": forward(FEW), "many": forward(MANY)}
        runs["draft"] = 1, draft
        if self.attention is not None:
            runs["attention"] = forward(1, self.attention)
        for count in range(1, repeats + 1):
            for name, (tokens, run) in runs.items():
                times = self.seconds.setdefault(name, [])
                if len(times) >= self._before.get(name, 0) + count:
                    continue
                if not may_run(tokens):
                    return False
                times.append(seconds_of(run, text.ids.device, target.clock))
        return True

    def complete(self, rounds: Sequence[float] = ()) -> ForwardCosts:
        """Ends the times of a text, with the seconds of rounds with 0, 1, 2, ... drafted tokens if these were timed."""
        self.texts += 1
        self._before = {name: len(times) for name, times in self.seconds.items()}
        self.latest = replace(self.costs(), further=tuple(seconds - rounds[0] for seconds in rounds))
        return self.latest

    def costs(self) -> ForwardCosts:
        """The costs by the shortest times: disturbances, and the warm-up of the first one, only make a time longer."""
        shortest = {name: min(times) for name, times in self.seconds.items()}
        layers, full, few = self.early.num_layers, shortest["full"], shortest["few"]
        layer = max(full - shortest["early"], 0.0) / len(self.early.skipped_layers)
        mlp = layer / 2
        if self.attention is not None:
            mlp = min(max(full - shortest["attention"], 0.0) / len(self.attention.skipped_mlp), layer)
        token = max(shortest["many"] - max(few, full), 0.0) / (layers * (MANY - FEW))
        return ForwardCosts(
            fixed=max(full - layers * layer, 0.0),
            attention=layer - mlp,
            mlp=mlp,
            several=max(few - full - layers * token * (FEW - 1), 0.0),
            token=token,
            step=max(shortest["draft"] - shortest["early"], 0.0),
            num_layers=layers,
        )


def share_of(budget: float, pays: bool) -> float:
    """The share of a call's time that a search with this budget may take; 1, no limit, stays 1."""
    return budget if pays or budget >= 1.0 else _UNPROVEN * budget


class Budget:
    """The time budget of one call: a ``share`` of its time so far (1 for no limit), and ``carried`` seconds."""

    def __init__(self, share: float, clock: Callable[[], float], carried: float = 0.0) -> None:
        self.share = share
        self._carried, self._clock, self._begun = carried, clock, clock()
        self._spent = 0.0
        self._spending_since: float | None = None

    @property
    def left(self) -> float:
        """Seconds that may be spent now; below 0 where more was spent than the share has become."""
        if self.share >= 1.0:
            return math.inf
        now = self._clock()
        spent = self._spent + (0.0 if self._spending_since is None else now - self._spending_since)
        return self._carried + self.share * (now - self._begun) - spent

    @contextmanager
    def spending(self) -> Iterator[None]:
        self._spending_since = begun = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - begun
            self._spending_since = None
