"""Parts that start with weights of the model that they are fitted to."""

from __future__ import annotations

import torch
import torch.nn as nn

from ..errors import UnsupportedModelError
from .backbone import Backbone


@torch.no_grad()
def norm_like_the_models(norm: nn.RMSNorm, backbone: Backbone, layer: int) -> None:
    """Sets a norm's weight (``w`` of ``w x / |x|``) to match the model's own norm after a layer if that only scales."""
    ids = torch.arange(2, 10, device=backbone.device)[None]
    observed = backbone.observe(ids)
    states, normed = observed.states[layer].double(), observed.exits[layer].double()
    if states.shape == normed.shape:
        unit = states / states.pow(2).mean(-1, keepdim=True).sqrt()
        norm.weight.copy_((unit * normed).sum((0, 1)) / (unit * unit).sum((0, 1)))


@torch.no_grad()
def copy_head(linear: nn.Linear, backbone: Backbone) -> None:
    """Copies the weights of the model's own head into a linear layer, without the head's bias, scale or soft-cap.

    Raises:
        UnsupportedModelError: the head is not a matrix of the same shape.
    """
    own = backbone.model.get_output_embeddings()
    weight = getattr(own, "weight", None)
    if weight is None or weight.shape != linear.weight.shape:
        raise UnsupportedModelError(
            f"{backbone.anatomy.model_name} has no output head of the shape {tuple(linear.weight.shape)} that could be "
            "copied: leave copied=True or own_head=True out."
        )
    linear.weight.copy_(weight)
