"""Texts and prompts, read from a file or a dataset of the Hub."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi

from ..errors import SettingError, brief
from ..learned.files import is_name, path_of, read_text
from ..model.encoding import Prompt, is_chat
from .loading import NO_ANSWER, hub_error

_LINES, _WHOLE = (".jsonl", ".json"), ".txt"
# Columns in which a prompt is looked for; the first one that exists counts.
COLUMNS = ("messages", "prompt", "text", "question", "instruction")
# Characters of a row that a message repeats.
_SHOWN_OF_ROW = 60
_EXAMPLE = 'e.g. {"text": "..."}.'


class Row(NamedTuple):
    """A line of a file, or a row of a dataset."""

    place: str  # for messages
    columns: Mapping[str, Any]

    def prompt(self, field: str | None = None) -> Prompt:
        """Returns the text or the chat in a column, by default in the first one of ``COLUMNS`` that exists."""
        content: Any = next(filter(None, map(self.columns.get, COLUMNS if field is None else (field,))), None)
        where = f"any of the columns {', '.join(COLUMNS)}" if field is None else f"the column {field!r}"
        return content if is_chat(content) else self._text(content, f"{where}, and no chat")

    def text(self, field: str) -> str:
        return self._text(self.columns.get(field), f"the column {field!r}")

    def _text(self, content: Any, where: str) -> str:
        """The text, unless it contains half of a surrogate pair, which no tokenizer accepts."""
        if not isinstance(content, str):
            raise SettingError(
                f"{self.place}: there is no text in {where}. Name one of the columns "
                f"{sorted(map(str, self.columns))} with --field."
            )
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise SettingError(
                f"{self.place}: this text is not Unicode, so no tokenizer accepts it ({error}). Drop that character."
            ) from error
        return content


def texts(data: str, field: str | None = None) -> list[str]:
    """Returns the texts of a file or dataset: a ``.txt`` file is one text; see :func:`read_rows` for others."""
    texts = [row.text(field or "text") for row in read_rows(data, field, is_whole=True)]
    return _unless_empty(texts, data, any(text.strip() for text in texts))


def read_rows(data: str, field: str | None = None, is_whole: bool = False) -> list[Row]:
    """All rows, at least one, of a ``.jsonl`` file or a dataset of the Hub; of a ``.txt`` file its lines, or if
    ``is_whole`` its text."""
    if Path(data).suffix != _WHOLE:
        rows = _rows(data)
    elif field is not None:
        why = "is one text" if is_whole else "has a prompt in each line"
        raise SettingError(f"--field {field} has no effect on --data {data}, which {why}. Leave it out.")
    else:
        lines = [(1, content("--data", data))] if is_whole else _lines(data)
        rows = [Row(f"--data {data}, line {number}", {"text": line}) for number, line in lines]
    return _unless_empty(rows, data, bool(rows))


def read_prompts(data: str, field: str | None = None) -> list[Prompt]:
    """Returns the texts and chats of all rows."""
    return [row.prompt(field) for row in read_rows(data, field)]


def content(option: str, file: str) -> str:
    """Returns the text of a file that an option names."""
    try:
        return read_text(path_of(file))
    except FileNotFoundError as error:
        raise SettingError(f"{option} {file}: there is no such file.") from error
    except ValueError as error:
        raise SettingError(f"{option} {file} cannot be read as text in UTF-8 ({error}).") from error


def _unless_empty(rows: list[Any], data: str, has_text: bool) -> list[Any]:
    if not has_text:
        raise SettingError(f"--data {data}: the dataset is empty. Give texts that the model is used for.")
    return rows


def _rows(data: str) -> list[Row]:
    suffix = Path(data).suffix
    if suffix in _LINES:
        places = [(f"--data {data}, line {number}", line) for number, line in _lines(data)]
        return [Row(place, _object(place, line)) for place, line in places]
    if os.path.exists(data):
        what = "a folder" if os.path.isdir(data) else f"a file of another kind ({suffix or 'no suffix'})"
        raise SettingError(
            f"--data {data} is {what}. Give a .txt file, or a .jsonl file with an object in each line, {_EXAMPLE}"
        )
    return [Row(f"--data {data}, row {number}", row) for number, row in enumerate(_rows_of_hub(data), start=1)]


def _lines(data: str) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    # Not splitlines, which also splits at line ends that may occur inside a JSON string.
    lines = enumerate(content("--data", data).split("\n"), start=1)
    return ((number, line.strip()) for number, line in lines if line.strip())


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        columns = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{place}: this is not JSON ({error}). Each line is one object, {_EXAMPLE}") from error
    if not isinstance(columns, dict):
        raise SettingError(f"{place}: {repr(columns)[:_SHOWN_OF_ROW]} is not an object with a text, {_EXAMPLE}")
    return columns


def _rows_of_hub(data: str) -> Sequence[Any]:
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
        rows: Sequence[Any] = load_dataset(data, split="train")
    except (*NO_ANSWER, ValueError, RuntimeError, exceptions.DatasetsError) as error:
        raise SettingError(f"--data {data}: the dataset cannot be loaded ({brief(error)}). {advice}") from error
    return rows
