"""Draft sources with a reduced head, which drafts only some of the tokens (FR-Spec)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import SettingError
from ..model.head import HeadRows
from ..modules.draft_module import module_of
from ..modules.reduced_head import ReducedHead


def take_head(source: Any, name: str) -> None:
    """Reads the setting ``head`` of a frozen source while that is created.

    Raises:
        SettingError, SettingTypeError: it is neither a reduced head nor the place of one.
    """
    if source.head is None:
        return
    kept, module = module_of(f"{name}(head)", source.head, ReducedHead)
    object.__setattr__(source, "head", kept)
    object.__setattr__(source, "_reduced", module)


def shown_head(source: Any) -> str:
    """The part of a source's ``repr`` for its head, empty for the whole head."""
    return "" if source.head is None else f", head={source.head!r}"


def head_rows(source: Any, model: PreTrainedModel) -> HeadRows | None:
    """Returns what runs in place of a model's head in one generation, ``None`` for the whole head.

    Raises:
        UnsupportedModelError: single rows of the model's head cannot be used.
    """
    if source.head is None:
        return None
    reduced: ReducedHead = source.__dict__["_reduced"]
    return HeadRows(model, reduced.tokens)


def check_whole_head(source: Any) -> None:
    """Checks that a source drafts with the whole head, as checkpoints do.

    Raises:
        SettingError: it does not.
    """
    if source.head is not None:
        raise SettingError(
            f"{source!r} drafts with some rows of the head, but a checkpoint has all of them. Export the same draft "
            "without `head`; engines that reduce the head themselves take a list of tokens (SGLang: "
            "--speculative-token-map)."
        )
