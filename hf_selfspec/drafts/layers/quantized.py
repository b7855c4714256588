"""Drafting with the model itself in four bits (ML-SpecQD, arXiv:2503.13565; QuantSpec, arXiv:2502.10424)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ...errors import SettingError, SettingTypeError, UnsupportedModelError, brief
from ...learned.files import written_whole
from ...learned.saving import encode, register
from ...model.anatomy import Anatomy
from ...model.fingerprint import Fingerprint
from ...model.head import output_head
from ...model.kernels.linear import linear_layers
from ...model.kernels.packing import Rounded, Wanted, fits, packed, rounded, shapes, why_not
from ...model.plan import LayerPlan
from ..source import Drafter, DraftSource, Session
from ..stop.rules import ProductThreshold
from .early_exit import EarlyExit
from .partial import PlanDrafter
from .skip_layers import SkipLayers


@register("draft")
@dataclass(frozen=True)
class Quantized(DraftSource):
    """Drafts with the model's own layers and head, whose weights are multiplied in four bits while they draft.

    Nothing is trained, and the model's own weights stay as they are. Packed ones are made at the first call, once for
    each model, shared by threads and by all its ``SelfSpec`` objects, and freed with the model; when the model's
    weights have changed, they are made again. ``SelfSpec.save_pretrained`` saves them. They take a third of a 16-bit
    model's memory.

    Models are in bfloat16, on a CPU or on a GPU from compute capability 8.0 on. Linear layers that no kernel takes stay
    as they are: rows have to be multiples of 16, columns of 32.

    Args:
        layers: the layers that draft, as ``EarlyExit(layer)`` or ``SkipLayers(attention=[...], mlp=[...])``; ``None``
            for all.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    layers: EarlyExit | SkipLayers | None = None

    def __post_init__(self) -> None:
        layers = self.layers
        if layers is not None and not isinstance(layers, (EarlyExit, SkipLayers)):
            raise SettingTypeError(f"Quantized(layers) must be EarlyExit, SkipLayers or None, got {layers!r}.")
        if (isinstance(layers, EarlyExit) and layers.layer is None) or getattr(layers, "search", None) is not None:
            raise SettingError(
                f"Quantized(layers={layers!r}): nothing looks for layers that draft in four bits. Name them, for "
                "example EarlyExit(8) or SkipLayers(mlp=[3, 5])."
            )

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        if self.layers is not None:
            self.layers.check(anatomy, max_new)
        if why := why_not(anatomy, self._layers(anatomy)):
            raise UnsupportedModelError(f"{anatomy.model_name} cannot draft in four bits: {why}")

    def start(self, session: Session) -> Drafter:
        model, anatomy, folder = session.target.model, session.anatomy, session.knowledge.folder
        substitutes = packed(model, self.wanted(anatomy, model), partial(self._read, folder, model))
        session.target.substitutes.append(substitutes)
        head = self.layers.head_rows(model) if isinstance(self.layers, EarlyExit) else None
        plan = replace(self._plan(anatomy), substitutes=substitutes)
        return PlanDrafter(session.with_usual_stop(ProductThreshold()), plan, head)

    def save(self, folder: Path, model: PreTrainedModel) -> None:
        tensors = {}
        for name, module in self.wanted(Anatomy.of(model), model).items():
            tensors[f"{name}.numbers"], tensors[f"{name}.scales"] = rounded(module)
        if tensors:  # none where this device has no kernel
            with written_whole(self._path(folder)) as beside:
                save_file(tensors, beside, _about(model))

    def wanted(
        self, anatomy: Anatomy, model: PreTrainedModel, fits: Callable[[torch.nn.Module], bool] = fits
    ) -> Wanted:
        """The layers that are packed, by their names."""
        wanted = {name: module for name, module in linear_layers(self._layers(anatomy)) if fits(module)}
        head = output_head(model)
        if type(head) is torch.nn.Linear and getattr(self.layers, "head", None) is None and fits(head):
            wanted["head"] = head
        return wanted

    def _plan(self, anatomy: Anatomy) -> LayerPlan:
        plan = None if self.layers is None else self.layers.plan(anatomy)
        return LayerPlan(anatomy.num_layers) if plan is None else plan

    def _layers(self, anatomy: Anatomy) -> dict[int, torch.nn.Module]:
        """The layers that draft, by their indices."""
        skipped = self._plan(anatomy).skipped_layers
        return {index: layer for index, layer in enumerate(anatomy.layers) if index not in skipped}

    def _path(self, folder: Path) -> Path:
        """The file with rounded weights for these settings, next to those of other sources."""
        settings = json.dumps(encode(self, "draft"))
        return folder / f"packed-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.safetensors"

    def _read(self, folder: Path | None, model: PreTrainedModel, wanted: Wanted) -> Iterator[tuple[str, Rounded]]:
        """Yields what :meth:`save` has written there, nothing if that was for other weights."""
        if folder is None or not (path := self._path(folder)).exists():
            return
        try:
            with safe_open(path, "pt") as file:
                # A file from a device with fewer kernels has fewer layers.
                names = set(file.keys()) if file.metadata() == _about(model) else ()
                for name, module in wanted.items():
                    if f"{name}.numbers" in names:
                        weights = file.get_tensor(f"{name}.numbers"), file.get_tensor(f"{name}.scales")
                        if tuple(tuple(tensor.shape) for tensor in weights) != shapes(module):
                            raise ValueError(f"{name} has other shapes")
                        yield name, weights
        except (SafetensorError, OSError, ValueError) as error:
            raise SettingError(
                f"{path} holds no packed weights, or was cut short or changed ({brief(error)}). Save it again, or "
                "delete it."
            ) from error


def _about(model: PreTrainedModel) -> dict[str, str]:
    return {"fingerprint": json.dumps(asdict(Fingerprint.of_decoder(model)))}
