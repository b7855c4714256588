"""Reads the prompts of a file or of a dataset on the Hub, for every command that takes prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .prompts import Prompt
from .texts import check_unicode, content, rows

# Columns in which a prompt is looked for; the first one that exists counts.
COLUMNS = ("messages", "prompt", "text", "question", "instruction")
# Column of a file without columns, and the one that examples have.
_LINE, _EXAMPLE = "text", "prompt"
_PLAIN = ".txt"


@dataclass(frozen=True)
class Row:
    """A line of a file, or a row of a dataset.

    Attributes:
        place: where the row is, for messages.
        columns: its values by column.
    """

    place: str
    columns: Mapping[str, Any]

    def prompt(self, field: str | None = None) -> Prompt:
        """Returns the text or the chat of the row.

        Args:
            field: column that holds it, ``None`` for the first one of ``COLUMNS`` that exists.

        Raises:
            SettingError: the row has no text and no chat there.
        """
        names = COLUMNS if field is None else (field,)
        found: Any = next((self.columns[name] for name in names if self.columns.get(name)), None)
        if isinstance(found, str):
            check_unicode(self.place, found)
        elif not _is_chat(found):
            where = f"any of the columns {', '.join(COLUMNS)}" if field is None else f"the column {field!r}"
            raise SettingError(
                f"{self.place}: there is no text in {where}, and no chat. Of the columns "
                f"{sorted(map(str, self.columns))} name the one that is meant with --field."
            )
        return found


def read_rows(data: str, field: str | None = None) -> list[Row]:
    """Returns all rows, at least one.

    Args:
        data: a ``.txt`` file with a prompt in each line; a ``.jsonl`` or ``.json`` file with an object in each line; or
            the name of a dataset, whose training split is read.
        field: column of the prompt.

    Raises:
        SettingError: there is no such file or dataset, it cannot be read, or it is empty.
    """
    if Path(data).suffix == _PLAIN:
        if field is not None:
            raise SettingError(
                f"--field {field} has no effect on --data {data}, which has a prompt in each line. Leave it out."
            )
        lines = enumerate(content(data).split("\n"), start=1)
        found = [Row(f"--data {data}, line {number}", {_LINE: line.strip()}) for number, line in lines if line.strip()]
    else:
        found = [Row(f"--data {data}, {place}", row) for place, row in rows(data, field or _EXAMPLE)]
    if not found:
        raise SettingError(f"--data {data}: the dataset is empty. Give prompts that the model is used for.")
    return found


def read_prompts(data: str, field: str | None = None) -> list[Prompt]:
    """Returns the texts and chats of all rows, see :func:`read_rows`.

    Raises:
        SettingError: as there, or a row has no prompt.
    """
    return [row.prompt(field) for row in read_rows(data, field)]


def _is_chat(found: Any) -> bool:
    is_list = isinstance(found, Sequence) and not isinstance(found, str) and bool(found)
    return is_list and all(isinstance(message, Mapping) for message in found)
