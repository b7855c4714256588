"""What sources have in common that draft at an exit layer: a fitted module, and a reduced head (FR-Spec)."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..errors import SettingError
from ..model.head import HeadRows
from ..modules.draft_module import DraftModule, module_of
from ..modules.reduced_head import ReducedHead
from .source import DraftSource

_M = TypeVar("_M", bound=DraftModule)


def load_module(source: DraftSource, setting: str, kind: type[_M]) -> _M:
    """Loads the module that a setting of a frozen source holds or names, and makes a relative path a whole one."""
    kept, module = module_of(f"{type(source).__name__}({setting})", getattr(source, setting), kind)
    object.__setattr__(source, setting, kept)
    return module


class ExitSource(DraftSource):
    """A source that drafts with the model's head, or some of its rows."""

    head: ReducedHead | str | os.PathLike[str] | None

    def _load_head(self) -> None:
        """Reads the setting ``head`` while the source is created."""
        if self.head is not None:
            object.__setattr__(self, "_reduced", load_module(self, "head", ReducedHead))

    def __repr__(self) -> str:
        settings: Any = fields(self)  # type: ignore[arg-type]
        shown = {setting.name: getattr(self, setting.name) for setting in settings}
        if self.head is None:
            del shown["head"]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def head_rows(self, model: PreTrainedModel) -> HeadRows | None:
        """Returns what runs in place of a model's head in one generation, ``None`` for the whole head."""
        return None if self.head is None else HeadRows(model, self.__dict__["_reduced"].tokens)

    def check_whole_head(self) -> None:
        """Checks that the source drafts with the whole head, as checkpoints do."""
        if self.head is not None:
            raise SettingError(
                f"{self!r} drafts with some rows of the head, but a checkpoint has all of them. Export the same draft "
                "without `head`; engines that reduce the head themselves take a list of tokens (SGLang: "
                "--speculative-token-map)."
            )
