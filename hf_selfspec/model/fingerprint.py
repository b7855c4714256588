"""Fingerprints that tell one model from another, for what was learned about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from ..errors import SettingError, brief
from .anatomy import Anatomy

_SAMPLES = 8


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a model in saved findings."""

    model: str  # class name
    num_layers: int  # L
    shapes: str  # digest of the names and shapes of all parameters
    # Digest of a few values of each, rounded to bfloat16 so that a cast does not matter; None where some cannot be read
    # (offloaded, sharded or quantised weights).
    weights: str | None

    @classmethod
    def read(cls, state: object, name: str) -> Fingerprint:
        types = {"model": str, "num_layers": int, "shapes": str, "weights": str | None}
        fields = state if isinstance(state, dict) else {}
        if fields.keys() != types.keys() or not all(isinstance(fields[name], types[name]) for name in types):
            raise SettingError(
                f"{name} must have the texts `model`, `shapes` and `weights` (or null), and a whole number "
                f"`num_layers`, got {brief(repr(state))}."
            )
        return cls(**fields)

    @classmethod
    def of_decoder(cls, model: PreTrainedModel) -> Fingerprint:
        """The fingerprint of a model with its adapters, active or not."""
        parameters = dict(sorted(model.named_parameters(), key=lambda pair: pair[0]))
        shapes = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in parameters.items())
        weights, plain = None, (torch.Tensor, torch.nn.Parameter)
        if all(type(parameter) in plain and parameter.device.type != "meta" for parameter in parameters.values()):
            weights = _digest(samples(parameters.values()).numpy().tobytes())
        return cls(type(model).__name__, Anatomy.of(model).num_layers, _digest(shapes.encode()), weights)

    def difference(self, other: Fingerprint) -> str:
        """How ``other`` differs, as text; empty if it does not."""
        are_readable = None not in (self.weights, other.weights)
        reasons = {
            f"a {self.model}, not a {other.model}": self.model != other.model,
            f"a model of {self.num_layers} layers, not of {other.num_layers}": self.num_layers != other.num_layers,
            "a model whose parameters have other names or shapes": self.shapes != other.shapes,
            "a model with other weights": are_readable and self.weights != other.weights,
        }
        return next((why for why, holds in reasons.items() if holds), "")

    @property
    def name(self) -> str:
        return f"{self.model}-{self.num_layers}-{_digest(repr(self).encode())[:16]}"


def samples(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a few values of each weight, eight where it has as many, rounded to bfloat16, in CPU memory. Of weights
    in eight bits these are bytes, since few operations take all dtypes of that size."""
    flat = [weight.detach().reshape(-1) for weight in weights]
    flat = [values.view(torch.uint8) if values.element_size() == 1 else values for values in flat]
    few = [values[_sampled(len(values), values.device)] for values in flat]
    together = torch.cat([values.to(few[0].device) for values in few])  # a GPU is read once
    return together.to(torch.bfloat16).float().cpu()


@lru_cache(64)  # of the few sizes that a model's parameters have
def _sampled(length: int, device: torch.device) -> torch.Tensor:
    count = min(_SAMPLES, length)
    with torch.inference_mode(False):
        return torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
