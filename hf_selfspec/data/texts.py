"""Reads the texts of a file, or of a dataset of the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..errors import SettingError, brief
from ..learned.files import path_of, read_text
from .hub import NO_ANSWER, is_name, trouble

_LINES, _WHOLE = (".jsonl", ".json"), ".txt"
# Column of the text unless another one is named.
_USUAL_FIELD = "text"
# Characters of a row that a message repeats.
_SHOWN = 60


def texts(data: str, field: str | None = None) -> list[str]:
    """Returns the texts of a file or of a dataset of the Hub.

    Args:
        data: a ``.txt`` file, which is one text; a ``.jsonl`` or ``.json`` file with an object in each line; or the
            name of a dataset, whose ``train`` split is used.
        field: the field of an object, or column of a dataset, that holds the text; ``text`` by default.

    Raises:
        SettingError: there is no such file or dataset, it cannot be read, or it has no texts.
    """
    if Path(data).suffix == _WHOLE:
        if field is not None:
            raise SettingError(f"--field {field} has no effect on --data {data}, which is one text. Leave it out.")
        found = [content(data)]
    else:
        found = list(_texts(data, rows(data, field or _USUAL_FIELD), field or _USUAL_FIELD))
    if not any(text.strip() for text in found):
        raise SettingError(f"--data {data}: the dataset is empty. Give texts that the model is used for.")
    return found


def rows(data: str, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the objects of a file, or the rows of a dataset of the Hub, each after its place, e.g. ``line 3``.

    ``field`` is the name of a field in the examples of error messages.
    """
    suffix = Path(data).suffix
    if suffix in _LINES:
        found, place = _objects(data), "line"
    elif os.path.exists(data):
        kind = "a folder" if os.path.isdir(data) else f"a file of another kind ({suffix or 'no suffix'})"
        raise SettingError(
            f"--data {data} is {kind}. Give a .txt file, or a .jsonl file with an object in each line, e.g. "
            f'{{"{field}": "..."}}.'
        )
    else:
        found, place = enumerate(_rows_of_hub(data), start=1), "row"
    for number, row in found:
        if not isinstance(row, dict):
            raise SettingError(
                f"--data {data}, {place} {number}: {repr(row)[:_SHOWN]} is not an object with a text, e.g. "
                f'{{"{field}": "..."}}.'
            )
        yield f"{place} {number}", row


def content(data: str) -> str:
    """Returns the content of a text file."""
    try:
        return read_text(path_of(data))
    except FileNotFoundError as error:
        raise SettingError(f"--data {data}: there is no such file.") from error
    except ValueError as error:
        raise SettingError(f"--data {data} cannot be read as text in UTF-8 ({error}).") from error


def _objects(data: str) -> Iterator[tuple[int, Any]]:
    """Yields the number and the object of each line that is not empty."""
    # Not splitlines, which also splits at line ends that may occur inside a JSON string.
    for number, line in enumerate(content(data).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingError(
                f"--data {data}, line {number}: this is not JSON ({error}). Each line is one object, e.g. "
                '{"text": "..."}.'
            ) from error


def _texts(data: str, found: Iterable[tuple[str, Mapping[str, Any]]], field: str) -> Iterator[str]:
    for place, row in found:
        if not isinstance(row.get(field), str):
            raise SettingError(
                f"--data {data}, {place}: there is no text in the column {field!r}. Name one of the "
                f"columns {sorted(map(str, row))} with --field."
            )
        check_unicode(f"--data {data}, {place}", row[field])
        yield row[field]


def check_unicode(place: str, text: str) -> None:
    """Raises if a text contains half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingError(
            f"{place}: this text is not Unicode, so no tokenizer accepts it ({error}). Leave that character out."
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
    if why := trouble(HfApi().dataset_info, data):
        raise SettingError(f"--data {data}: there is no such file, and the Hub has no such dataset ({why}). {advice}")
    try:
        rows: Iterable[Any] = load_dataset(data, split="train")
    except (*NO_ANSWER, ValueError, RuntimeError, exceptions.DatasetsError) as error:
        raise SettingError(f"--data {data}: the dataset cannot be loaded ({brief(error)}). {advice}") from error
    return rows
