"""MTP layers that ship in a model's own checkpoint, which transformers leaves out when it loads the model."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..errors import SelfSpecError, SettingError, SettingTypeError, UnsupportedModelError, brief
from ..learned.files import path_of, read_json, reading
from ..model.anatomy import Anatomy, causal_lm
from ..model.forks import new_lock
from .draft_module import DraftModule
from .mtp import PER_LAYER, MtpHead, config_of_layer, last_full_layer

_attached = weakref.WeakKeyDictionary[PreTrainedModel, DraftModule]()
# What shipped_mtp has loaded, or why it could not.
_shipped = weakref.WeakKeyDictionary[PreTrainedModel, MtpHead | SelfSpecError]()
_loading = new_lock()


@dataclass(frozen=True)
class MtpFormat:
    """How checkpoints of a model type name the parts of their MTP layers; the defaults are DeepSeek-V3's names.

    In names ``{n}`` is the number of a layer, and ``{l}`` that number after those of the model's own layers.

    Args:
        embedding_norm, state_norm, projection, norm: what is in front of ``.weight`` in the names of a layer's norms of
            embedding and state, the projection of both, and the norm before the model's output head.
        block: the beginning of the names in the decoder layer, which go on as in the model's own layers.
        mlp: its MLP, as in ``config.mlp_layer_types``, where the config has no ``mtp_mlp_layer_types``; by default that
            of the model's own last layer with full attention.
        state_first: whether the projection takes the state before the embedding.
    """

    embedding_norm: str = "model.layers.{l}.enorm"
    state_norm: str = "model.layers.{l}.hnorm"
    projection: str = "model.layers.{l}.eh_proj"
    norm: str = "model.layers.{l}.shared_head.norm"
    block: str = "model.layers.{l}."
    mlp: str | None = None
    state_first: bool = False

    def of_layer(self, number: int, num_layers: int) -> dict[str, str]:
        """The names of one layer, by the names of the fields."""
        return {name: getattr(self, name).format(n=number, l=num_layers + number) for name in _NAMES}

    def settings(self, config: PreTrainedConfig, number: int, num_layers: int) -> dict[str, Any]:
        """The config of a model that has only this layer."""
        of_layer = config_of_layer(config, last_full_layer(config, num_layers))
        if self.mlp is not None:
            of_layer["mlp_layer_types"] = [self.mlp]
        of_mtp = {name: getattr(config, f"mtp_{name}", None) for name in PER_LAYER}
        return of_layer | {name: [values[number]] for name, values in of_mtp.items() if values}


# The fields that are names.
_NAMES = ("embedding_norm", "state_norm", "projection", "norm", "block")
# The block of a model that has one layer alone.
_FIRST = "model.layers.0."
# How configs of models with DeepSeek's names count MTP layers.
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
# What else may stand under a block's name: copies of the model's own embedding and head.
_COPIES = ("embed_tokens.", "shared_head.head.", "shared_head.weight")
_QWEN = MtpFormat("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.{n}.")
_FINAL = MtpFormat(norm="model.layers.{l}.final_layernorm")
SPECULATORS = MtpFormat(
    "mtp_layers.{n}.token_layernorm",
    "mtp_layers.{n}.hidden_layernorm",
    "mtp_layers.{n}.input_proj",
    "mtp_layers.{n}.final_layernorm",
    "mtp_layers.{n}.",
)
_FORMATS: dict[str, MtpFormat] = {
    **dict.fromkeys(("mellum", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    **dict.fromkeys(("bailing_hybrid", "hy_v3"), _FINAL),
    "exaone_moe": replace(_QWEN, mlp="dense"),
}


def register_mtp_format(model_type: str, names: MtpFormat) -> None:
    """Registers how checkpoints of a model type name their MTP layers, see :func:`load_mtp`.

    Args:
        model_type: ``config.model_type`` of the model.
        names: the names; replaces an earlier registration.

    Raises:
        SettingError: ``names`` is not an :class:`MtpFormat` or has the same block for all layers.
    """
    if not isinstance(names, MtpFormat) or "{" not in names.block:
        raise SettingError(f"register_mtp_format takes an MtpFormat, whose block has {{n}} or {{l}}, got {names!r}.")
    _FORMATS[model_type] = names
    _shipped.clear()


def attach(model: PreTrainedModel, head: DraftModule) -> None:
    """Attaches a head to a model in place of another one."""
    _attached[model] = head


def attached_head(model: PreTrainedModel) -> DraftModule | None:
    """Returns the head that is attached to a model."""
    return _attached.get(model)


def load_mtp(model: Any, checkpoint: str | os.PathLike[str] | None = None) -> MtpHead:
    """Loads the MTP layers that a model ships with, once: later calls return the same head.

    They stay attached to the model and are freed with it. ``MTP()`` drafts with them, and so does every cascade, that
    of ``SelfSpec()`` included.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        checkpoint: the folder or Hub repository with the layers; by default where the model was loaded from. It
            replaces a head that is attached already.

    Raises:
        SettingError, SettingTypeError: there is no such checkpoint, or it has no MTP layers under the names of the
            model's type, see :func:`register_mtp_format`.
        UnsupportedModelError: the layers keep more than keys and values.
    """
    inner = causal_lm(model, "load_mtp")
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike)):
        raise SettingTypeError(f"load_mtp(checkpoint) must be a path or a name on the Hub, got {checkpoint!r}.")
    with _loading:
        if checkpoint is None and isinstance(attached := attached_head(inner), MtpHead):
            return attached
        name = inner.config.name_or_path if checkpoint is None else os.fspath(checkpoint)
        if not name:
            raise SettingError(
                f"load_mtp: this {type(inner).__name__} was not loaded from a checkpoint. Give the folder or the Hub "
                "repository that has its MTP layers."
            )
        head = load_layers(inner, name, format_of(inner))
        attach(inner, head)
        return head


def shipped_mtp(model: PreTrainedModel) -> MtpHead:
    """As :func:`load_mtp`, but looks for the layers of a model only once, and a head of another kind stays attached."""
    attached = attached_head(model)
    if isinstance(attached, MtpHead):
        return attached
    if model not in _shipped:
        try:
            _shipped[model] = load_mtp(model)
        except SelfSpecError as error:
            _shipped[model] = copy.copy(error)  # without the traceback, which holds the model
        if attached is not None:
            attach(model, attached)
    shipped = _shipped[model]
    if isinstance(shipped, SelfSpecError):
        raise copy.copy(shipped)
    return shipped


def format_of(model: PreTrainedModel) -> MtpFormat:
    """How checkpoints of a model's type name their MTP layers, if they have any."""
    types = (model.config.model_type, model.config.get_text_config(decoder=True).model_type)
    return next((_FORMATS[model_type] for model_type in types if model_type in _FORMATS), MtpFormat())


def ships_layers(model: PreTrainedModel) -> bool:
    """Whether models of this type may ship with MTP layers."""
    config = model.config.get_text_config(decoder=True)
    return format_of(model) != MtpFormat() or any(hasattr(config, count) for count in COUNTS)


def load_layers(model: PreTrainedModel, name: str, names: MtpFormat) -> MtpHead:
    """Returns the MTP layers of a checkpoint that names their parts in this way."""
    anatomy, config = Anatomy.of(model), model.config.get_text_config(decoder=True)
    files = _Files(name)
    layers: list[dict[str, str]] = []
    while files.has(layer := names.of_layer(len(layers), anatomy.num_layers)):
        layers.append(layer)
    if not layers:
        raise SettingError(
            f"{name} has no MTP layers of {anatomy.model_name}: there is no {layer['projection']}.weight. If they have "
            f'other names, register these: register_mtp_format("{model.config.model_type}", MtpFormat(...)).'
        )
    head = MtpHead([names.settings(config, number, anatomy.num_layers) for number in range(len(layers))])
    device = next(anatomy.layers[-1].parameters()).device
    try:
        for part, layer, settings in zip(head.layers, layers, head.configs, strict=True):
            for field in ("embedding_norm", "state_norm", "projection"):
                weight, module = files.read(f"{layer[field]}.weight").to(device, model.dtype), getattr(part, field)
                if weight.shape != module.weight.shape:
                    raise files.misfit(f"{layer[field]}.weight", weight.shape, module.weight.shape)
                if field == "projection" and names.state_first:
                    weight = torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)
                module.load_state_dict({"weight": weight}, assign=True)
            part.decoder.load_state_dict(_decoder(settings, layer, files, model, device), assign=True)
        head.eval().requires_grad_(False).try_out()
    except SettingError:
        raise
    except Exception as error:  # of the code of any model
        raise UnsupportedModelError(
            f"the MTP layers of {name} cannot run alone, or keep more than keys and values ({brief(error)}), so "
            f"nothing can be drafted with them for {anatomy.model_name}."
        ) from error
    return head


def _decoder(
    settings: dict[str, Any], layer: dict[str, str], files: _Files, model: PreTrainedModel, device: torch.device
) -> dict[str, torch.Tensor]:
    """The weights of a decoder with the layer's block and norm, as transformers loads them for the model's class."""
    config, begin = AutoConfig.for_model(**settings), layer["block"]
    others = tuple(f"{name}." for field, name in layer.items() if field != "block")
    others += tuple(f"{begin}{name}" for name in _COPIES)
    keys = [key for key in files.paths if key.startswith(begin) and not key.startswith(others)]
    state = {f"{_FIRST}{key[len(begin) :]}": files.read(key) for key in keys}
    state["model.norm.weight"] = files.read(f"{layer['norm']}.weight")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.zeros(1, config.hidden_size, device="cpu", dtype=torch.float32)
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded, info = model_class.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype, **options)
    for key, shape, wanted in sorted(info["mismatched_keys"]):
        raise files.misfit(key.replace(_FIRST, begin), shape, wanted)
    if missing := sorted(info["missing_keys"]):
        raise SettingError(f"{files.name} has no weight for {missing[0]} of an MTP layer ({begin}...).")
    if unexpected := sorted(info["unexpected_keys"]):
        raise SettingError(
            f"{files.name} has {unexpected[0].replace(_FIRST, begin)}, for which {model_class.__name__} has no "
            "place: its MTP layers are of another kind than the model's own, which is not supported."
        )
    stack = Anatomy.of(loaded).stack.to(device)
    return {name: value for name, value in stack.state_dict().items() if not name.startswith("embed_tokens.")}


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, "was cut short or changed", "Load the checkpoint again.")


class _Files:
    """The tensors of a checkpoint, each read when it is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paths = dict(self._paths())

    def has(self, layer: dict[str, str]) -> bool:
        """Whether there is a layer with these names."""
        is_block = any(key.startswith(layer["block"]) for key in self.paths)
        return is_block and f"{layer['projection']}.weight" in self.paths

    def read(self, key: str) -> torch.Tensor:
        if key not in self.paths:
            raise SettingError(f"{self.name} has a part of an MTP layer, but no {key}.")
        with _reading(self.paths[key]), safe_open(self.paths[key], framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        if tensor.itemsize < 2 or not tensor.is_floating_point():
            raise SettingError(
                f"{self.name} has {key} in {str(tensor.dtype).removeprefix('torch.')}, whose scales are not read. Give "
                "a checkpoint with the layers in 16 or 32 bits: load_mtp(model, checkpoint)."
            )
        if not tensor.isfinite().all():
            raise SettingError(f"{self.name} has {key} with values that are not finite. Load the checkpoint again.")
        return tensor

    def misfit(self, key: str, shape: Sequence[int], wanted: Sequence[int]) -> SettingError:
        return SettingError(
            f"{self.name} has {key} of shape {list(shape)}, and the model takes {list(wanted)}: it has the MTP layers "
            "of another model. Give the checkpoint of this one."
        )

    def _paths(self) -> Iterator[tuple[str, Path]]:
        index = self._file(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            with _reading(index):
                files = read_json(index)["weight_map"].items()
                paths = {file: self._file(file) for file in {file for _, file in files}}
            for key, file in files:
                if (path := paths[file]) is None:
                    raise SettingError(f"{index} names {file}, which is not there. Load the checkpoint again.")
                yield key, path
        elif (whole := self._file(SAFE_WEIGHTS_NAME)) is not None:
            with _reading(whole), safe_open(whole, framework="pt", device="cpu") as file:
                yield from ((key, whole) for key in file.keys())  # noqa: SIM118  # no dict
        else:
            raise SettingError(
                f"load_mtp: there is no {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME} at {self.name!r}. Give the "
                "folder or the Hub repository of a checkpoint."
            )

    def _file(self, file: str) -> Path | None:
        folder = path_of(self.name)
        place = folder if folder.is_dir() else self.name
        try:
            path = cached_file(place, file, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise SettingError(f"load_mtp: {self.name!r} is no folder and cannot be read ({brief(error)}).") from error
        return None if path is None else Path(path)
