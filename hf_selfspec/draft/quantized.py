"""Drafting with the model itself in fewer bits (ML-SpecQD, arXiv:2503.13565; QuantSpec, arXiv:2502.10424)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..errors import SettingError, SettingTypeError, UnsupportedModelError, brief
from ..learned.files import written_whole
from ..learned.saving import encode, register
from ..model.anatomy import Anatomy
from ..model.fingerprint import Fingerprint
from ..model.head import output_head
from ..model.linear import linear_layers
from ..model.packing import ALGORITHMS, GROUP_SIZES, Form, Rounded, Wanted, fits, is_rounded, packed, rounded, why_not
from ..model.plan import LayerPlan
from ..stop.rules import ProductThreshold
from .early_exit import EarlyExit
from .partial import PartialDraft
from .skip_layers import SkipLayers
from .source import Drafter, DraftSource, Session

# The file with rounded weights, next to the settings.
FILE_NAME = "packed.safetensors"
# The name of the output head among packed layers.
_HEAD = "head"


@register("draft")
@dataclass(frozen=True)
class Quantized(DraftSource):
    """Drafts with the model's own layers, whose weights are multiplied in fewer bits while they draft.

    Nothing is trained, and the model's own weights stay as they are. Packed ones are made at the first call, once for
    each model, shared by threads and by all its ``SelfSpec`` objects, and freed with the model; when the model's
    weights have changed, they are made again. ``SelfSpec.save_pretrained`` saves them. In four bits they take a third
    of a 16-bit model's memory.

    Models are in bfloat16, on a CPU or on a GPU from compute capability 8.0 on, where torch has a kernel for four bits
    alone. Linear layers that no kernel takes, and a head of eight bits on a GPU, stay as they are.

    Args:
        bits: bits of the layers' weights: 4, rounded in groups, or 8, rounded by rows.
        group_size: number of weights with one scale in four bits: 32, 64, 128 or 256.
        head: bits of the output head's weights: 4, 8, or 16 for the head as it is.
        layers: the layers that draft, as ``EarlyExit(layer)`` or ``SkipLayers(attention=[...], mlp=[...])``; ``None``
            for all.
        algorithm: how weights are rounded to four bits: by ``"least squares"``, or ``"hqq"``, half-quadratic
            quantisation, for which torchao has to be installed (``pip install hf_selfspec[quantized]``).

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    bits: int = 4
    group_size: int = 32
    head: int = 8
    layers: EarlyExit | SkipLayers | None = None
    algorithm: str = "least squares"

    def __post_init__(self) -> None:
        allowed = {"bits": (4, 8), "group_size": GROUP_SIZES, "head": (4, 8, 16), "algorithm": tuple(ALGORITHMS)}
        for name, values in allowed.items():
            if (given := getattr(self, name)) not in values:
                raise SettingError(f"Quantized({name}) must be one of {', '.join(map(repr, values))}, got {given!r}.")
        if self.algorithm == "hqq" and find_spec("torchao") is None:
            raise SettingError(
                "Quantized(algorithm='hqq') needs torchao: pip install hf_selfspec[quantized], or leave it out."
            )
        layers = self.layers
        if layers is not None and not isinstance(layers, (EarlyExit, SkipLayers)):
            raise SettingTypeError(f"Quantized(layers) must be EarlyExit, SkipLayers or None, got {layers!r}.")
        if (isinstance(layers, EarlyExit) and layers.layer is None) or getattr(layers, "search", None) is not None:
            raise SettingError(
                f"Quantized(layers={layers!r}): nothing looks for layers that draft in fewer bits. Name them, for "
                "example EarlyExit(8) or SkipLayers(mlp=[3, 5])."
            )

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        if self.layers is not None:
            self.layers.check(anatomy, max_new)
        if why := why_not(self._layers(anatomy), self.form):
            raise UnsupportedModelError(f"{anatomy.model_name} cannot draft in {self.bits} bits: {why}")

    def start(self, session: Session) -> Drafter:
        model, anatomy, folder = session.target.model, session.anatomy, session.knowledge.folder
        wanted = self.wanted(anatomy, model)
        substitutes = packed(model, wanted, partial(self._read, folder, wanted))
        session.target.substitutes.append(substitutes)
        head = self.layers.head_rows(model) if isinstance(self.layers, EarlyExit) else None
        plan = replace(self._plan(anatomy), substitutes=substitutes)
        return PartialDraft(session.limits(ProductThreshold()), plan, head)

    def save(self, folder: Path, model: PreTrainedModel) -> None:
        about, tensors = self._about(Fingerprint.of_decoder(model)), {}
        for name, (module, form) in self.wanted(Anatomy.of(model), model).items():
            numbers, scales = rounded(module, form)
            # A byte has two numbers of four bits.
            tensors[f"{name}.numbers"] = numbers[:, ::2] << 4 | numbers[:, 1::2] if form.bits == 4 else numbers
            tensors[f"{name}.scales"] = scales
        if tensors:  # none where this device has no kernel
            with written_whole(folder / FILE_NAME) as beside:
                save_file(tensors, beside, about)

    def wanted(self, anatomy: Anatomy, model: PreTrainedModel) -> Wanted:
        """The layers that are packed, by their names, and how."""
        found = {
            name: (module, self.form)
            for name, module in linear_layers(self._layers(anatomy))
            if fits(module, self.form)
        }
        head, form = output_head(model), self.form._replace(bits=self.head)
        if type(head) is torch.nn.Linear and getattr(self.layers, "head", None) is None and fits(head, form):
            found[_HEAD] = head, form
        return found

    @property
    def form(self) -> Form:
        """How the weights of layers are rounded."""
        return Form(self.bits, self.group_size, self.algorithm)

    def _plan(self, anatomy: Anatomy) -> LayerPlan:
        plan = None if self.layers is None else self.layers.plan(anatomy)
        return LayerPlan(anatomy.num_layers) if plan is None else plan

    def _layers(self, anatomy: Anatomy) -> dict[int, torch.nn.Module]:
        """The layers that draft, by their indices."""
        skipped = self._plan(anatomy).skipped_layers
        return {index: layer for index, layer in enumerate(anatomy.layers) if index not in skipped}

    def _about(self, fingerprint: Fingerprint) -> dict[str, str]:
        return {"settings": json.dumps(encode(self, "draft")), "fingerprint": json.dumps(asdict(fingerprint))}

    def _read(self, folder: Path | None, wanted: Wanted, fingerprint: Fingerprint) -> dict[str, Rounded]:
        """What :meth:`save` has written there, nothing if that was for other settings or weights."""
        if folder is None or not (path := folder / FILE_NAME).exists():
            return {}
        try:
            with safe_open(path, "pt") as file:
                if file.metadata() != self._about(fingerprint):
                    return {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found = {}
            # A file from a device with fewer kernels has fewer layers.
            for name, (module, form) in wanted.items():
                if f"{name}.numbers" not in tensors:
                    continue
                numbers, scales = tensors[f"{name}.numbers"], tensors[f"{name}.scales"]
                if numbers.dtype is torch.uint8:
                    numbers = torch.stack([numbers >> 4, numbers & 15], dim=-1).flatten(1)
                if not is_rounded(module, form, (numbers, scales)):
                    raise ValueError(f"{name} has other shapes")
                found[name] = numbers, scales
            return found
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise SettingError(
                f"{path} holds no packed weights, or was cut short or changed ({brief(error)}). Save it again, or "
                "delete it."
            ) from error
