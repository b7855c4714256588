"""What a command line names: models, and files of texts and prompts; every failure is a one-line error."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingError, brief
from ..learned.files import is_name, path_of, read_text
from ..model.encoding import Prompt, is_chat

_GIVE_MODEL = "Give the folder of a causal LM of transformers, or its name on the Hub."
_LINES, _WHOLE = (".jsonl", ".json"), ".txt"
# Columns in which a prompt is looked for; the first one that exists counts.
COLUMNS = ("messages", "prompt", "text", "question", "instruction")
_EXAMPLE = 'e.g. {"text": "..."}.'


class Row(NamedTuple):
    """A line of a file."""

    place: str  # for messages
    columns: Mapping[str, Any]

    def prompt(self, field: str | None = None) -> Prompt:
        """Returns the text or the chat in a column, by default in the first one of ``COLUMNS`` that exists."""
        column = next(filter(self.columns.get, COLUMNS), COLUMNS[0]) if field is None else field
        chat: Any = self.columns.get(column)
        return chat if is_chat(chat) else self.text(column)

    def text(self, field: str) -> str:
        """Returns the text in a column."""
        if not isinstance(text := self.columns.get(field), str):
            raise SettingError(
                f"{self.place}: there is no text in the column {field!r}. Name one of the columns "
                f"{sorted(map(str, self.columns))} with --field."
            )
        return text


def texts(data: str, field: str | None = None, or_ids: bool = False) -> list[Any]:
    """Returns the texts of a file: a ``.txt`` file is one text; see :func:`read_rows` for others. With ``or_ids`` rows
    of a file with ``input_ids`` are returned as they are, such as those of ``write_answers``."""
    rows = read_rows(data, field, is_whole=True)
    if or_ids and "input_ids" in rows[0].columns:
        return [row.columns for row in rows]
    texts = [row.text(field or "text") for row in rows]
    return _unless_empty(texts, data, any(text.strip() for text in texts))


def read_prompts(data: str, field: str | None = None) -> list[Prompt]:
    """Returns the texts and chats of all rows."""
    return [row.prompt(field) for row in read_rows(data, field)]


def read_rows(data: str, field: str | None = None, is_whole: bool = False) -> list[Row]:
    """All rows, at least one, of a ``.jsonl`` file; of a ``.txt`` file its lines, or if ``is_whole`` its text."""
    suffix = Path(data).suffix
    if suffix == _WHOLE:
        if field is not None:
            raise SettingError(f"--field {field} has no effect on {data}, which has no columns. Leave it out.")
        lines = [(data, content(data))] if is_whole else _lines(data)
        rows = [Row(place, {"text": line}) for place, line in lines]
    elif suffix in _LINES or not os.path.exists(data):
        rows = [Row(place, _object(place, line)) for place, line in _lines(data)]
    else:
        what = "a folder" if os.path.isdir(data) else f"a file of another kind ({suffix or 'no suffix'})"
        raise SettingError(
            f"{data} is {what}. Give a .txt file, or a .jsonl file with an object in each line, {_EXAMPLE}"
        )
    return _unless_empty(rows, data, bool(rows))


def content(file: str) -> str:
    """Returns the text of a file."""
    try:
        return read_text(path_of(file))
    except FileNotFoundError as error:
        raise SettingError(f"{file}: there is no such file.") from error
    except ValueError as error:
        raise SettingError(f"{file} cannot be read as text in UTF-8 ({error}).") from error


def _unless_empty(rows: list[Any], data: str, has_text: bool) -> list[Any]:
    if not has_text:
        raise SettingError(f"{data}: the dataset is empty. Give texts that the model is used for.")
    return rows


def _lines(data: str) -> Iterator[tuple[str, str]]:
    """The lines that are not empty, with their places."""
    # Not splitlines, which also splits at line ends that may occur inside a JSON string.
    lines = enumerate(content(data).split("\n"), start=1)
    return ((f"{data}, line {number}", line.strip()) for number, line in lines if line.strip())


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        columns = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{place}: this is not JSON ({error}). Each line is one object, {_EXAMPLE}") from error
    if not isinstance(columns, dict):
        raise SettingError(f"{place}: {brief(repr(columns))} is not an object with a text, {_EXAMPLE}")
    return columns


class NamedModel:
    """A causal LM in a folder, on the Hub, or in the cache of downloads; each part is loaded when it is asked for."""

    def __init__(
        self, name: str, device: torch.device | str | None = None, revision: str | None = None, **weights: str | None
    ) -> None:
        """``weights`` are arguments of ``from_pretrained`` for the model, which then moves to ``device``, if any."""
        self.name, self._device = name, device
        self._weights = {option: value for option, value in weights.items() if value is not None}
        self._source = {"trust_remote_code": False, "revision": revision or "main"}  # code from there is not run
        if not (os.path.isdir(name) or is_name(name)):
            raise SettingError(f"--model {name}: there is no such folder. {_GIVE_MODEL}")

    @cached_property
    def config(self) -> Any:
        return self._load("config", AutoConfig.from_pretrained)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load("tokenizer", AutoTokenizer.from_pretrained, config=self.config)

    def model(self) -> PreTrainedModel:
        """The model with its weights, in evaluation mode."""
        model = self._load("model", AutoModelForCausalLM.from_pretrained, config=self.config, **self._weights)
        return model if self._device is None else nn.Module.to(model, self._device)

    def _load(self, what: str, load: Callable[..., Any], **options: Any) -> Any:
        try:
            return load(self.name, **self._source, **options)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # errors for damaged files come from many libraries and share no other base class
            message = f"--model {self.name}: its {what} cannot be loaded ({brief(error)}). {_GIVE_MODEL}"
            raise SettingError(message) from error


def set_up(device: str | None, threads: int | None) -> torch.device:
    """Sets up the process of a command; returns the device, without a name the accelerator, or the CPU."""
    logging.set_verbosity_error()  # hf_selfspec reports what is wrong with a call, in one line
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        chosen = accelerator if device is None else torch.device(device)
    except RuntimeError as error:
        raise SettingError(f"--device {device}: there is no such device ({brief(error)}).") from error
    count = 1 if chosen.type == "cpu" else torch.accelerator.device_count()
    if chosen.type not in ("cpu", accelerator.type) or (chosen.index or 0) >= count:
        raise SettingError(f"--device {device}: this machine has none. Give one of cpu, {accelerator.type}.")
    return chosen
