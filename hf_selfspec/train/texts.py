"""The texts of a file, or of a dataset of the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..errors import SettingError, brief
from ..files import read_text
from ..hub import NO_ANSWER, is_name, trouble

_LINES, _WHOLE = (".jsonl", ".json"), ".txt"
# Column of the text unless another one is named.
_USUAL_FIELD = "text"
# Characters of a row that a message repeats.
_SHOWN = 60


def texts(data: str, field: str | None = None) -> list[str]:
    """The texts of a file or of a dataset of the Hub.

    Args:
        data: a ``.txt`` file, which is one text; a ``.jsonl`` or ``.json`` file with an object in each line; or the
            name of a dataset, whose rows for training count.
        field: of an object or row, which holds the text; ``text`` by default.

    Raises:
        SettingError: there is no such file or dataset, it cannot be read, or it has no texts.
    """
    suffix = Path(data).suffix
    if suffix == _WHOLE:
        if field is not None:
            raise SettingError(f"--field {field} has no effect on --data {data}, which is one text. Leave it out.")
        found = [_content(data)]
    elif suffix in _LINES:
        found = list(_texts(data, "line", _objects(data), field or _USUAL_FIELD))
    elif os.path.exists(data):
        kind = "a folder" if os.path.isdir(data) else f"a file of another kind ({suffix or 'no suffix'})"
        raise SettingError(
            f"--data {data} is {kind}. Give a .txt file, or a .jsonl file with an object in each line, e.g. "
            '{"text": "..."}.'
        )
    else:
        found = list(_texts(data, "row", enumerate(_rows_of_hub(data), start=1), field or _USUAL_FIELD))
    if not any(text.strip() for text in found):
        raise SettingError(f"--data {data}: the dataset is empty. Give texts that the model is used for.")
    return found


def _content(data: str) -> str:
    try:
        return read_text(Path(data))
    except FileNotFoundError as error:
        raise SettingError(f"--data {data}: there is no such file.") from error
    except ValueError as error:
        raise SettingError(f"--data {data} cannot be read as text in UTF-8 ({error}).") from error


def _objects(data: str) -> Iterator[tuple[int, Any]]:
    """What stands in each line that is not empty, with the line's number."""
    # Not splitlines, which knows line ends that may stand in a text of JSON.
    for number, line in enumerate(_content(data).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingError(
                f"--data {data}, line {number}: this is not JSON ({error}). Each line is one object, e.g. "
                '{"text": "..."}.'
            ) from error


def _texts(data: str, place: str, rows: Iterable[tuple[int, Any]], field: str) -> Iterator[str]:
    for number, row in rows:
        if not isinstance(row, dict):
            raise SettingError(
                f"--data {data}, {place} {number}: {repr(row)[:_SHOWN]} is not an object with a text, e.g. "
                f'{{"{field}": "..."}}.'
            )
        if not isinstance(row.get(field), str):
            raise SettingError(
                f"--data {data}, {place} {number}: there is no text in the column {field!r}. Of the columns "
                f"{sorted(map(str, row))} name the one that is meant with --field."
            )
        try:
            row[field].encode()
        except UnicodeEncodeError as error:
            raise SettingError(
                f"--data {data}, {place} {number}: this text is not Unicode, so no tokenizer takes it ({error}). Leave "
                "that character out."
            ) from error
        yield row[field]


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
