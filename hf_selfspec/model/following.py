"""What a model takes with the tokens that follow its prompt: their positions and other arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .arguments import MARKS, PREPARED, has_tensors, is_nothing

# The row's dimension in positions [*n, b, s] with any number of dimensions in front.
_ROW_DIM = -2


@dataclass(frozen=True)
class Following:
    """The inputs of forwards after a prompt, taken from the model's own preparation of its next token.

    Attributes:
        offsets: ``[*n, b, 1]`` position of a token minus its slot; ``None`` where the two are equal in all dimensions.
        marks: marks of tokens that the model takes, by name, each ``[b, 1]`` and equal for all tokens that follow.
        extra: other arguments, the same in every forward.
        has_positions: whether the model takes positions instead of counting them itself.
    """

    offsets: torch.Tensor | None = None
    marks: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    has_positions: bool = True

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        arguments: Mapping[str, Any],
        slots: Sequence[int],
        output: Mapping[str, Any] | None = None,
    ) -> Following:
        """Prepares one more token as the model's own ``generate`` does, and keeps what we do not lay out ourselves.

        Args:
            model: the model.
            input_ids: ``[b, s]`` the prompt.
            arguments: arguments that ``generate`` has prepared for the model's forward over it.
            slots: for each row the slot of the next token.
            output: output of that forward, ``None`` before it.

        Raises:
            UnsupportedModelError: the model takes a tensor that differs from token to token.
        """
        seen = _NoOutput() if output is None else output
        later = model._update_model_kwargs_for_generation(seen, dict(arguments), is_encoder_decoder=False)
        text = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)
        prepared = model.prepare_inputs_for_generation(text, next_sequence_length=1, is_first_iteration=False, **later)
        marks: dict[str, torch.Tensor] = {}
        extra: dict[str, Any] = {}
        for name, value in prepared.items():
            if name in PREPARED or is_nothing(value):
                continue
            if name in MARKS and isinstance(value, torch.Tensor):
                marks[name] = value[:, -1:]
            elif not has_tensors(value) or _is_same(value, arguments.get(name)):
                extra[name] = value
            else:
                raise UnsupportedModelError(
                    f"{type(model).__name__} takes a `{name}` of its own with every generated token, so that tokens "
                    "cannot be drafted after such a prompt. Call generate without `assistant`."
                )
        positions = prepared.get("position_ids")
        has_positions = positions is not None or arguments.get("position_ids") is None
        return cls(None if positions is None else _offsets(positions, slots), marks, extra, has_positions)

    def positions(self, slots: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        """Returns positions ``[*n, b, s]`` of the tokens in slots ``[b, s]`` of all rows, or of ``rows``."""
        if self.offsets is None:
            return slots
        offsets = self.offsets.to(slots.device)
        if rows is not None:
            offsets = offsets.index_select(_ROW_DIM, torch.tensor(rows, device=slots.device))
        return offsets + slots

    def marks_of(self, count: int) -> dict[str, torch.Tensor]:
        """Returns the marks of ``count`` tokens, each ``[b, count]``."""
        return {name: mark.expand(-1, count) for name, mark in self.marks.items()}


class _NoOutput(dict[str, Any]):
    """Stands for a model's output before its first forward: every attribute is ``None``."""

    def __getattr__(self, name: str) -> None:
        return None


def _offsets(positions: torch.Tensor, slots: Sequence[int]) -> torch.Tensor | None:
    offsets = positions[..., -1:] - torch.tensor(slots, device=positions.device)[:, None]
    return offsets if offsets.any() else None


def _is_same(value: Any, given: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return value is given
    return value.shape == given.shape and torch.equal(value, given.to(value.device))
