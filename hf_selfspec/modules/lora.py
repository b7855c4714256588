"""Low-rank additions to a model's first layers, for drafts alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from ..errors import SettingError, SettingTypeError, UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.instance_forward import Forward
from ..model.kernels.linear import linear_layers
from ..model.plan import Substitute, Substitutes
from ..validation import MOST_LAYERS, MOST_WIDTH, check_count
from .draft_module import About, DraftModule

# The additions are `SCALE B A x`, as LoRA's with `lora_alpha = 2 r`.
_SCALE = 2.0
# A linear layer: "0.mlp.up_proj" (the layer, and the path in it), the width of its input, and that of its output.
Shape = tuple[str, int, int]


class DraftLora(DraftModule):
    """LoRA (arXiv:2106.09685) in the first layers that is active while they draft, and off in verification.

    The model's own output cannot change. While drafting, the layers read the keys and values that the whole model has
    written for the text, so the text does not go through them again.

    Args:
        exit_layer: the exit layer ``E``; layers ``0 .. E-1`` have additions.
        rank: ``r`` of the additions.
        shapes: for each linear layer with an addition its name (``"0.mlp.up_proj"``: layer 0) and the widths of its
            input and output.
        about: see :class:`DraftModule`.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    kind = "draft LoRA"

    def __init__(self, exit_layer: int, rank: int, shapes: Sequence[Sequence[Any]], about: About = None) -> None:
        super().__init__()
        check_count("DraftLora(exit_layer)", exit_layer, most=MOST_LAYERS)
        check_count("DraftLora(rank)", rank, most=MOST_WIDTH)
        self.exit_layer, self.rank, self.about = exit_layer, rank, about
        self.shapes = tuple(_shape(entry, exit_layer) for entry in shapes)
        if not self.shapes:
            raise SettingError("DraftLora(shapes) names no linear layer. If the model has none, fit an adapter.")
        self.down = nn.ParameterList([nn.Linear(width, rank, bias=False).weight for _, width, _ in self.shapes])
        self.up = nn.ParameterList([nn.Linear(rank, out, bias=False).weight for _, _, out in self.shapes])
        for up in self.up:
            nn.init.zeros_(up)  # it starts as the plain exit

    def __repr__(self) -> str:
        layers = f"{len(self.shapes)} linear layers"
        return f"DraftLora(exit_layer={self.exit_layer}, rank={self.rank}, {layers}, {self.digest})"

    def substitutes(self, anatomy: Anatomy) -> Substitutes:
        """Returns a model's linear layers with the additions, through which gradients flow to this module."""
        modules, substitutes = dict(linear_layers(dict(enumerate(anatomy.layers)))), dict[nn.Module, Substitute]()
        for index, (name, width, out) in enumerate(self.shapes):
            module: Any = modules.get(name)
            if module is None or widths(module) != (width, out):
                layer, _, path = name.partition(".")
                raise SettingError(
                    f"this {self.kind} adds to a linear layer {path!r} of {width} to {out} in layer {layer}, which "
                    f"{anatomy.model_name} does not have. Use it with the model that it was fitted to."
                )
            weight = module.weight
            if hasattr(weight, "device_mesh") or weight.device.type == "meta":
                raise UnsupportedModelError(
                    f"the weights of {anatomy.model_name} are spread over processes or offloaded, so nothing can be "
                    f"added to {name!r} while drafting. Load the model on devices of one process."
                )
            lora = self if torch.is_grad_enabled() else self.on(weight.device)  # gradients are not for copies
            is_plain = weight.is_floating_point() and weight.element_size() > 1  # not quantised
            dtype = weight.dtype if is_plain else lora.up[index].dtype
            down, up = (matrix.to(weight.device, dtype) for matrix in (lora.down[index], _SCALE * lora.up[index]))
            substitutes[module] = partial(_added, down, up)
        return Substitutes(substitutes, min(int(name.partition(".")[0]) for name, _, _ in self.shapes))


def widths(module: Any) -> tuple[int, int]:
    """Widths of a linear layer's input and output."""
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def _added(down: torch.Tensor, up: torch.Tensor, forward: Forward, input: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = forward(input)
    return output + F.linear(F.linear(input.to(down.dtype), down), up).to(output.dtype)


def _shape(entry: Any, exit_layer: int) -> Shape:
    """Returns an entry of ``shapes``, which JSON holds as a list; raises for anything else."""
    if not isinstance(entry, Sequence) or len(entry) != 3 or not isinstance(entry[0], str):
        raise SettingTypeError(f"DraftLora(shapes) must hold [name, width of input, width of output], got {entry!r}.")
    name, width, out = entry
    layer, _, path = name.partition(".")
    if not layer.isdigit() or not path or int(layer) >= exit_layer:
        raise SettingError(
            f"DraftLora(shapes) names {name!r}: names are like '0.mlp.up_proj', with a layer below {exit_layer}."
        )
    for value in (width, out):
        check_count(f"DraftLora(shapes): a width of {name!r}", value, most=MOST_WIDTH)
    return name, width, out
