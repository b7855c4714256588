"""Running part of a model through the model's own forward.

While a generation drafts with layers, these and their blocks carry an instance ``forward`` that obeys the
:class:`ForwardPass` of the current thread: run, pass the hidden state through, or start from a stored one. No
architecture is reimplemented: logits of an early exit come from the model's own norm, head, scale and soft-cap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from .anatomy import Anatomy
from .attention.exact import ExactForward, has_matrices
from .head import HeadRows, output_head
from .layout import TreeLayout
from .linear import few_token_linears
from .patching import (
    Autocast,
    Forward,
    InstanceForwards,
    PerThread,
    SharedChange,
    autocast_on,
    residual_of,
    states_of,
    with_arity,
    with_states,
)
from .plan import LayerPlan, Substitutes
from .transfer import Pending, RowNumbers, upload

_T = TypeVar("_T")
# The dimension of rows in states [b, s, d], with further dimensions in front in some models.
_ROW_DIM = -3
# Maps (layer, state that entered it, state that left it), both [b, s, d], to what enters the next layer.
AfterLayer = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
# Maps (layer, state [b, s, d] that enters it) to whether the forward ends there.
StopFn = Callable[[int, torch.Tensor], bool]


@dataclass
class ForwardPass:
    """A forward of a model, or of a part: what runs, what it starts from, and its results."""

    plan: LayerPlan  # blocks to run
    start: int = 0  # layers below it are skipped; its input is `state`
    state: torch.Tensor | None = None  # [b, s, d] the hidden state that enters layer `start`
    stop: int | None = None  # layers from here on and the output head are skipped, None for none
    # Layers whose input states are kept, in order, `L` for what leaves the stack; `stop` by default.
    capture: tuple[int, ...] = ()
    after_layer: AfterLayer | None = None  # returns what each layer passes to the next, None for its output
    # Called at layers `start + 1` to `stop`; the forward ends at the first that it returns True for.
    stop_fn: StopFn | None = None
    # Maps `exit_state` to the input of the head, in place of the final norm of the stack.
    head_input_fn: Callable[[torch.Tensor], torch.Tensor] | None = None
    head_rows: HeadRows | None = None  # what runs in place of the output head, None for that head itself
    ends: Sequence[int] | None = None  # for each row the one token whose logits are needed, None for all of `keep`
    keep: int = 0  # how many of the last tokens need logits, 0 for all; a model may return more
    spreads: bool = True  # whether logits are expanded to rows that have ended
    needs: tuple[str, ...] = ("logits", "captured", "exit_state")  # results that are needed; graphs keep no others
    # What the host will read of the logits, which only graphs compute: the tokens with the highest ones, the likeliest.
    chooses: bool = False
    looks: bool = False
    logits: torch.Tensor | None = field(init=False, default=None)  # [b, s, v]
    # [b, s, n d] the `n` states kept by `capture`, of all tokens if a prompt goes through in pieces.
    captured: torch.Tensor | None = field(init=False, default=None)
    # [b, s, d] output of the last layer; None where the model ran as it is.
    exit_state: torch.Tensor | None = field(init=False, default=None)
    autocast: Autocast | None = field(init=False, default=None)  # the autocast that was on in the last layer
    told: Pending | None = field(init=False, default=None)  # what was computed for the host, of a forward as it ran
    is_exact: bool = field(init=False, default=False)  # whether each token's results are those of it alone
    num_exact: int = field(init=False, default=0)  # of how many attention blocks they are by their calls
    skipped: frozenset[int] = field(init=False)  # layers
    layer: int = field(init=False, default=-1)  # the layer that runs: a block may be in several
    _kept: list[torch.Tensor] = field(init=False, default_factory=list)  # of the layers so far

    def __post_init__(self) -> None:
        num_layers, stop = self.plan.num_layers, self.stop
        if stop is None:
            stop = num_layers
        elif not self.capture:
            self.capture = (stop,)
        self.skipped = self.plan.skipped_layers
        if self.start > 0 or stop < num_layers:
            self.skipped = self.skipped.union(range(self.start), range(stop, num_layers))

    @property
    def calls_functions(self) -> bool:
        """Whether it calls any of the functions above."""
        return (self.after_layer, self.stop_fn, self.head_input_fn, self.head_rows) != (None,) * 4

    @property
    def is_plain(self) -> bool:
        """Whether it is the model's own forward, of which nothing is kept."""
        is_part = self.skipped or self.plan.skipped_attention or self.plan.skipped_mlp or self.plan.substitutes
        is_kept = self.capture or self.state is not None or self.ends is not None
        return not is_part and not is_kept and not self.calls_functions

    def collect(self, state: torch.Tensor) -> None:
        self._kept.append(state)
        if len(self._kept) == len(self.capture):
            if len(self._kept) > 1:  # layers may be spread over devices
                state = torch.cat([kept.to(state.device) for kept in self._kept], dim=-1)
            self.captured, self._kept = state if self.captured is None else torch.cat([self.captured, state], -2), []

    def check_stop(self, layer: int, state: torch.Tensor) -> None:
        """Ends the forward with the input of ``layer`` if ``stop_fn`` returns ``True``; later layers pass it on."""
        if self.start < layer and (self.stop is None or layer <= self.stop):
            assert self.stop_fn is not None
            if self.stop_fn(layer, state):
                self.stop, self.stop_fn = layer, None
                self.skipped = self.skipped.union(range(layer, self.plan.num_layers))


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a batch that are still generating."""

    kept: list[int]  # their indices
    total: int  # b, number of rows of the whole batch
    _indices: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def of_list(self, values: Sequence[_T]) -> list[_T]:
        return [values[row] for row in self.kept]

    def pick(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return values.index_select(dim, self._index(values.device))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Expands a tensor ``[*n, b, s, d]`` of these rows to the whole batch, with zeros in the other rows."""
        shape = list(values.shape)
        shape[_ROW_DIM] = self.total
        return values.new_zeros(shape).index_copy_(_ROW_DIM, self._index(values.device), values)

    def _index(self, device: torch.device) -> torch.Tensor:
        if device not in self._indices:
            self._indices[device] = upload(self.kept, device)
        return self._indices[device]

    def enter(
        self, tokens: torch.Tensor, starts: RowNumbers, nodes: TreeLayout | None, run: ForwardPass
    ) -> tuple[torch.Tensor, RowNumbers, TreeLayout | None, ForwardPass]:
        """The tokens of these rows, where they start, their trees, and the forward, whose callbacks see the batch."""
        changes: dict[str, Any] = {}
        if (stop_fn := run.stop_fn) is not None:
            changes["stop_fn"] = lambda layer, states: stop_fn(layer, self.spread(states))
        if (head_input_fn := run.head_input_fn) is not None:
            changes["head_input_fn"] = lambda states: self.pick(head_input_fn(self.spread(states)), _ROW_DIM)
        if run.state is not None:
            changes["state"] = self.pick(run.state, _ROW_DIM)
        if nodes is not None and len(nodes.parents) > 1:
            packed, nodes = nodes._on, TreeLayout(self.of_list(nodes.parents), self.of_list(nodes.depths), nodes.hidden)
            nodes._on.update({device: self.pick(values, 0) for device, values in packed.items()})
        numbers = RowNumbers.made(self.of_list(starts), lambda device: self.pick(starts.on(device), 0))
        return self.pick(tokens, 0), numbers, nodes, replace(run, **changes)

    def leave(self, run: ForwardPass) -> None:
        """Expands the results of the forward to the whole batch."""
        for name in ("captured", "exit_state", *(["logits"] if run.spreads else [])):
            if (states := getattr(run, name)) is not None:
                setattr(run, name, self.spread(states))


_current = PerThread[ForwardPass]()
# How many values the blocks of each class returned, in a tuple or (``None``) without one, when they last ran.
_Arity = dict[type, int | None]
_arities: WeakKeyDictionary[nn.Module, _Arity] = WeakKeyDictionary()


def knows_blocks(model: nn.Module, anatomy: Anatomy) -> bool:
    """Returns whether an earlier forward has shown what the layers and blocks of ``model`` return."""
    blocks = (*anatomy.layers, *anatomy.attention, *(module for mlp in anatomy.mlp for module in mlp))
    return {type(block) for block in blocks if block is not None} <= _arities.get(model, {}).keys()


def is_speculating() -> bool:
    """Returns whether the current thread's forwards obey a :class:`ForwardPass`, without gradients."""
    return _current.now is not None and not torch.is_grad_enabled()


def _exactly(module: nn.Module) -> ExactForward:
    return ExactForward(module, lambda: _current.now is not None and _current.now.is_exact)


def obeying(forward_pass: ForwardPass) -> AbstractContextManager[None]:
    """Makes prepared models obey ``forward_pass`` in this thread."""
    return _current.during(forward_pass)


def _install(anatomy: Anatomy, model: nn.Module, forwards: InstanceForwards) -> None:
    if (head := output_head(model)) is not None:
        forwards.replace(head, _head_forward(head))
    forwards.replace(anatomy.stack, _stack_forward(anatomy.stack))
    arity = _arities.setdefault(model, {})
    for index, layer in enumerate(anatomy.layers):
        is_last = index == anatomy.num_layers - 1
        forwards.replace(layer, _layer_forward(layer, index, arity, is_last, anatomy.streams))
    blocks = {block: ("skipped_attention", True) for block in anatomy.attention if block is not None}
    blocks |= {module: ("skipped_mlp", module is mlp[-1]) for mlp in anatomy.mlp for module in mlp}
    for module, of_block in blocks.items():
        forwards.replace(module, _block_forward(module, arity, *of_block))


def _stack_forward(stack: nn.Module) -> Forward:
    original = stack.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        current = _current.now
        if current is None:
            return output
        if current.plan.num_layers in current.capture:
            current.collect(states_of(output))
        if current.head_input_fn is not None:
            assert current.exit_state is not None
            return with_states(output, current.head_input_fn(current.exit_state))
        if current.ends is not None:
            states = states_of(output)
            rows = torch.arange(len(states), device=states.device)
            return with_states(output, states[rows, upload(current.ends, states.device)][:, None])
        return output

    return forward


def _layer_forward(layer: nn.Module, index: int, arity: _Arity, is_last: bool, streams: bool) -> Forward:
    original, layer_class = layer.forward, type(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = _current.now
        if current is None:
            return original(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        if index == current.start and current.state is not None:
            hidden = current.state.reshape(hidden.shape) if streams else current.state
            if args:
                args = (hidden, *args[1:])
            else:
                kwargs["hidden_states"] = hidden
        if index in current.capture:
            current.collect(_rows(hidden, streams))
        if current.stop_fn is not None:
            current.check_stop(index, _rows(hidden, streams))
        if index in current.skipped:
            output = with_arity(hidden, arity.get(layer_class))
        else:
            current.layer = index
            output = original(*args, **kwargs)
            arity[layer_class] = len(output) if isinstance(output, tuple) else None
        if current.after_layer is not None:
            left = states_of(output)
            passed_on = current.after_layer(index, _rows(hidden, streams), _rows(left, streams))
            output = with_states(output, passed_on.reshape(left.shape))
        if is_last:
            current.exit_state = _rows(states_of(output), streams)
            current.autocast = autocast_on(current.exit_state.device)
        return output

    return forward


def _rows(states: torch.Tensor, streams: bool) -> torch.Tensor:
    """States ``[b, s, d]``, with the ``n`` streams ``[b, s, n, d]`` of a token side by side."""
    return states.flatten(2) if streams else states


def _block_forward(module: nn.Module, arity: _Arity, skipped: str, adds_to_residual: bool) -> Forward:
    """Where the plan's ``skipped`` has a block, it adds nothing to the residual, or passes its input on."""
    original, block_class = module.forward, type(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = _current.now
        if current is None or current.layer not in getattr(current.plan, skipped):
            output = original(*args, **kwargs)
            if current is not None:
                arity[block_class] = len(output) if isinstance(output, tuple) else None
            return output
        hidden = args[0] if args else kwargs["hidden_states"]
        if adds_to_residual:
            # Blocks that add the residual themselves (BLOOM, MPT) must return it unchanged.
            residual = residual_of(args, kwargs, original)
            hidden = torch.zeros_like(hidden) if residual is None else residual
        return with_arity(hidden, arity.get(block_class))

    return forward


def _head_forward(head: nn.Module) -> Forward:
    original = head.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = _current.now
        if current is None or current.head_rows is None:
            return original(*args, **kwargs)
        return current.head_rows(*args, **kwargs)

    return forward


def _substituted_forward(module: nn.Module) -> Forward:
    """A module's forward, or what the current plan has in its place."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = _current.now
        substitutes = None if current is None else current.plan.substitutes
        if substitutes is None or (substitute := substitutes.of.get(module)) is None:
            return original(*args, **kwargs)
        return substitute(original, args[0] if args else kwargs["input"])

    return forward


_installations = SharedChange()


@contextmanager
def partial_forwards(
    model: nn.Module, anatomy: Anatomy, substitutes: Iterable[Substitutes] = (), is_exact: bool = False
) -> Iterator[None]:
    """Prepares ``model`` so that its forwards obey the current thread's :class:`ForwardPass`; threads share one
    preparation. ``substitutes`` are those of all plans."""

    def add(forwards: InstanceForwards) -> None:
        for module in (module for of_plan in substitutes for module in of_plan.of):
            forwards.wrap(module, _substituted_forward)
        blocks = {*anatomy.layers, *anatomy.attention}
        for module in anatomy.view.modules if is_exact else ():
            if has_matrices(module) and module not in blocks:
                forwards.wrap(module, _exactly)

    faster = few_token_linears(model, is_speculating, anatomy.view)
    with faster, _installations.of(model, partial(_install, anatomy, model), add):
        yield
