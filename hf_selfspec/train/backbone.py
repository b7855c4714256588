"""A frozen model, and the states that are read from it to fit a small module."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import PartialState
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ..errors import SettingError, UnsupportedModelError
from ..files import path_of, reported, written_whole
from ..model.checkpointing import evaluating
from ..model.exits import Exits
from ..model.fingerprint import Fingerprint
from ..model.head import OwnHead
from ..settings import check_count

_SUFFIX = ".safetensors"
# Bytes of names and shapes in a file, at most, for up to a dozen exits.
_NAMES = 2048


@dataclass(frozen=True)
class Observed:
    """The model's states on a batch of text.

    Attributes:
        ids: ``[b, s]`` the batch.
        states: for each wanted layer ``E``, ``[b, s, d]`` the output of layer ``E - 1``.
        exits: the same after the model's own final norm.
        final: ``[b, s, d]`` what the whole model gives to its head.
    """

    ids: torch.Tensor
    states: dict[int, torch.Tensor]
    exits: dict[int, torch.Tensor]
    final: torch.Tensor

    def to(self, device: torch.device) -> Observed:
        """Returns the same states on another device."""
        states, exits = (
            {layer: state.to(device) for layer, state in found.items()} for found in (self.states, self.exits)
        )
        return Observed(self.ids.to(device), states, exits, self.final.to(device))


class Backbone:
    """A model whose states are the data of a fit. Inside :meth:`frozen`, it is in eval mode and gets no gradients.

    Args:
        model: a causal LM of transformers.
        layers: exit layers whose states are wanted.
        cache_dir: where the states of each row of text are kept, so that further epochs and fits on the same text need
            no forward; ``None`` to keep none. A row takes ``(2 len(layers) + 1) s d`` values.
        cache_bytes: maximum size of this model's states in ``cache_dir``; for rows without room the model runs each
            time. ``None`` for no limit.

    Raises:
        SettingError, UnsupportedModelError: an exit does not exist, or its states cannot go into the head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.exits = Exits(model)
        self.exits.check("fit", layers)
        self.anatomy = self.exits.anatomy
        self.own_head = OwnHead(model, self.anatomy)
        if cache_bytes is not None:
            check_count("cache_bytes", cache_bytes)
            if cache_dir is None:
                raise SettingError(f"cache_bytes={cache_bytes} has no effect without cache_dir: leave it out.")
        self._folder: Path | None = None
        # Each of several processes writes its share of the rows.
        self._room = math.inf if cache_bytes is None else cache_bytes // PartialState().num_processes
        if cache_dir is not None:
            self._folder = path_of(cache_dir) / _name(model, Fingerprint.of_decoder(model))
            with reported(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                held = sum(file.stat().st_size for file in self._folder.glob(f"*{_SUFFIX}"))
                self._room -= held // PartialState().num_processes

    def room_for(self, rows: torch.Tensor) -> tuple[int, float, float]:
        """Returns the bytes that ``rows`` ``[n, s]`` will add to the cache, and their shares in it before and after."""
        if self._folder is None:
            return 0, 0.0, 0.0
        files = {self._file(row) for row in rows}
        new = sum(not {*self._names, "final"} <= _names_in(file) for file in files)
        shown = self.look(rows[:1, :1])
        numbers = (*shown.states.values(), *shown.exits.values(), shown.final)
        each = _NAMES + rows.shape[1] * sum(state.shape[-1] * state.element_size() for state in numbers)
        fitting = new if math.isinf(self._room) else int(min(new, max(self._room, 0) // each))
        return fitting * each, 1 - new / len(files), 1 - (new - fitting) / len(files)

    @property
    def device(self) -> torch.device:
        """The device of the input ids.

        Raises:
            UnsupportedModelError: the model is offloaded.
        """
        device: torch.device = self.model.get_input_embeddings().weight.device
        if device.type == "meta":
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} is offloaded, so nothing can be fitted to it. Load all of it on devices."
            )
        return device

    @property
    def width(self) -> int:
        """``d`` of the states.

        Raises:
            UnsupportedModelError: the head takes states of another width.
        """
        with self.frozen():
            seen = self._forward(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        width, final = seen[f"states_{self.layers[0]}"].shape[-1], seen["final"].shape[-1]
        if width != final:
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} sends states of width {final} to its head and has {width} between its "
                "layers: nothing can be fitted to go from there to the head."
            )
        return width

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Sets eval mode, stops gradients and hooks the exits; restores everything afterwards."""
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with evaluating(self.model):
            try:
                for parameter in learning:
                    parameter.requires_grad_(False)
                self.exits.attach()
                yield
            finally:
                self.exits.detach()
                for parameter in learning:
                    parameter.requires_grad_(True)

    @torch.no_grad()
    def observe(self, ids: torch.Tensor) -> Observed:
        """Returns the model's states on ``ids`` ``[b, s]``, from the cache if they are there."""
        if self._folder is None:
            return self.look(ids)
        ids, names = ids.to(self.device), {*self._names, "final"}
        rows = [_read(self._file(row)) or {} for row in ids]
        missing = [index for index, row in enumerate(rows) if not names <= row.keys()]
        if missing:
            new = self._forward(ids[missing])
            for place, index in enumerate(missing):
                states = {name: value[place] for name, value in new.items()}
                self._keep(self._file(ids[index]), rows[index], states)
                rows[index] = states
        elif not self.own_head.has_seen:
            self._forward(ids[:1, :1])
        found = {name: torch.stack([row[name].to(ids.device) for row in rows]) for name in names}
        return self._observed(ids, found)

    @torch.no_grad()
    def look(self, ids: torch.Tensor) -> Observed:
        """What the model shows of ``ids`` ``[b, s]``, without the cache."""
        ids = ids.to(self.device)
        return self._observed(ids, self._forward(ids))

    @property
    def _names(self) -> list[str]:
        return [f"{what}_{layer}" for layer in self.layers for what in ("states", "exits")]

    def _observed(self, ids: torch.Tensor, found: dict[str, torch.Tensor]) -> Observed:
        return Observed(
            ids=ids,
            states={layer: found[f"states_{layer}"] for layer in self.layers},
            exits={layer: found[f"exits_{layer}"] for layer in self.layers},
            final=found["final"],
        )

    def _file(self, row: torch.Tensor) -> Path:
        """Where the states of a row are; those in an autocast are others."""
        assert self._folder is not None
        kind, name = self.device.type, _digest(row)
        if torch.is_autocast_enabled(kind):
            name += f"-{str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
        return self._folder / f"{name}{_SUFFIX}"

    def _keep(self, file: Path, before: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
        """Writes the states of a row, if there is room."""
        size = sum(tensor.nbytes for name, tensor in found.items() if name not in before)
        if size + _NAMES <= self._room:
            _write(file, before | {name: tensor.cpu() for name, tensor in found.items()})
            self._room -= size + _NAMES

    def _forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        handles = [self.anatomy.layers[layer - 1].register_forward_hook(_hook(found, layer)) for layer in self.layers]
        self.exits.chosen = self.layers
        try:
            with self.own_head.seeing() as final:
                self.anatomy.stack(input_ids=ids, use_cache=False, return_dict=True)
        finally:
            self.exits.chosen = ()
            for handle in handles:
                handle.remove()
        found = {name: state.to(self.device) for name, state in found.items()}
        if any(state.dim() != 3 for state in found.values()):
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} has several states for each token between its layers, to which nothing can "
                "be fitted."
            )
        assert self.exits.states is not None
        for layer, state in zip(self.layers, self.exits.states, strict=True):
            found[f"exits_{layer}"] = state.to(self.device)
        return found | {"final": final[-1].to(self.device)}


def _name(model: PreTrainedModel, fingerprint: Fingerprint) -> str:
    """The name of a folder for the states of a model with its present weights, precision and active adapters.

    Raises:
        SettingError: the weights cannot be identified.
    """
    if fingerprint.weights is None:
        raise SettingError(
            "cache_dir: this model's weights cannot be read (quantised, sharded or offloaded), so its states cannot be "
            "distinguished from another model's. Leave cache_dir out."
        )
    adapters = [
        (name, list(module.active_adapters), bool(module.disable_adapters))
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]
    state = hashlib.sha256(repr((str(model.dtype), adapters)).encode()).hexdigest()[:8]
    return f"{fingerprint.name}-{state}"


def _hook(found: dict[str, torch.Tensor], layer: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found[f"states_{layer}"] = output[0] if isinstance(output, tuple) else output

    return hook


def _digest(row: torch.Tensor) -> str:
    return hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()[:32]


def _read(file: Path) -> dict[str, torch.Tensor] | None:
    """The saved states of a row, ``None`` if the file is missing or was cut short."""
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError):
        return None


def _names_in(file: Path) -> set[str]:
    """The names of the states in a file, none if the file is missing or was cut short."""
    try:
        with safe_open(file, framework="pt") as found:
            return set(found.keys())
    except (OSError, SafetensorError):
        return set()


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with reported(file), written_whole(file) as beside:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside)
