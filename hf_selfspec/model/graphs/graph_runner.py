"""Forwards over a few tokens by graphs: from round to round only the values of tensors change.

Our own forward runs with the rows' cursors as a tensor, keys and values written by index into buffers of fixed
capacity, and masks over the whole capacity; plans and hooks of a forward are constants of its graph, whose kernels a
GPU then runs with one launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...errors import warn_once
from ..anatomy import Anatomy
from ..attention.exact import float32_precisions, reduced_precision
from ..attention.interface import MaskSpec
from ..cache.recurrent_states import turns
from ..cache.speculative_cache import SpeculativeCache
from ..forks import cached_property
from ..forward_pass import ForwardPass
from ..internals import keeps_weights
from ..kernels.experts import experts_by_size
from ..kernels.leaves import fused_leaves
from ..layout import StepTokens, TreeLayout
from ..logits import likeliest
from ..module_tools import is_tensor_parallel
from ..patching import autocast_on
from ..target import Target
from ..transfer import Pending, read, ready_for, upload
from .captures import SIZES, Run, capturing, size_for
from .model_graphs import COMPARISONS, POOLS, Graph, ModelGraphs, graphs_of

# The devices that have graphs, with the interface of ``torch.cuda``.
DEVICES = {"cuda"}
# The rounding of TF32; how many roundings results may be apart, as a share of their length, and how much of it at
# most: a graph and the same forward without it; this and the model's own, where rounding may choose other experts.
_REDUCED, _ROUNDINGS, _REPLAYED, _FILLED = 2.0**-10, 32.0, 2.0**-9, 2.0**-3
_LARGEST = 1e4  # larger numbers do not count then: they mask logits
# Keys and values of calls that are over may take this share of a GPU's memory, and more as long as the other one is
# free; beyond it calls make new graphs.
_KEPT, _FREE = 1 / 8, 1 / 4
_FEW_ROWS = 8  # whose memory is little although most of it is empty


# What a forward returns: tensors, and what the host gets first; ``None`` in place of what was not computed.
Outcome = tuple[Any, ...]


@dataclass(eq=False)
class GraphRunner:
    """Runs the forwards of one generation with the graphs of its model."""

    target: Target
    graphs: ModelGraphs
    compares: bool  # whether each call compares results: unknown code may compute with numbers that change
    _compared_here: set[Graph] = field(default_factory=set)

    @classmethod
    def install(cls, target: Target, device: torch.device, compares: bool) -> None:
        """Makes forwards of a generation over a few tokens of ``device`` graphs, if they can be."""
        model, is_text = target.model, target.takes_any_rows and target.following.offsets is None
        if {device.type, model.device.type} != DEVICES or not is_text:
            return
        if why := why_no_graphs(model, target.anatomy):
            warn_once(
                f"{type(model).__name__} runs without graphs on a GPU, which takes several times as long, since {why}. "
                "The output is the same. SelfSpec(graphs=False) leaves this message out."
            )
            return
        if not (graphs := graphs_of(model, target.anatomy.view.modules)).refused:
            target.graphs = cls(target, graphs, compares)

    @cached_property
    def _modes(self) -> Hashable:
        """The modes around the call that operations depend on."""
        device, deterministic = self.target.device, torch.are_deterministic_algorithms_enabled()
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), deterministic, torch.get_default_dtype()
        return device, autocast_on(device), modes, tuple(float32_precisions().values())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps this generation's keys and values where graphs look for them."""
        graphs, cache, device = self.graphs, self.target.cache, self.target.model.device
        try:
            pool = graphs.pools.free.pop()
        except IndexError:
            self.target.graphs = None
            warn_once(
                f"{graphs.whose} runs some calls without graphs, which takes several times as long, since at most "
                f"{POOLS} calls can use graphs at the same time. The output is the same."
            )
            yield
            return
        try:
            pool.take(device)
            cache.pool = pool
            cache.reserve(SIZES[-1])  # tokens are padded
            if len(cache.cursors) <= _FEW_ROWS:
                cache.capacity = max(cache.capacity, graphs.fewest_slots)
            yield
        finally:
            kept = sum(other.bytes for other in (pool, *graphs.pools.free))
            free, total = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if graphs.refused or (kept > _KEPT * total and free < _FREE * total):
                pool.clear()
            pool.leave(device)
            graphs.pools.free.append(pool)

    def run(self, step_tokens: StepTokens, run: ForwardPass) -> torch.Tensor | None:
        """Returns the logits ``[b, s, v]`` of a forward, if any, by its graph where there is one."""
        target, given, nodes, window = self.target, step_tokens.given, step_tokens.nodes, self.target.cache.window
        is_whole, (b, s) = target.module_of(run) is target.model, step_tokens.shape
        is_part = nodes is not None and (step_tokens.first_node or nodes.hidden or len(nodes.parents) != b)
        is_part |= bool(target.cache.recurrent) and step_tokens.starts[0] < target.cache.timeline.root
        size = None if run.calls_functions or is_part else size_for(s, self.graphs.cheap_tokens // b)
        if size is None or self.graphs.refused:
            return target.run_eagerly(step_tokens, run)
        target.cache.seek(step_tokens.starts, size)
        # What the host knows goes to the device in one copy: for each row where its tokens begin, the last position,
        # where its window begins, how many entries its recurrent states have, the tokens, and their layout.
        numbers = np.zeros((b, 4 + size + (size * (size + 2) if size > 1 else 0)), np.int64)
        numbers[:, 0], numbers[:, 1] = step_tokens.starts, step_tokens.last
        if window is not None:
            numbers[:, 2] = window.bases
        numbers[:, 3] = step_tokens.starts[0] - target.cache.timeline.floor
        if size > 1:  # lines are trees, so that one graph serves both
            layout = _line(s, size) if nodes is None else nodes.numbers(size)
            numbers[:, 4 + size :] = layout.reshape(len(layout), -1)
        if isinstance(given, list):
            numbers[:, 4 : 4 + size] = [row + row[:1] * (size - s) for row in given]
            packed = ready_for(step_tokens.device, numbers)
        else:
            packed = upload(numbers, step_tokens.device)
            packed[:, 4 : 4 + size] = _filled(given, size)
        inputs = [packed, *([] if run.state is None else [_filled(run.state, size)])]
        told = run.chooses, run.looks
        parts = is_whole, run.plan, run.start, run.stop, run.capture, size, told

        def unpadded(results: Sequence[Any]) -> Outcome:
            return results[0], *(None if result is None else result[..., :s, :] for result in results[1:])

        def eager() -> Outcome:
            run.captured = run.exit_state = None  # perhaps those of a comparison
            return None, target.run_eagerly(step_tokens, run), run.captured, run.exit_state

        forward = partial(self._forward, run, size)
        needed = (True, *(name in run.needs for name in ("logits", "captured", "exit_state")))
        outcome = self._outcome(parts, forward, inputs, target.cache, unpadded, eager, needed)
        run.told, logits, run.captured, run.exit_state = outcome
        return logits

    def run_head(
        self, head: Hashable, forward: Run, eager: Run, inputs: Sequence[torch.Tensor], cache: SpeculativeCache
    ) -> Sequence[torch.Tensor]:
        """Returns what a ``head`` with a ``cache`` of its own makes of ``inputs``: by the graph of ``forward``, or by
        ``eager``."""
        if self.graphs.refused or cache.pool is not self.target.cache.pool:
            return eager(*inputs)
        return self._outcome((head,), forward, inputs, cache, tuple, lambda: tuple(eager(*inputs)))

    def _outcome(
        self,
        parts: tuple[Hashable, ...],
        forward: Run,
        inputs: Sequence[torch.Tensor],
        cache: SpeculativeCache,
        unpadded: Callable[[Sequence[torch.Tensor]], Outcome],
        eager: Callable[[], Outcome],
        needed: Sequence[bool] | None = None,
    ) -> Outcome:
        """The results, ``unpadded``, of the graph of ``forward`` over ``inputs``, which depends on ``parts`` and on
        where ``cache`` has its buffers; those of the model's own code, ``eager``, where there is no graph."""
        shapes, device = tuple((tensor.shape, tensor.dtype) for tensor in inputs), self.target.device
        key: Hashable = (*parts, self._modes, self.target.autocast, shapes, cache.addresses())
        assert cache.pool is not None
        if (graph := self.graphs.find(key, cache.pool, device)) is None:
            return eager()
        try:
            is_known = graph.compared >= COMPARISONS and not (self.compares and graph not in self._compared_here)
            if graph.run is not None and is_known:
                return unpadded(graph.run(*inputs, needed=needed))
            on_device = [value.to(device, non_blocking=True) for value in inputs]
            return self._compared(graph, forward, on_device, unpadded, eager)
        except Exception as error:  # of a device, else the model's own code raises it again
            self.graphs.failed(error, graph)
        return eager()

    def _compared(
        self,
        graph: Graph,
        forward: Run,
        inputs: Sequence[torch.Tensor],
        unpadded: Callable[[Sequence[torch.Tensor]], Outcome],
        eager: Callable[[], Outcome],
    ) -> Outcome:
        """The outcome of the model's own code, after that of the same forward as graphs have it and of the graph, which
        is made if there is none. Raises an error where that of the graph is further from that of the forward (mostly it
        is the same bit for bit) than this from the own code's, or where this is more than rounding. So only near ties
        choose other tokens."""
        self.target.unrepresentative_forwards += 1
        begun, is_new = perf_counter(), graph.run is None
        of_graph = None if graph.run is None else unpadded(graph.run(*inputs))
        with capturing.during(graph.leaves):
            of_filled = unpadded(forward(*inputs))
            if of_graph is None:
                self.graphs.make(graph, forward, inputs)
                of_graph = of_filled
        self.target.waited_seconds += perf_counter() - begun
        of_code, excesses = eager(), list[torch.Tensor]()
        for replayed, own, expected in zip(of_graph, of_filled, of_code, strict=True):
            if replayed is not None and own is not None and expected is not None:
                dtypes = torch.float32, expected.dtype, *(self.target.autocast or ())[1:]
                reduced = _REDUCED if reduced_precision(expected.device) else 0.0
                rounded = _ROUNDINGS * max(reduced, *(torch.finfo(dtype).eps for dtype in dtypes))
                by_filling, least = _apart(own, expected), min(rounded, _REPLAYED)
                excesses += [by_filling / min(rounded, _FILLED), _apart(replayed, own) / by_filling.clamp(min=least)]
        if isinstance(told := of_graph[0], Pending):
            scores = of_graph[1].float()
            tokens, highest = (upload(part, scores.device)[:, : scores.shape[1]] for part in told.arrays[:2])
            at_tokens = scores.gather(-1, tokens[..., None])[..., 0]
            excesses.append(2.0 * (torch.stack([at_tokens, highest]) != scores.amax(-1)).any())
        if not all(excess <= 1 for excess in read(torch.stack(excesses))[0]):
            raise RuntimeError("its results are not those of the model's own code")
        graph.compared += not is_new
        self._compared_here.add(graph)
        return of_code

    def _forward(self, run: ForwardPass, size: int, *inputs: torch.Tensor) -> list[Any]:
        """What the host is told of the logits, these, captured state and exit state, with tensor operations alone."""
        target, cache, values = self.target, self.target.cache, iter(inputs)
        cursor, last, bases, count, tokens, layout = next(values).tensor_split((1, 2, 3, 4, 4 + size), dim=1)
        tree = TreeLayout.of_packed(layout.unflatten(1, (size, -1))) if layout.shape[1] else None
        run = replace(run, state=None if run.state is None else next(values))
        slots = cursor + torch.arange(tokens.shape[1], device=tokens.device)
        positions = slots if tree is None else cursor + tree.offsets(tokens.device)
        spec = MaskSpec(positions, cache.capacity, is_fixed=True)
        if tree is not None:
            spec.key_positions, spec.visible = tree.keys(slots, cache.capacity, 0)
        if cache.window is not None:
            n = cache.window.capacity
            keys, visible = torch.arange(n, device=tokens.device)[None], None
            if tree is not None:
                keys, visible = tree.keys(slots - bases, n, 0)
            spec.window = replace(spec, length=n, offset=cache.capacity, key_positions=keys, visible=visible)
            spec.window.begin_at(bases)
        kwargs = {"position_ids": positions.minimum(last)} if target.anatomy.takes_positions else {}
        leaves = fused_leaves(target.model, target.anatomy.view)
        with cache.written_at(slots, bases, count[0], tree), experts_by_size(target.model), leaves, turns():
            logits = target.run_module(run, spec, input_ids=tokens, **kwargs)
        told: Pending | None = None
        if run.chooses and logits is not None:
            scores = logits.float()
            told = Pending(scores.argmax(-1), scores.amax(-1), *(likeliest(scores) if run.looks else ()))
        return [told, logits, run.captured, run.exit_state]


def why_no_graphs(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Returns why forwards of a model cannot be graphs, whatever the call; empty if no reason is known."""
    has_indexers = any(getattr(block, "indexer", None) is not None for block in anatomy.attention)
    is_spread = is_tensor_parallel(model) or len(set(getattr(model, "hf_device_map", {}).values())) > 1
    view, quantizer = anatomy.view, getattr(model, "hf_quantizer", None)
    reasons = {
        "it has indexers, whose keys a graph cannot write by slot": has_indexers,
        "it builds masks of its own": not (anatomy.tree and anatomy.by_slot),
        "it is spread over several devices": is_spread,
        f"its {type(quantizer).__name__} does not say that it can be compiled": not (
            quantizer is None or getattr(quantizer, "is_compileable", False)
        ),
        "its modules have hooks, which graphs would not run; remove them first": view.has_hooks(
            ("transformers",), but=keeps_weights
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _apart(values: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far results are apart, as a share of their length."""
    values, expected = values.float(), expected.float()
    parts = (torch.where(expected.abs() < _LARGEST, part, 0.0).norm() for part in (values - expected, expected))
    return next(parts).nan_to_num(math.inf) / next(parts).clamp(min=1e-30)


@lru_cache
def _line(count: int, size: int) -> np.ndarray:
    """The layout of ``count`` tokens in a line, see :meth:`TreeLayout.numbers`."""
    return TreeLayout.of_tree([range(count - 1)]).numbers(size)


def _filled(values: torch.Tensor, size: int) -> torch.Tensor:
    """Pads ``[b, s, ...]`` at the end to ``[b, size, ...]`` with the first of each row, which goes to the same experts
    again as long as it is at the same position and sees the same."""
    if not (missing := size - values.shape[1]):
        return values
    return torch.cat([values, values[:, :1].expand(-1, missing, *values.shape[2:])], dim=1)
