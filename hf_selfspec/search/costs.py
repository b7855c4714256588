"""Measured costs of forwards over part of a model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..learned.files import as_count, as_number
from ..model.partial import ForwardPass
from ..model.plan import LayerPlan
from ..model.target import Target
from ..model.transfer import RowNumbers, wait_for

# Numbers of tokens in the forwards over several tokens.
FEW, MANY = 2, 8


def seconds_of(run: Callable[[], object], device: torch.device, clock: Callable[[], float] = perf_counter) -> float:
    """Returns the time of ``run`` by a clock, by default wall-clock time."""
    wait_for(device)
    begun = clock()
    run()
    wait_for(device)
    return clock() - begun


@dataclass(frozen=True)
class ForwardCosts:
    """A model of the seconds that forwards take.

    A forward over all blocks and one token takes ``fixed + L (attention + mlp)``; one over ``m > 1`` tokens takes
    ``further[m - 1]`` more, or ``several + L token (m - 1)`` if rounds of that size were not timed.

    Attributes:
        fixed: embedding, masks, head and everything else that does not depend on the blocks.
        attention: an attention block with one token.
        mlp: an MLP block with one token.
        several: extra cost of the kernels for more than one token, all layers together.
        token: cost of each further token in a layer.
        step: cost of drafting a token besides its forward.
        num_layers: ``L``.
        further: cost of 0, 1, 2, ... further tokens in a round, from timed rounds; empty if none were timed.
    """

    fixed: float
    attention: float
    mlp: float
    several: float
    token: float
    step: float
    num_layers: int
    further: tuple[float, ...] = ()

    @classmethod
    def of_state(cls, state: dict[str, Any], num_layers: int) -> ForwardCosts:
        """The inverse of ``asdict``, for a model with ``num_layers`` layers.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is something else.
        """
        state = dict(state)
        layers, further = as_count(state.pop("num_layers")), tuple(map(as_number, state.pop("further", ())))
        numbers = {name: as_number(value) for name, value in state.items()}
        costs = cls(**numbers, num_layers=num_layers, further=further)
        if layers != num_layers or not costs.plain():
            raise ValueError(f"costs of another model, or of none: {state}")
        return costs

    def draft(self, plan: LayerPlan) -> float:
        """Time of drafting one token."""
        attention = self.attention * (self.num_layers - len(plan.skipped_attention))
        return self.fixed + attention + self.mlp * (self.num_layers - len(plan.skipped_mlp)) + self.step

    def plain(self) -> float:
        """Time of one token through the whole model."""
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
        """What ``drafted`` tokens add to a forward over one."""
        timed = len(self.further) - 1
        if timed < 0:
            return self.several + self.num_layers * self.token * drafted
        return self.further[min(drafted, timed)] + self.num_layers * self.token * max(drafted - timed, 0)

    def reuse_from(self, prefix: int) -> int:
        """The number of drafted tokens from which it pays to start from their states (LayerSkip §4.3).

        This saves their pass through the first ``prefix`` layers, but the last of them has to go through these layers
        alone, in an extra forward. Either way each layer runs once, so only the cost of further tokens counts.
        """
        spared = prefix * self.token
        return math.ceil(self.fixed / spared) if spared > 0 else sys.maxsize


def _from(slots: Sequence[int], count: int, ids: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """The ``count`` tokens ``[b, count]`` from each row's slot on, from ``ids`` ``[b, n]`` that begin at ``starts``."""
    columns = RowNumbers([slot - start for slot, start in zip(slots, starts, strict=True)]).on(ids.device)
    columns = (columns + torch.arange(count, device=ids.device)).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, columns.expand(len(ids), count))


@dataclass
class Stopwatch:
    """Repeated timings of the forwards from which costs follow, and of drafting a token.

    Attributes:
        early: the plan of the ``early`` forwards, which leaves out some layers as a whole.
        attention: a plan that leaves out only MLP blocks, ``None`` if attention and MLP need not be told apart.
        seconds: all times of the forwards ``early``, ``attention``, ``full``, ``few`` and ``many``, and of ``draft``.
    """

    early: LayerPlan
    attention: LayerPlan | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, other: Stopwatch) -> None:
        """Adds the times of another stopwatch."""
        for name, times in other.seconds.items():
            self.seconds.setdefault(name, []).extend(times)

    def measure(
        self,
        target: Target,
        ids: torch.Tensor,
        starts: Sequence[int],
        roots: Sequence[int],
        repeats: int,
        draft: Callable[[], object] | None,
        may_run: Callable[[int], bool] | None = None,
    ) -> bool:
        """Times each forward ``repeats`` times in turn, at the end of the text and without changing it.

        Args:
            target: the prepared model.
            ids: ``[b, MANY]`` the last tokens of each row, of which all but the last are in the cache; junk after them
                in rows that have fewer.
            starts: slot of the first of them.
            roots: slot of each row's last token.
            repeats: number of repetitions; the shortest time excludes the warm-up of the first one.
            draft: drafts one token with the early plan, ``None`` to leave drafting out.
            may_run: whether there is time for a forward over a number of tokens, ``None`` for always. If there is not,
                the next call continues from there.

        Returns:
            Whether everything was timed.
        """
        last = _from(roots, 1, ids, starts)
        few_starts = [max(root - FEW + 1, start) for root, start in zip(roots, starts, strict=True)]
        few = _from(few_starts, FEW, ids, starts)
        runs: dict[str, tuple[int, Callable[[], object]]] = {
            "early": (1, lambda: target.step(last, roots, ForwardPass(self.early))),
            "full": (1, lambda: target.step(last, roots)),
            "few": (FEW, lambda: target.step(few, few_starts)),
            "many": (MANY, lambda: target.step(ids, starts)),
        }
        if self.attention is not None:
            attention = self.attention
            runs["attention"] = 1, lambda: target.step(last, roots, ForwardPass(attention))
        if draft is not None:
            runs["draft"] = 1, draft
        for count in range(repeats):
            for name, (tokens, run) in runs.items():
                times = self.seconds.setdefault(name, [])
                if len(times) > count:
                    continue
                if may_run is not None and not may_run(tokens):
                    return False
                times.append(seconds_of(run, ids.device, target.clock))
        return True

    def costs(self, of: Callable[[list[float]], float] = min) -> ForwardCosts:
        """Computes the costs from the times so far.

        Args:
            of: reduces repeated times to one; by default the shortest, since disturbances only make a time longer.
        """
        found = {name: of(times) for name, times in self.seconds.items()}
        layers, full = self.early.num_layers, found["full"]
        layer = max(full - found["early"], 0.0) / len(self.early.skipped_layers)
        mlp = layer / 2
        if self.attention is not None:
            mlp = min(max(full - found["attention"], 0.0) / len(self.attention.skipped_mlp), layer)
        token = max(found["many"] - max(found["few"], full), 0.0) / (layers * (MANY - FEW))
        return ForwardCosts(
            fixed=max(full - layers * layer, 0.0),
            attention=layer - mlp,
            mlp=mlp,
            several=max(found["few"] - full - layers * token * (FEW - 1), 0.0),
            token=token,
            step=max(found["draft"] - found["early"], 0.0) if "draft" in found else 0.0,
            num_layers=layers,
        )


@dataclass
class Timings:
    """Timings on several texts, and the costs that follow from all of them.

    Attributes:
        costs: measured forwards, ``None`` before the first timings.
        disturbed: usual time of a one-token step divided by the shortest one.
        count: number of texts on which forwards were timed.
        stopwatch: all times.
    """

    costs: ForwardCosts | None = None
    disturbed: float = 1.0
    count: int = 0
    stopwatch: Stopwatch | None = None

    def add(self, stopwatch: Stopwatch, rounds: Sequence[float] = (), anew: bool = False) -> ForwardCosts:
        """Adds the times of one text and returns the resulting costs.

        Args:
            stopwatch: the times.
            rounds: seconds of rounds with 0, 1, 2, ... drafted tokens; empty if they were not timed.
            anew: whether earlier times no longer count.
        """
        self.count += 1
        if self.stopwatch is None or anew:
            self.stopwatch = stopwatch
        else:
            self.stopwatch.add(stopwatch)
        further = tuple(seconds - rounds[0] for seconds in rounds)
        self.costs = replace(self.stopwatch.costs(), further=further)
        self.disturbed = self.stopwatch.costs(median).plain() / self.costs.plain()
        return self.costs
