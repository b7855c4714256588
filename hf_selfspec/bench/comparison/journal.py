"""What was measured so far: a file with a line of JSON for each call, which a restarted run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ... import saving
from ...errors import SettingError
from ...files import check_folder, read_text, reported
from ...selfspec import SelfSpec
from ...stats import GenerationStats
from .calls import Call

FILE = "calls.jsonl"
_TRACE, _STATES = "trace.jsonl", "states"
# Kinds of lines.
_HEADER, _CALL, _PARTED, _PEAK = "settings", "call", "parted", "peak"


@dataclass(frozen=True)
class Parted:
    """A place where the ids of a way differ from plain generate's.

    Attributes:
        condition, prompt, way: indices of the condition and the prompt, and the name of the way.
        row, position: the row, and the index of the new token.
        margin: how far the logit of either token is at most below the model's highest there.
        is_near_tie: whether rounding explains it.
    """

    condition: int
    prompt: int
    way: str
    row: int
    position: int
    margin: float
    is_near_tie: bool


@dataclass
class Journal:
    """All calls so far, in memory and, with a folder, in its file.

    Attributes:
        header: what all calls share; see :meth:`opened`.
        folder: see :meth:`opened`.
        calls: all calls by way, condition, pass and prompt.
        parted: texts that differ from plain generate's.
        compared: conditions and prompts whose texts were compared.
        peaks: for each way and condition the peak memory in bytes of a process of its own.
        traces: whether statistics of each call are written, too.
    """

    header: Mapping[str, Any]
    folder: Path | None = None
    calls: dict[tuple[str, int, int, int], Call] = field(default_factory=dict)
    parted: list[Parted] = field(default_factory=list)
    compared: set[tuple[int, int]] = field(default_factory=set)
    peaks: dict[tuple[str, int], int] = field(default_factory=dict)
    traces: bool = False

    @classmethod
    def opened(cls, header: Mapping[str, Any], folder: Path | None, traces: bool = False) -> Journal:
        """Reads what an earlier run has written, or begins a journal.

        Args:
            header: settings, model, prompts, ways, machine and versions, on which figures depend.
            folder: the folder of the file, ``None`` for no file.
            traces: whether statistics of each call are written.

        Raises:
            SettingError: the file is not a journal or has other settings, or it cannot be written.
        """
        journal = cls(header, folder, traces=traces)
        if folder is None:
            return journal
        check_folder("the folder of results", folder, [FILE])
        if (folder / FILE).exists():
            journal._read(folder / FILE)
        if not journal.calls:
            with reported(folder):
                folder.mkdir(parents=True, exist_ok=True)
                _remove_leavings(folder)
                (folder / FILE).write_text(_line(_HEADER, header), encoding="utf-8")
        return journal

    def add(self, call: Call, stats: GenerationStats | None = None) -> None:
        """Adds a call."""
        self.calls[call.way, call.condition, call.turn, call.prompt] = call
        self._write(FILE, _line(_CALL, call.as_json()))
        if self.traces and stats is not None:
            place = {name: getattr(call, name) for name in ("way", "condition", "turn", "prompt", "kind")}
            self._write(_TRACE, _line("stats", place | vars(stats)))

    def add_comparison(self, condition: int, prompt: int, parted: list[Parted]) -> None:
        """Adds the places where the texts of one prompt differ."""
        self.parted += parted
        self.compared.add((condition, prompt))
        found = {"condition": condition, "prompt": prompt, "parted": [asdict(one) for one in parted]}
        self._write(FILE, _line(_PARTED, found))

    def add_peak(self, way: str, condition: int, peak: int) -> None:
        """Adds a peak of memory, in bytes."""
        self.peaks[way, condition] = peak
        self._write(FILE, _line(_PEAK, {"way": way, "condition": condition, "bytes": peak}))

    def keep_state(self, name: str, spec: SelfSpec, model: Any) -> None:
        """Saves what a ``SelfSpec`` has learned, for a restarted run."""
        if self.folder is not None:
            spec.save_pretrained(self.folder / _STATES / name, model)

    def restore_state(self, name: str, spec: SelfSpec, model: Any) -> None:
        """Starts a new ``SelfSpec`` from its saved state, if there is one."""
        path = None if self.folder is None else self.folder / _STATES / name / saving.FILE_NAME
        if path is not None and path.exists():
            spec._knowledge.saved = saving.read(path)
            spec._knowledge.check(model)  # here, so that no timed call does it

    def _read(self, path: Path) -> None:
        try:
            lines = list(_whole_lines(path))
            written = lines[0][_HEADER]
            for line in lines[1:]:
                self._take_in(line)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise SettingError(
                f"{path} is not a file of measured calls ({error}). Move it away, or give another folder."
            ) from error
        other = list(_differences(written, json.loads(json.dumps(self.header))))
        if other:
            raise SettingError(
                f"{path} was measured with other settings ({'; '.join(other)}), which cannot be combined with "
                "these. Give another folder, or the settings from before."
            )

    def _take_in(self, line: Mapping[str, Any]) -> None:
        if _CALL in line:
            call = Call.from_json(line[_CALL])
            self.calls[call.way, call.condition, call.turn, call.prompt] = call
        elif _PEAK in line:
            peak = line[_PEAK]
            self.peaks[peak["way"], peak["condition"]] = peak["bytes"]
        else:
            found = line[_PARTED]
            self.parted += [Parted(**one) for one in found["parted"]]
            self.compared.add((found["condition"], found["prompt"]))

    def _write(self, name: str, line: str) -> None:
        if self.folder is None:
            return
        with reported(self.folder / name), (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _remove_leavings(folder: Path) -> None:
    """Removes states and traces of a file of calls that no longer exists."""
    (folder / _TRACE).unlink(missing_ok=True)
    for state in (folder / _STATES).glob(f"*/{saving.FILE_NAME}"):
        state.unlink()


def _line(kind: str, content: Any) -> str:
    return json.dumps({kind: content}, default=str) + "\n"


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines; one that was cut short when its process ended is removed from the file."""
    text = read_text(path)
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    for line in whole.splitlines():
        yield json.loads(line)


def _differences(written: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The differences of two headers, by name."""
    for name in dict.fromkeys([*written, *now]):
        before, after = written.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}: {before!r}, now {after!r}"
