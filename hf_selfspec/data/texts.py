"""Reads texts and prompts from a file, or from a dataset of the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..errors import SettingError, brief
from ..learned.files import path_of, read_text
from .hub import NO_ANSWER, hub_error, is_name
from .prompts import Prompt, is_chat

_LINES, _WHOLE = (".jsonl", ".json"), ".txt"
# Columns in which a prompt is looked for; the first one that exists counts.
COLUMNS = ("messages", "prompt", "text", "question", "instruction")
# Column of a text unless another one is named, and the one that examples of prompts have.
_TEXT, _EXAMPLE = "text", "prompt"
# Characters of a row that a message repeats.
_SHOWN = 60


@dataclass(frozen=True)
class Row:
    """A line of a file, or a row of a dataset."""

    place: str  # for messages
    columns: Mapping[str, Any]

    def prompt(self, field: str | None = None) -> Prompt:
        """Returns the text or the chat in a column, by default in the first one of ``COLUMNS`` that exists."""
        names = COLUMNS if field is None else (field,)
        found: Any = next((self.columns[name] for name in names if self.columns.get(name)), None)
        if not isinstance(found, str) and not is_chat(found):
            where = f"any of the columns {', '.join(COLUMNS)}" if field is None else f"the column {field!r}"
            raise SettingError(
                f"{self.place}: there is no text in {where}, and no chat. Of the columns {self._names} name the one "
                "that is meant with --field."
            )
        return self._checked(found) if isinstance(found, str) else found

    def text(self, field: str) -> str:
        """Returns the text in a column."""
        if not isinstance(found := self.columns.get(field), str):
            raise SettingError(
                f"{self.place}: there is no text in the column {field!r}. Name one of the columns {self._names} with "
                "--field."
            )
        return self._checked(found)

    @property
    def _names(self) -> list[str]:
        return sorted(map(str, self.columns))

    def _checked(self, text: str) -> str:
        """The text, unless it contains half of a surrogate pair, which no tokenizer accepts."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SettingError(
                f"{self.place}: this text is not Unicode, so no tokenizer accepts it ({error}). Leave that character "
                "out."
            ) from error
        return text


def texts(data: str, field: str | None = None) -> list[str]:
    """Returns the texts of a file or dataset: a ``.txt`` file is one text; see :func:`read_rows` for others."""
    if Path(data).suffix == _WHOLE:
        _check_no_field(data, field, "is one text")
        found = [_content(data)]
    else:
        found = [row.text(field or _TEXT) for row in _rows(data, field or _TEXT)]
    if not any(text.strip() for text in found):
        raise SettingError(f"--data {data}: the dataset is empty. Give texts that the model is used for.")
    return found


def read_rows(data: str, field: str | None = None) -> list[Row]:
    """Returns all rows, at least one.

    ``data`` is a ``.txt`` file with a prompt in each line, a ``.jsonl`` or ``.json`` file with an object in each line,
    or the name of a dataset of the Hub, whose training split is read.
    """
    if Path(data).suffix == _WHOLE:
        _check_no_field(data, field, "has a prompt in each line")
        found = [Row(f"--data {data}, line {number}", {_TEXT: line}) for number, line in _lines(data)]
    else:
        found = list(_rows(data, field or _EXAMPLE))
    if not found:
        raise SettingError(f"--data {data}: the dataset is empty. Give prompts that the model is used for.")
    return found


def read_prompts(data: str, field: str | None = None) -> list[Prompt]:
    """Returns the texts and chats of all rows."""
    return [row.prompt(field) for row in read_rows(data, field)]


def _check_no_field(data: str, field: str | None, why: str) -> None:
    if field is not None:
        raise SettingError(f"--field {field} has no effect on --data {data}, which {why}. Leave it out.")


def _rows(data: str, example: str) -> Iterator[Row]:
    """The objects of a file, or the rows of a dataset of the Hub; messages show an ``example`` of a field."""
    suffix = Path(data).suffix
    if suffix in _LINES:
        found, place = _objects(data), "line"
    elif os.path.exists(data):
        kind = "a folder" if os.path.isdir(data) else f"a file of another kind ({suffix or 'no suffix'})"
        raise SettingError(
            f"--data {data} is {kind}. Give a .txt file, or a .jsonl file with an object in each line, e.g. "
            f'{{"{example}": "..."}}.'
        )
    else:
        found, place = enumerate(_rows_of_hub(data), start=1), "row"
    for number, row in found:
        if not isinstance(row, dict):
            raise SettingError(
                f"--data {data}, {place} {number}: {repr(row)[:_SHOWN]} is not an object with a text, e.g. "
                f'{{"{example}": "..."}}.'
            )
        yield Row(f"--data {data}, {place} {number}", row)


def _content(data: str) -> str:
    try:
        return read_text(path_of(data))
    except FileNotFoundError as error:
        raise SettingError(f"--data {data}: there is no such file.") from error
    except ValueError as error:
        raise SettingError(f"--data {data} cannot be read as text in UTF-8 ({error}).") from error


def _lines(data: str) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    # Not splitlines, which also splits at line ends that may occur inside a JSON string.
    lines = enumerate(_content(data).split("\n"), start=1)
    return ((number, line.strip()) for number, line in lines if line.strip())


def _objects(data: str) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(data):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingError(
                f"--data {data}, line {number}: this is not JSON ({error}). Each line is one object, e.g. "
                '{"text": "..."}.'
            ) from error


def _rows_of_hub(data: str) -> Iterable[Any]:
    if not is_name(data):
        raise SettingError(f"--data {data}: there is no such file, and it is not the name of a dataset of the Hub.")
    try:
        from datasets import exceptions, load_dataset
    except ImportError as error:
        raise SettingError(
            f"--data {data} names a dataset of the Hub, which needs `pip install datasets`. Or give a .jsonl or .txt "
            "file."
        ) from error
    advice = "Give a .jsonl or .txt file, or set HF_HUB_OFFLINE=1 for a dataset that was loaded before."
    if why := hub_error(HfApi().dataset_info, data):
        raise SettingError(f"--data {data}: there is no such file, and the Hub has no such dataset ({why}). {advice}")
    try:
        rows: Iterable[Any] = load_dataset(data, split="train")
    except (*NO_ANSWER, ValueError, RuntimeError, exceptions.DatasetsError) as error:
        raise SettingError(f"--data {data}: the dataset cannot be loaded ({brief(error)}). {advice}") from error
    return rows
