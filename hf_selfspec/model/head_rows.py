"""Some rows of a model's output head, for forwards that draft."""

from __future__ import annotations

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .linear import FewTokenLinear

# The logit of tokens without a row. With any that a model gives to others, its probability is 0 in all floating types,
# and unlike an infinity it leaves scales and soft-caps numbers.
NOTHING = -3e4


class HeadRows:
    """The rows of a model's head that some tokens have, as they are now.

    Args:
        model: a causal LM of transformers.
        tokens: ``[r]`` ids.

    Raises:
        UnsupportedModelError: its head is no plain linear layer, or has other tokens.
    """

    def __init__(self, model: PreTrainedModel, tokens: torch.Tensor) -> None:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear or not head.weight.is_floating_point() or head.weight.device.type == "meta":
            raise UnsupportedModelError(
                f"{type(model).__name__} has no output head that is a plain linear layer (quantised, offloaded or "
                "wrapped by an adapter?), so drafts cannot have a reduced one: leave `head` out."
            )
        vocabulary, width = head.weight.shape
        if int(tokens[-1]) >= vocabulary:
            raise UnsupportedModelError(
                f"this reduced head names token {int(tokens[-1])}, but the head of {type(model).__name__} has "
                f"{vocabulary} tokens. Fit one to this model."
            )
        self.tokens = tokens.to(head.weight.device)
        self._vocabulary = vocabulary
        with torch.device("meta"):
            self._rows = FewTokenLinear(width, len(tokens), bias=head.bias is not None)
        self._rows.weight = nn.Parameter(head.weight.detach()[self.tokens], requires_grad=False)
        if head.bias is not None:
            self._rows.bias = nn.Parameter(head.bias.detach()[self.tokens], requires_grad=False)

    @property
    def size(self) -> int:
        """How many tokens have a row."""
        return len(self.tokens)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., v]`` logits of states ``[..., d]``, in the place of the head."""
        found: torch.Tensor = self._rows(states)
        logits = found.new_full((*found.shape[:-1], self._vocabulary), NOTHING)
        return logits.index_copy_(-1, self.tokens, found)

    def only(self, logits: torch.Tensor) -> torch.Tensor:
        """``[..., v]`` logits of the whole head as this one would give them."""
        tokens = self.tokens.to(logits.device)
        return torch.full_like(logits, NOTHING).index_copy_(-1, tokens, logits.index_select(-1, tokens))
