"""A frozen model, and the hidden states that are read from it to fit a small module."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model.patching import evaluating
from .exits import LOGIT_ELEMENTS, Exits

# A batch of text: its "ids" [b, s], and hidden states [b, s, d] of the model. For each wanted layer E, "states_E" is
# the output of layer E - 1, and "exits_E" the same after the model's own final norm; "final" goes into the head.
HiddenStates = dict[str, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]
# A value for each token, from the logits [n, v] of a draft and those of the whole model.
Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class FrozenModel:
    """A model whose states at some exit layers are a fit's data."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.exits = Exits(model)
        self.exits.check("fit", layers)
        self.anatomy = self.exits.anatomy
        self.own_head = self.exits.head

    @property
    def device(self) -> torch.device:
        device = self.model.get_input_embeddings().weight.device
        if device.type == "meta":
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} is offloaded, so nothing can be fitted to it. Load all of it on devices."
            )
        return device

    @property
    def width(self) -> int:
        """``d`` of the states; raises if the head takes states of another width."""
        states = self.hidden_states(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        width, final = states[f"states_{self.layers[0]}"].shape[-1], states["final"].shape[-1]
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

    def per_token(
        self,
        metric: Metric,
        head: Head,
        drafted: torch.Tensor,
        final: torch.Tensor,
        teacher: Head | None = None,
        vocabulary: int | None = None,
    ) -> torch.Tensor:
        """``[b s]`` values of ``metric``, from logits of ``head`` for the states ``drafted`` ``[b, s, d]`` and those of
        a teacher (by default the model's own head) for ``final``. Logits of many tokens are computed in parts, and
        again in the backward pass, so that they are not in memory together."""

        def of(drafted: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher_logits = (teacher or self.own_head)(final).float()
            return metric(head(drafted).float(), teacher_logits)

        chunk = max(1, LOGIT_ELEMENTS // (vocabulary or self.model.config.get_text_config(decoder=True).vocab_size))
        pairs = list(zip(*(states.flatten(0, 1).split(chunk) for states in (drafted, final)), strict=True))
        if len(pairs) == 1 or not torch.is_grad_enabled():
            return torch.cat([of(*pair) for pair in pairs])
        return torch.cat([checkpoint(of, *pair, use_reentrant=False) for pair in pairs])

    @torch.no_grad()
    def hidden_states(self, ids: torch.Tensor) -> HiddenStates:
        exits, ids = self.exits, ids.to(self.device)
        exits.chosen, exits.is_watching = self.layers, True
        try:
            self.anatomy.stack(input_ids=ids, use_cache=False, return_dict=True)
        finally:
            exits.chosen, exits.is_watching = (), False
        if any(state.dim() != 3 for state in exits.left.values()):
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} has several states for each token between its layers, so nothing is fitted."
            )
        final, states = cast(Any, (exits.final, exits.states))
        named = {"ids": ids, "final": final}
        for layer, state in zip(self.layers, states, strict=True):
            named |= {f"states_{layer}": exits.left[layer], f"exits_{layer}": state}
        return {name: state.to(self.device) for name, state in named.items()}

    @torch.no_grad()
    def imitate_norm(self, norm: nn.RMSNorm, layer: int) -> None:
        """Sets a norm's weight (``w`` of ``w x / |x|``) to match the model's own norm after a layer if that scales."""
        read = self.hidden_states(torch.arange(2, 10, device=self.device)[None])
        states, normed = read[f"states_{layer}"].double(), read[f"exits_{layer}"].double()
        if states.shape == normed.shape:
            unit = states / states.pow(2).mean(-1, keepdim=True).sqrt()
            norm.weight.copy_((unit * normed).sum((0, 1)) / (unit * unit).sum((0, 1)))

    @torch.no_grad()
    def copy_head(self, linear: nn.Linear) -> None:
        """Copies the weights of the model's own head, without its bias, scale or soft-cap, into a linear layer."""
        weight = getattr(self.model.get_output_embeddings(), "weight", None)
        if weight is None or weight.shape != linear.weight.shape:
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} has no output head of the shape {tuple(linear.weight.shape)} that could be "
                "copied: leave copied=True or own_head=True out."
            )
        linear.weight.copy_(weight)


def cross_entropy(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` cross entropy of the draft's distribution against the whole model's (Kangaroo, equation 3)."""
    return -(teacher.softmax(-1) * drafted.log_softmax(-1)).sum(-1)


def agreement(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` whether both have the same first choice."""
    return (drafted.argmax(-1) == teacher.argmax(-1)).float()
