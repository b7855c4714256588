"""Forwards over a few tokens at fixed shapes: from round to round, only the values of tensors differ."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from transformers import CompileConfig, PreTrainedModel

from ..notices import warn_once
from ..transfer import RowNumbers
from .anatomy import is_tensor_parallel
from .compiled import is_compiled
from .graphs import Graphs, graphs_of, size_for
from .layout import TreeLayout
from .masks import Geometry, at_positions
from .partial import ForwardPass, obeying

if TYPE_CHECKING:
    from .target import Target

# Of all modules with adapters of PEFT.
_ADAPTED = "_disable_adapters"


class FixedShapes:
    """Serves the forwards of one generation with the graphs of its model.

    Args:
        target: the model during the generation.
        graphs: of the model.
    """

    def __init__(self, target: Target, graphs: Graphs) -> None:
        self.target = target
        self.graphs = graphs

    @classmethod
    def of(cls, target: Target, config: CompileConfig) -> FixedShapes | None:
        """What serves a generation, ``None`` (and a warning) where its forwards cannot be graphs."""
        if why := _cannot(target):
            warn_once(
                f"{target.anatomy.model_name} runs without compiled graphs here, since {why}. The output is the same."
            )
            return None
        graphs = graphs_of(target.model, config)
        return None if graphs.refused else cls(target, graphs)

    def leave_buffers(self) -> None:
        """Leaves keys and values to the next generation, where that can have graphs."""
        self.graphs.spare.give([] if self.graphs.refused else self.target.cache.buffers())

    def call(
        self,
        module: nn.Module,
        tokens: torch.Tensor,
        starts: RowNumbers,
        last: RowNumbers,
        run: ForwardPass,
        nodes: TreeLayout | None,
        first_node: int = 0,
    ) -> list[torch.Tensor | None] | None:
        """What a forward gives, by its graph; ``None`` where it has none (yet).

        Args:
            module: the model, or its decoder.
            tokens: ``[b, s]``.
            starts: slot of each row's first token.
            last: the last position of each row.
            run: what runs; it is left the states behind.
            nodes: the draft tree, ``None`` for a line.
            first_node: the first of its nodes that ``tokens`` has.

        Returns:
            A list of the logits ``[b, s, v]``, ``None`` where the module gives none.
        """
        device, (b, s) = tokens.device, tokens.shape[:2]
        has_hooks = run.stop_fn is not None or run.after_layer is not None or run.head_input_fn is not None
        is_part = nodes is not None and (first_node or nodes.hidden or len(nodes.parents) != b)
        size = size_for(s)
        if size is None or tokens.dim() != 2 or has_hooks or is_part or self.graphs.refused:
            return None
        self.target.cache.seek(starts, size)
        buffers = self.target.cache.buffers()
        inputs = [
            _filled(tokens, size),
            _plain(starts.on(device).expand(b, 1)),
            _plain(last.on(device).expand(b, 1)),
            *([] if nodes is None else [_filled_layout(nodes.packed(device), size)]),
            *([] if run.state is None else [_filled(run.state, size)]),
            *buffers,
        ]
        parts = [module is self.target.model, nodes is not None, run.state is not None]
        key: Hashable = (
            *parts,
            _modes(device),
            run.plan,
            run.start,
            run.stop,
            run.capture,
            _shapes(inputs),
        )

        def forward(*given: torch.Tensor) -> list[torch.Tensor]:
            return self._forward(module, run, nodes is not None, given)

        graph = self.graphs.find(key, forward, inputs, self.target.anatomy.model_name)
        if graph is None:
            return None
        found = list(graph(*inputs))
        logits = found.pop(0)[:, :s] if module is self.target.model else None
        run.captured = found.pop(0)[..., :s, :] if run.capture >= 0 else None
        run.exit_state = found.pop(0)[..., :s, :]
        return [logits]

    def _forward(
        self, module: nn.Module, run: ForwardPass, is_tree: bool, given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Logits, captured and exit state, as far as there are any, by tensors alone."""
        target, rest = self.target, list(given)
        tokens, cursor, last = rest.pop(0), rest.pop(0), rest.pop(0)
        layout = rest.pop(0) if is_tree else None
        state = rest.pop(0) if run.state is not None else None
        size = tokens.shape[1]
        slots = cursor + torch.arange(size, device=tokens.device)
        length, keys, visible, positions = rest[0].shape[2], None, None, slots
        if layout is not None:
            tree = TreeLayout.of_packed(layout)
            positions = cursor + tree.offsets(tokens.device)
            keys, visible = tree.keys(slots, length, 0)
        fresh = replace(run, state=state, captured=None, exit_state=None)
        kwargs: dict[str, Any] = {target.cache_name: target.cache, "use_cache": True, "return_dict": True}
        if target.anatomy.takes_positions:
            kwargs["position_ids"] = positions.minimum(last)
        geometry = Geometry(positions, length, keys, visible, is_fixed=True)
        with target.cache.written_at(slots, rest), obeying(fresh), at_positions(geometry), _all_experts(target.model):
            logits = getattr(module(input_ids=tokens, **kwargs), "logits", None)
        found = [logits if module is target.model else None, fresh.captured, fresh.exit_state]
        return [value for value in found if value is not None]


@contextmanager
def _all_experts(model: PreTrainedModel) -> Iterator[None]:
    """Mixtures of experts without a choice on the host, as transformers' own decoding has them off the CPU."""
    usual = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    if "grouped_mm" not in usual.values():
        yield
        return
    model.set_experts_implementation(
        {name: "batched_mm" if kind == "grouped_mm" else kind for name, kind in usual.items()}
    )
    try:
        yield
    finally:
        model.set_experts_implementation(usual)


def _cannot(target: Target) -> str:
    """Why forwards cannot be graphs, empty where they can."""
    model = target.model
    if target.anatomy.is_recurrent:
        return "its states are no slots that a graph could write"
    if not (target.anatomy.tree and target.anatomy.ragged):
        return "it builds masks of its own"
    if not target.takes_any_rows or target.following.offsets is not None:
        return "its prompts have masked columns, images or other inputs that forwards need"
    if is_compiled(model):
        return "the model is compiled already, as a whole; pass the model itself"
    if is_tensor_parallel(model) or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over several devices"
    if getattr(model, "_hf_peft_config_loaded", False) or any(hasattr(m, _ADAPTED) for m in model.modules()):
        return "its adapters can be switched from call to call; merge them first"
    if any(map(_has_hooks, model.modules())):
        return "its modules have hooks, which graphs would not run; remove them first"
    return ""


def _has_hooks(module: nn.Module) -> bool:
    """Whether others see or change what goes through a module (transformers' own hooks wait for other calls)."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return hasattr(module, "_hf_hook") or any(not _is_of_transformers(hook) for hook in hooks)


def _is_of_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _modes(device: torch.device) -> Hashable:
    """What is on around a call that operations depend on."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return autocast, torch.is_inference_mode_enabled()


def _shapes(tensors: Sequence[torch.Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)


def _plain(values: torch.Tensor) -> torch.Tensor:
    """The values without strides of their own, which a graph would take for another shape."""
    return values.contiguous().view(-1).view(values.shape)


def _filled(values: torch.Tensor, size: int) -> torch.Tensor:
    """``[b, s, ...]`` as ``[b, size, ...]`` with zeros behind."""
    missing = size - values.shape[1]
    if not missing:
        return _plain(values)
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)


def _filled_layout(packed: torch.Tensor, size: int) -> torch.Tensor:
    """``[b, t, t + 2]`` a packed layout as one of ``size`` tokens; those behind see themselves alone."""
    b, t = packed.shape[:2]
    filled = torch.eye(size, size + 2, dtype=packed.dtype, device=packed.device).repeat(b, 1, 1)
    filled[:, :t, :t] = packed[:, :, :t]
    filled[:, :t, size:] = packed[:, :, t:]
    return filled
