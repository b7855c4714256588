"""The tokens that drafts consist of, where the whole vocabulary would cost too much (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from ..errors import SettingError
from .draft_module import About, DraftModule


class ReducedHead(DraftModule):
    """The most frequent tokens of some text, from which drafts choose, with their rows of the model's own head.

    Exact: a token that is not among them has probability 0 in a draft, and verification takes that into account. On a
    CPU, and with large vocabularies, the head is a large part of a shallow draft's cost (FR-Spec §3.2).

    Args:
        size: number of tokens.
        vocabulary: ``v`` of the model.
        about: see :class:`DraftModule`.

    Attributes:
        tokens: ``[size]`` the ids of the tokens, in increasing order.
    """

    kind = "reduced head"

    def __init__(self, size: int, vocabulary: int, about: About = None) -> None:
        super().__init__(about)
        self.vocabulary = vocabulary
        self.tokens = nn.Parameter(torch.arange(size, device="cpu"), requires_grad=False)

    @classmethod
    def of(cls, tokens: Iterable[int], vocabulary: int) -> ReducedHead:
        """Returns a head of tokens with these ids, for a model with a vocabulary of this size."""
        chosen = torch.as_tensor(sorted(tokens), device="cpu")
        head = cls(len(chosen), vocabulary)
        head.load_state_dict({"tokens": chosen})
        return head

    def extra_repr(self) -> str:
        return f"{len(self.tokens)} of {self.vocabulary} tokens, {self.digest}"

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like that of any module; raises if the tokens are not distinct ids of the vocabulary."""
        keys = super().load_state_dict(*args, **kwargs)
        tokens = self.tokens.tolist()
        if sorted(set(tokens)) != tokens or not 0 <= tokens[0] <= tokens[-1] < self.vocabulary:
            raise SettingError(
                f"a reduced head of {len(tokens)} tokens must have distinct ids from 0 to {self.vocabulary - 1}, in "
                "increasing order, and these are not."
            )
        return keys
