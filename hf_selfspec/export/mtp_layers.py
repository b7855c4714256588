"""MTP layers in the format in which the checkpoints of a model's type have them, which engines read."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from ..errors import UnsupportedModelError
from ..model.anatomy import Anatomy
from ..modules.mtp import MtpHead
from ..modules.shipped import FIRST, format_of, ships_layers


def in_own_format(model: PreTrainedModel, head: MtpHead) -> dict[str, torch.Tensor]:
    """The tensors of a head by the names of checkpoints of the model's type; raises if these have no such layers."""
    if head.state_layers or head.eagle3 is not None or not ships_layers(model):
        raise UnsupportedModelError(
            "SelfSpec.export_draft: engines take MTP layers only in the format of models that ship with them, and "
            f"{type(model).__name__} has none for this head. Use it with generate(assistant=...)."
        )
    names, found = format_of(model), dict[str, torch.Tensor]()
    for number, (part, settings) in enumerate(zip(head.parts, head.configs, strict=True)):
        layer = names.of_layer(number, Anatomy.of(model).num_layers)
        halves = part.projection.weight.chunk(2, dim=1)
        found[f"{layer['projection']}.weight"] = torch.cat(halves[::-1] if names.state_first else halves, dim=1)
        for field in ("embedding_norm", "state_norm"):
            found[f"{layer[field]}.weight"] = getattr(part, field).weight
        for key, value in _as_saved(settings, part.decoder.state_dict()).items():
            is_block = key.startswith(FIRST)
            found[f"{layer['block']}{key[len(FIRST) :]}" if is_block else f"{layer['norm']}.weight"] = value
    return {key: value.detach().to(model.dtype).contiguous() for key, value in found.items()}


def _as_saved(settings: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a decoder as transformers saves them, in whose files experts are apart."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    stack = Anatomy.of(model).stack
    inside = next(name for name, module in model.named_modules() if module is stack)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict={f"{inside}.{name}": value for name, value in state.items()})
        return load_file(Path(folder) / SAFE_WEIGHTS_NAME)
