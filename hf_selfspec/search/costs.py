"""What forwards over part of a model cost, measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..files import as_count, as_number
from ..model.partial import LayerPlan
from ..model.target import Target
from ..transfer import RowNumbers

# Tokens in the forwards of several.
FEW, MANY = 2, 8


def wait_for(device: torch.device) -> None:
    """Waits until ``device`` has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, clock: Callable[[], float] = perf_counter) -> float:
    """Time of ``run`` by a clock, the wall's unless another one is given."""
    wait_for(device)
    begun = clock()
    run()
    wait_for(device)
    return clock() - begun


@dataclass(frozen=True)
class ForwardCosts:
    """Seconds of forwards.

    One over all blocks and one token takes ``fixed + L (attention + mlp)``; one over ``m > 1`` tokens takes
    ``further[m - 1]`` more, or ``several + L token (m - 1)`` where rounds of so many were not timed.

    Attributes:
        fixed: embedding, masks, head and whatever else does not depend on the blocks.
        attention: an attention block with one token.
        mlp: an MLP block with one token.
        several: what other kernels for more than one token cost, all layers together.
        token: what each further token adds to a layer.
        step: what drafting a token takes beside its forward.
        num_layers: ``L``.
        further: what 0, 1, 2, ... further tokens add to a round, as rounds were timed; empty where they were not.
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
        """The reverse of ``asdict``, for a model of ``num_layers`` layers.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        state = dict(state)
        layers, further = as_count(state.pop("num_layers")), tuple(map(as_number, state.pop("further", ())))
        numbers = {name: as_number(value) for name, value in state.items()}
        costs = cls(**numbers, num_layers=num_layers, further=further)
        if layers != num_layers or not costs.plain():
            raise ValueError(f"costs of another model, or of none: {state}")
        return costs

    def draft(self, plan: LayerPlan) -> float:
        """Drafting one token."""
        attention = self.attention * (self.num_layers - len(plan.skipped_attention))
        return self.fixed + attention + self.mlp * (self.num_layers - len(plan.skipped_mlp)) + self.step

    def plain(self) -> float:
        """One token through the whole model."""
        return self.fixed + self.num_layers * (self.attention + self.mlp)

    def verify(self, prefix: int, drafted: int) -> float:
        """Verifying ``drafted`` tokens of a plan whose first altered layer is ``prefix``, with reuse where it pays."""
        if drafted == 0:
            return self.plain()
        whole = self.plain() + self._further(drafted)
        if drafted < self.reuse_from(prefix):
            return whole
        # What these layers spare is at most their part of what was timed.
        spared = min(prefix * self.token * drafted, prefix / self.num_layers * self._further(drafted))
        return whole + self.fixed - spared

    def _further(self, drafted: int) -> float:
        """What so many tokens add to a forward over one."""
        timed = len(self.further) - 1
        if timed < 0:
            return self.several + self.num_layers * self.token * drafted
        return self.further[min(drafted, timed)] + self.num_layers * self.token * max(drafted - timed, 0)

    def reuse_from(self, prefix: int) -> int:
        """From how many drafted tokens on starting from their states behind the exact prefix pays (LayerSkip §4.3).

        It spares them the first ``prefix`` layers, but the last of them has to go through these on its own, in one
        forward more. Either way each layer runs once, so what counts is what a further token adds to it.
        """
        spared = prefix * self.token
        return math.ceil(self.fixed / spared) if spared > 0 else sys.maxsize


def _from(slots: Sequence[int], count: int, ids: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """``[b, count]`` tokens from each row's slot on, of ``ids`` ``[b, n]``, which begin at other slots."""
    columns = RowNumbers([slot - start for slot, start in zip(slots, starts, strict=True)]).on(ids.device)
    columns = (columns + torch.arange(count, device=ids.device)).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, columns.expand(len(ids), count))


@dataclass
class Stopwatch:
    """Repeated timings of the forwards from which costs follow, and of drafting a token.

    Attributes:
        early: what runs in the early forwards; some layers are left out as a whole.
        attention: a plan that leaves out MLP blocks alone, ``None`` where attention and MLP need not be told apart.
        seconds: all times of the forwards ``early``, ``attention``, ``full``, ``few`` and ``many``, and of ``draft``.
    """

    early: LayerPlan
    attention: LayerPlan | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, other: Stopwatch) -> None:
        """Takes in the times of another one."""
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
            ids: ``[b, MANY]`` the last tokens of each row, of which all but the last are in the cache; junk behind
                them where there are fewer.
            starts: slot of the first of them.
            roots: slot of each row's last token.
            repeats: how often; what the first time takes longer is left out by the shortest one.
            draft: drafts one token with the early plan, ``None`` to leave drafting out.
            may_run: whether there is time for a forward over so many tokens, ``None`` for always. Where there is not,
                the next call goes on from there.

        Returns:
            Whether all was timed.
        """
        last = _from(roots, 1, ids, starts)
        few_starts = [max(root - FEW + 1, start) for root, start in zip(roots, starts, strict=True)]
        few = _from(few_starts, FEW, ids, starts)
        runs: dict[str, tuple[int, Callable[[], object]]] = {
            "early": (1, lambda: target.step(last, roots, self.early)),
            "full": (1, lambda: target.step(last, roots)),
            "few": (FEW, lambda: target.step(few, few_starts)),
            "many": (MANY, lambda: target.step(ids, starts)),
        }
        if self.attention is not None:
            runs["attention"] = 1, lambda: target.step(last, roots, self.attention)
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
        """The costs that follow from the times so far.

        Args:
            of: what counts of repeated times; the shortest by default, since what disturbs a time makes it longer.
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
        disturbed: how much longer a one-token step usually takes than the shortest one took.
        count: on how many texts forwards were timed.
        stopwatch: all times.
    """

    costs: ForwardCosts | None = None
    disturbed: float = 1.0
    count: int = 0
    stopwatch: Stopwatch | None = None

    def add(self, stopwatch: Stopwatch, rounds: Sequence[float] = (), anew: bool = False) -> ForwardCosts:
        """Takes in the times of one text and returns the costs that follow.

        Args:
            stopwatch: the times.
            rounds: seconds of rounds with 0, 1, 2, ... drafted tokens; empty where they were not timed.
            anew: earlier times count no longer.
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
