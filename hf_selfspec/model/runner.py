"""Forwards over a few tokens by graphs: from round to round only the values of tensors change."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from ..errors import warn_once
from .anatomy import Anatomy
from .attention import MaskSpec, at_positions
from .cache import SpeculativeCache
from .captures import Run
from .exact import float32_precisions, reduced_precision
from .experts import experts_by_size
from .graphs import COMPARISONS, Graph, Graphs, graphs_of
from .internals import has_peft_layers
from .layout import Feed, TreeLayout
from .modules import has_hooks, is_compiled, is_tensor_parallel
from .partial import Best, ForwardPass, obeying
from .patching import within
from .target import Target
from .traceable import NoGraphError, Place, size_for
from .transfer import read

# The rounding of TF32, and how many roundings of the largest number results may be apart.
_REDUCED, _ROUNDINGS = 2.0**-10, 32.0
# The share of a GPU's memory up to which keys and values stay where graphs look for them; else a call makes new graphs.
_KEPT = 1 / 16


# What a forward has found: tensors that both ways have, and the likeliest tokens, if they were chosen.
Outcome = tuple[tuple[Any, ...], Best | None]


@dataclass(eq=False)
class GraphRunner:
    """Runs the forwards of one generation with the graphs of its model."""

    target: Target
    graphs: Graphs
    compares: bool  # whether numbers of a model's code are unknown, which graphs may hold and which may change
    waited_seconds: float = 0.0  # for graphs to be compiled
    unsettled: int = 0  # forwards so far that were not run as others of their kind will be
    _compared_here: set[Graph] = field(default_factory=set)
    _is_served: bool = True

    @classmethod
    def of(cls, target: Target, config: CompileConfig | None, compares: bool = False) -> GraphRunner | None:
        """Returns the graphs for a generation, or ``None``, if its forwards cannot be graphs; where these were asked
        for (a ``config``), that warns."""
        why = why_no_graphs(target.model, target.anatomy)
        if not target.takes_any_rows or target.following.offsets is not None:
            why = why or "its prompts have masked columns, images or other inputs that forwards need"
        if why:
            if config is not None:
                warn_once(
                    f"{target.anatomy.model_name} runs without compiled graphs here, since {why}. The output is the "
                    "same."
                )
            return None
        graphs = graphs_of(target.model, config)
        return None if graphs.refused else cls(target, graphs, compares)

    @property
    def traces(self) -> bool:
        return self.graphs.config is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps this generation's keys and values where graphs look for them, and reports new graphs at its end."""
        graphs, cache, place = self.graphs, self.target.cache, None
        if _needs_addresses(self.target.model.device):
            try:
                place = cache.place = graphs.places.pop()
            except IndexError:
                self._is_served = False
                if graphs.config is not None:
                    warn_once(
                        f"{graphs.whose} runs without compiled graphs here, since they serve other calls at the same "
                        "time. The output is the same."
                    )
        try:
            yield
        finally:
            graphs.report()
            if place is not None:
                is_large = graphs.config is None and _is_large(place, self.target.model.device)  # captures are quick
                if graphs.refused or is_large:
                    graphs.forget(lambda key: key[0] is place)
                    cache.place, place = None, Place()
                graphs.places.append(place)

    def run(self, feed: Feed, run: ForwardPass) -> torch.Tensor | None:
        """Returns the logits ``[b, s, v]`` of a forward, if any, by its graph unless the model's own code is faster."""
        target, tokens, nodes = self.target, feed.tokens, feed.nodes
        whole = target.module_of(run) is target.model
        device, (b, s) = tokens.device, tokens.shape[:2]
        substitutes = run.plan.substitutes
        is_changed = run.functions != (None,) * 4 or (substitutes is not None and not substitutes.is_lasting)
        is_part = nodes is not None and (feed.first_node or nodes.hidden or len(nodes.parents) != b)
        size = size_for(s, self.graphs.cheap_tokens // b)
        if size is None or tokens.dim() != 2 or is_changed or is_part or not self._is_served or self.graphs.rest:
            return target.run_eagerly(feed, run)
        target.cache.seek(feed.starts, size)
        buffers, window = target.cache.buffers(), target.cache.window
        inputs = [
            _filled(tokens, size),
            _plain(feed.starts.on(device).expand(b, 1)),
            _plain(feed.last.on(device).expand(b, 1)),
            *([] if nodes is None else [_filled_layout(nodes.packed(device), size)]),
            *([] if run.state is None else [_filled(run.state, size)]),
            *([] if window is None else [_plain(window.bases.on(device).expand(b, 1))]),
            *buffers,
        ]
        if (place := target.cache.place) is not None:
            self.graphs.forget(lambda key: key[0] is place and key[1] != place.version)
        key: Hashable = (
            *(place, None if place is None else place.version),
            *(whole, nodes is not None, run.state is not None, _modes(device), target.autocast, target.cache.capacity),
            *(run.plan, run.start, run.stop, run.capture, run.chooses),
            *(None if window is None else window.capacity, device, len(inputs)),
            None if place is None else target.cache.addresses(),
            *((tensor.shape, tensor.dtype) for tensor in (inputs if place is None else inputs[: -len(buffers)])),
        )

        def what() -> str:
            shape = f"{'a line' if nodes is None else 'a tree'} of {size} tokens, {b} x {target.cache.capacity} slots"
            return f"{shape}, layers {run.plan.picture()}"

        def taken(found: Sequence[torch.Tensor]) -> Outcome:
            rest = list(found)
            logits = rest.pop(0)[:, :s] if whole else None
            captured = rest.pop(0)[..., :s, :] if run.capture else None
            exit_state = rest.pop(0)[..., :s, :]
            return (logits, captured, exit_state), Best(rest[0][:, :s], rest[1][:, :s]) if run.chooses else None

        def eager() -> Outcome:
            run.captured = run.exit_state = run.best = None  # perhaps those of a comparison
            logits = target.run_eagerly(feed, run)
            return (logits, run.captured, run.exit_state), run.best

        # On a GPU both ways are bound by launches and weights, whose number does not depend on that of tokens.
        count, forward = size if tokens.is_cuda else s, partial(self._forward, run, nodes is not None)
        states, run.best = self._outcome(key, count, forward, inputs, len(buffers), what, taken, eager)
        logits, run.captured, run.exit_state = states
        return logits

    def run_head(
        self, head: Hashable, forward: Run, eager: Run, inputs: Sequence[torch.Tensor], cache: SpeculativeCache
    ) -> Sequence[torch.Tensor]:
        """Returns what a ``head`` with a ``cache`` of its own makes of ``inputs``: by the graph of ``forward`` over
        these and its buffers, unless ``eager`` over the inputs is faster."""
        place, device, buffers = self.target.cache.place, inputs[0].device, cache.buffers()
        if place is None or cache.place is not place or self.traces or not self._is_served or self.graphs.rest:
            return eager(*inputs)
        self.graphs.forget(lambda key: key[0] is place and key[1] != place.version)
        given = [*inputs, *buffers]
        modes, shapes = _modes(device), ((tensor.shape, tensor.dtype) for tensor in given)
        key: Hashable = (place, place.version, head, modes, self.target.autocast, device, cache.addresses(), *shapes)

        def taken(found: Sequence[torch.Tensor]) -> Outcome:
            return tuple(found), None

        return self._outcome(
            key, 0, forward, given, len(buffers), lambda: "a head", taken, lambda: taken(eager(*inputs))
        )[0]

    def _outcome(
        self,
        key: Hashable,
        count: int,
        forward: Run,
        inputs: Sequence[torch.Tensor],
        fixed: int,
        what: Callable[[], str],
        taken: Callable[[Sequence[torch.Tensor]], Outcome],
        eager: Callable[[], Outcome],
    ) -> Outcome:
        """What is ``taken`` of the results of a graph, or what the model's own code has found; see :meth:`Graphs.find`
        and :meth:`FasterWay.faster_of`."""
        begun = perf_counter()
        graph = self.graphs.find(key, forward, inputs, what, fixed)
        self.waited_seconds += perf_counter() - begun

        def by_code() -> Outcome:
            self.unsettled += self.graphs.are_awaited(key) if graph is None else graph.is_faster.get(count, True)
            return eager()

        if graph is None:
            return by_code()

        def by_graph() -> Outcome:
            assert graph is not None
            return taken(graph.run(*inputs))

        try:
            is_new = graph.compared < COMPARISONS and (self.compares or self.target.model.device.type == "cuda")
            if is_new or (self.compares and graph not in self._compared_here):
                return self._compared(graph, count, by_graph, by_code)
            return graph.faster_of(count, by_graph, by_code)
        except Exception as error:  # of a device, else the model's own code raises it again
            self.graphs.failed(error, key)
            return by_code()

    def _compared(
        self, graph: Graph, count: int, by_graph: Callable[[], Outcome], by_code: Callable[[], Outcome]
    ) -> Outcome:
        """The outcome of the model's own code; raises an error where that of its graph is another."""
        self.unsettled += 1
        ours, theirs = graph.results(count, by_graph, by_code)
        pairs = zip(ours[0], theirs[0], strict=True)
        apart = [_apart(mine, other) for mine, other in pairs if mine is not None and other is not None]
        if max(read(torch.stack(apart))[0]) > 1:
            raise NoGraphError("its results are not those of the model's own code")
        graph.compared += 1
        self._compared_here.add(graph)
        return theirs

    def _forward(self, run: ForwardPass, is_tree: bool, *given: torch.Tensor) -> list[torch.Tensor]:
        """Logits, captured state, exit state and choices, those that exist, with tensor operations alone."""
        target, rest = self.target, list(given)
        tokens, cursor, last = rest.pop(0), rest.pop(0), rest.pop(0)
        tree = TreeLayout.of_packed(rest.pop(0)) if is_tree else None
        state = rest.pop(0) if run.state is not None else None
        run = replace(run, state=state)
        cache = target.cache
        bases: Any = None if cache.window is None else rest.pop(0)
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
        kwargs: dict[str, Any] = {target.cache_name: cache, "use_cache": True, "return_dict": True}
        if target.anatomy.takes_positions:
            kwargs["position_ids"] = positions.minimum(last)
        with (
            cache.written_at(slots, rest, bases),
            within(target.autocast),
            obeying(run),
            at_positions(spec),
            experts_by_size(target.model),
        ):
            logits = getattr(target.module_of(run)(input_ids=tokens, **kwargs), "logits", None)
        found = [value for value in (logits, run.captured, run.exit_state) if value is not None]
        if run.chooses and logits is not None:
            scores = logits.float()
            found += [scores.argmax(-1), scores.amax(-1)]
        return found


def why_no_graphs(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Returns why forwards of a model cannot be graphs, whatever the call; empty if no reason is known."""
    has_indexers = any(getattr(block, "indexer", None) is not None for block in anatomy.attention)
    is_spread = is_tensor_parallel(model) or len(set(getattr(model, "hf_device_map", {}).values())) > 1
    reasons = {
        "it has recurrent states, which a graph cannot write by slot": anatomy.is_recurrent,
        "it has indexers, whose keys a graph cannot write by slot": has_indexers,
        "it builds masks of its own": not (anatomy.tree and anatomy.ragged),
        "the model is compiled already, as a whole; pass the model itself": is_compiled(model),
        "it is spread over several devices": is_spread,
        "its adapters can be switched from call to call; merge them first": has_peft_layers(model),
        "its modules have hooks, which graphs would not run; remove them first": has_hooks(model, ("transformers",)),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _apart(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far numbers are apart, as a share of what rounding explains."""
    rounding = _REDUCED if reduced_precision(mine.device) else torch.finfo(mine.dtype).eps
    mine, other = mine.float(), other.float()
    largest = torch.where(other.isfinite(), other.abs(), 0.0).amax()
    apart = torch.where(mine == other, 0.0, (mine - other).abs()).nan_to_num(math.inf).amax()
    return apart / (_ROUNDINGS * max(rounding, torch.finfo(torch.float32).eps) * largest).clamp(min=1e-30)


def _needs_addresses(device: torch.device) -> bool:
    """Whether graphs write where they were recorded, as CUDA graphs do."""
    return device.type != "cpu"


def _is_large(place: Place, device: torch.device) -> bool:
    """Whether it would take more of a GPU's memory than may stay with a model after a call."""
    return device.type == "cuda" and place.bytes > _KEPT * torch.cuda.mem_get_info(device)[1]


def _modes(device: torch.device) -> Hashable:
    """The modes around a call that operations depend on; when they change, dynamo would recompile a graph."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    modes = (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    precisions = tuple(float32_precisions().values())
    return autocast, modes, torch.get_num_threads(), torch.get_default_dtype(), precisions


def _plain(values: torch.Tensor) -> torch.Tensor:
    """The values with contiguous strides; a graph would treat other strides as another shape."""
    return values.contiguous().view(-1).view(values.shape)


def _filled(values: torch.Tensor, size: int) -> torch.Tensor:
    """Pads ``[b, s, ...]`` at the end with zeros to ``[b, size, ...]``."""
    missing = size - values.shape[1]
    if not missing:
        return _plain(values)
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)


def _filled_layout(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Pads a packed layout ``[b, t, t + 2]`` to ``size`` tokens; the padding tokens see only themselves."""
    b, t = packed.shape[:2]
    filled = torch.eye(size, size + 2, dtype=packed.dtype, device=packed.device).repeat(b, 1, 1)
    filled[:, :t, :t] = packed[:, :, :t]
    filled[:, :t, size:] = packed[:, :, t:]
    return filled
