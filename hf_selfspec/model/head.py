"""A model's output head, whole or with some of its rows only."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .forks import cached_property
from .linear import FewTokenLinear

# The logit of tokens without a row. Next to the logits of other tokens its probability is 0 in all floating types,
# unless a soft-cap or a high temperature raises it; in any case sampling uses exactly that probability. Unlike an
# infinity it does not turn into NaN in scales and soft-caps.
NOTHING = -3e4


# For each head what changes when its numbers or tokens do, the tokens whose rows were copied last, and these rows.
_kept = WeakKeyDictionary[nn.Module, tuple[list[tuple[Any, ...]], torch.Tensor, FewTokenLinear]]()


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the module that maps states to logits, ``None`` if the model does not name it."""
    head: nn.Module | None = None
    with suppress(AttributeError, NotImplementedError):  # raised by code that is not transformers' own
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return head


def spread(logits: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Returns logits ``[..., v]`` of a whole vocabulary, of those ``[..., r]`` of some tokens ``[r]``."""
    return logits.new_full((*logits.shape[:-1], vocabulary), NOTHING).index_copy_(-1, tokens, logits)


class HeadRows:
    """The rows of a model's head for some tokens ``[r]``, in order, copied once for a model when states arrive."""

    def __init__(self, model: PreTrainedModel, tokens: torch.Tensor) -> None:
        head = output_head(model)
        # Parameters that are spread over processes have a device mesh, or no values in this process.
        weight: Any = getattr(head, "weight", None)
        is_whole = type(head) is nn.Linear and weight.device.type != "meta" and not hasattr(weight, "device_mesh")
        if not is_whole or weight.dim() != 2 or not weight.is_floating_point():
            raise UnsupportedModelError(
                f"{type(model).__name__} has no output head that is a plain linear layer of this process (quantised, "
                "offloaded, spread over processes, or wrapped by an adapter?), so drafts cannot have a reduced one: "
                "leave `head` out."
            )
        self._vocabulary = len(weight)
        if int(tokens.max()) >= self._vocabulary:
            raise UnsupportedModelError(
                f"this reduced head names token {int(tokens.max())}, but the head of {type(model).__name__} has "
                f"{self._vocabulary} tokens. Fit one to this model."
            )
        self._head: Any = head
        self._chosen = tokens
        self.tokens = tokens.to(weight.device)

    @property
    def is_used(self) -> bool:
        """Whether the rows have run in place of the model's head."""
        return "_rows" in self.__dict__

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[..., v]`` of states ``[..., d]``, in place of the head."""
        return spread(self.of_tokens(states), self.tokens, self._vocabulary)

    def of_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits ``[..., r]`` of its tokens."""
        logits: torch.Tensor = self._rows(states.to(self.tokens.device))
        return logits

    @cached_property
    def _rows(self) -> FewTokenLinear:
        weight, bias = self._head.weight, self._head.bias
        # A copy of numbers that were changed in a way that torch does not count drafts worse, and that is all.
        state = [
            (id(part), part.data_ptr(), part.dtype, part.device, 0 if part.is_inference() else part._version)
            for part in (weight, bias, self._chosen)
            if part is not None
        ]
        before, _, kept = _kept.get(self._head, (None, None, None))
        if kept is not None and before == state:
            return kept
        with torch.device("meta"):
            rows = FewTokenLinear(weight.shape[1], len(self.tokens), bias=bias is not None)
        with torch.inference_mode(False), torch.no_grad():  # a training may use them next
            rows.weight = nn.Parameter(weight.detach()[self.tokens], requires_grad=False)
            if bias is not None:
                rows.bias = nn.Parameter(bias.detach()[self.tokens], requires_grad=False)
        _kept[self._head] = state, self._chosen, rows
        return rows
