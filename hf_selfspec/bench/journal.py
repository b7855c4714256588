"""What was measured so far: a file with a line of JSON for each call, which a restarted run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import saving
from ..errors import SettingError
from ..files import check_folder, read_text, reported
from ..selfspec import SelfSpec
from .calls import Call, Place

FILE = "calls.jsonl"
_STATES = "states"


class Journal:
    """All calls so far, in memory and, with a folder, in its file.

    Args:
        header: settings, model, prompts, methods, machine and versions by name, on which all figures depend.
        folder: the folder of the file, ``None`` for no file.

    Raises:
        SettingError: the file is not a journal or has other settings, or it cannot be written.
    """

    def __init__(self, header: Mapping[str, Any], folder: Path | None = None) -> None:
        self.calls: dict[Place, Call] = {}
        self._folder = folder
        if folder is None:
            return
        check_folder("the folder of results", folder, [FILE])
        if (folder / FILE).exists():
            self._read(folder / FILE, json.loads(_line(header)))
        if not self.calls:
            with reported(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for state in (folder / _STATES).glob(f"*/{saving.FILE_NAME}"):
                    state.unlink()  # of a file of calls that no longer exists
                (folder / FILE).write_text(_line(header), encoding="utf-8")

    def add(self, call: Call) -> None:
        """Adds a call."""
        self.calls[call.place] = call
        if self._folder is not None:
            path = self._folder / FILE
            with reported(path), path.open("a", encoding="utf-8") as file:
                file.write(_line(asdict(call)))
                file.flush()
                os.fsync(file.fileno())

    def keep_state(self, name: str, spec: SelfSpec, model: Any) -> None:
        """Saves what a ``SelfSpec`` has learned, for a restarted run."""
        if self._folder is not None:
            spec.save_pretrained(self._folder / _STATES / name, model)

    def restore_state(self, name: str, spec: SelfSpec, model: Any) -> None:
        """Starts a new ``SelfSpec`` from its saved state, if there is one."""
        path = None if self._folder is None else self._folder / _STATES / name / saving.FILE_NAME
        if path is not None and path.exists():
            spec._knowledge.saved = saving.read(path)
            spec._knowledge.check(model)  # here, so that no timed call does it

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        try:
            text = read_text(path)
            whole = text[: text.rfind("\n") + 1]  # without a line that was cut short when its process ended
            written, *lines = map(json.loads, whole.splitlines())
            other = [f"{name}: {written.get(name)!r}, now {value!r}" for name, value in header.items()
                     if written.get(name) != value]  # fmt: skip
            calls = [Call(**line) for line in lines]
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingError(
                f"{path} is not a file of measured calls ({error}). Move it away, or give another folder."
            ) from error
        if other:
            raise SettingError(
                f"{path} was measured with other settings ({'; '.join(other)}), which cannot be combined with "
                "these. Give another folder, or the settings from before."
            )
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        self.calls = {call.place: call for call in calls}


def _line(content: Any) -> str:
    return json.dumps(content, default=str) + "\n"
