"""One layer of the cache, as models see it."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ...errors import unsupported
from ..forks import cached_property
from ..graphs.shapes import ChangingNumber
from .recurrent_states import StateLayer


def _private(name: str) -> Any:
    """The keys, or values, ``[b, k, n, h]`` so far, drafted ones among them, for hooks."""

    def read(layer: "SpeculativeLayer") -> torch.Tensor | None:
        if layer._cache.has_unknown_readers:
            raise unsupported(f"code beside the model reads the {name} in the cache, which are drafts' as well")
        buffers = layer.by_name.get(name)
        return None if buffers is None else buffers.latest(layer.index)

    def replace(layer: "SpeculativeLayer", states: torch.Tensor | None) -> None:
        if states is not None:
            raise unsupported(
                "code beside the model, such as a hook that compresses the cache, replaces its keys or values, which "
                "hold drafts, too"
            )

    return property(read, replace)


class SpeculativeLayer(CacheLayerMixin):
    """What is kept of each token: keys, values, and keys of an indexer that chooses what attention sees."""

    is_sliding = False
    keys, values = _private("keys"), _private("values")

    def __init__(self, cache: Any) -> None:
        self._cache = self.write_range = cache  # which part of the text is kept
        super().__init__()
        self.by_name: dict[str, Any] = {}  # where that is, by name
        self._indexed, self._length = -1, 0  # the last forward in which its indexer had its turn, and the slots then

    @cached_property
    def index(self) -> int:
        index: int = self._cache.layers.index(self)
        return index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers_for("keys", key_states)
        self.buffers_for("values", value_states)
        self.is_initialized = True

    def buffers_for(self, name: str, states: torch.Tensor) -> Any:
        """Where states ``[b, k, s, h]`` are kept."""
        if name not in self.by_name:
            self.by_name[name] = self._cache.buffers_for(name, self.index, states)
        return self.by_name[name]

    def buffer(self, name: str) -> torch.Tensor:
        """The buffer ``[b, k, slots, h]`` of a name."""
        buffers = self.by_name[name]
        buffer: torch.Tensor = buffers.of[buffers.numbers[self.index]]
        return buffer

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[b, k, slots, h]``."""
        return self.buffer("keys"), self.buffer("values")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (slots := self.write_range.fixed_slots) is not None:
            for buffer, states in zip(buffers := self.buffers(), (key_states, value_states), strict=True):
                buffer[self._cache.fixed_rows, :, slots] = states.transpose(1, 2)
            return buffers
        keys, values = self.by_name["keys"], self.by_name["values"]
        return keys.write(self.index, key_states), values.write(self.index, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.write_range.fixed_slots is not None:
            return self.write_range.capacity, self._cache.capacity if self.is_sliding else 0
        return self.write_range.max_cursor + query_length - self.write_range.start, self.write_range.offset

    def get_seq_length(self) -> Any:
        if self._cache.fixed_slots is not None:
            return ChangingNumber()
        # Before a layer's update, masks ask for what was there; after it, indexers for what is there now.
        return self._length if self._indexed == self._cache.seeks else self._cache.max_cursor

    def get_max_length(self) -> int:
        return -1

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Writes an indexer's keys ``[b, s, h]`` at the cursors, and returns all up to the furthest one."""
        states = indexer_key_states[:, None]
        keys: torch.Tensor = self.buffers_for("indexer", states).write(self.index, states)
        self._indexed, self._length = self._cache.seeks, keys.shape[2]
        return keys[:, 0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions ``[n, b, s]`` of the tokens before the running forward, to which models append theirs."""
        start = self._cache.max_cursor
        return self.buffer("positions")[:, :, :start, 0].transpose(0, 1) if start else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor) -> None:
        states = position_ids[..., self._cache.max_cursor :].transpose(0, 1)[..., None]
        self.buffers_for("positions", states).write(self.index, states)


class RecurrentLayer(SpeculativeLayer, StateLayer):
    """Recurrent states of one layer, with keys and values if it has attention, too."""
