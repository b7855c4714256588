"""The file of results: rewritten after each piece, and read by a run that resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SettingError
from ...files import check_folder, read_json, reported, written_whole

Result = dict[str, Any]

# A piece during which the process died so often is not started again.
_LIVES = 2

# Seconds after which a piece of each group is cut, so that it cannot take the time of all others. Not measured on a GPU
# yet: each is below the time of a whole run, and several times what the pieces of the group are expected to take.
LIMITS = {
    "ids": 120.0,
    "waits": 120.0,
    "graphs": 180.0,
    "loss": 120.0,
    "tests": 300.0,
    "bandwidth": 120.0,
    "damping": 180.0,
    "generate": 300.0,
    "forwards": 120.0,
    "training": 180.0,
}


@dataclass(frozen=True)
class Piece:
    """One measurement or check.

    Attributes:
        group: name of the group, one of :data:`LIMITS`; its pieces take about equally long.
        name: unique name within its group.
        settings: the settings that its result depends on.
        work: returns the result, given the result of ``needs`` (empty if there is none).
        needs: a piece that has to run before, if any.
        is_check: whether it checks correctness.
        unfit: the reason why it cannot run on the device, empty if it can.
    """

    group: str
    name: str
    settings: Mapping[str, Any]
    work: Callable[[Result], Result]
    needs: Piece | None = None
    is_check: bool = False
    unfit: str = ""

    @property
    def key(self) -> str:
        """The key of the piece in the file."""
        return f"{self.group}: {self.name} {json.dumps(self.settings, sort_keys=True)}"


@dataclass
class Record:
    """What was found so far.

    Attributes:
        path: the file.
        header: machine and versions, which all results of a file share.
        pieces: ``{"status", "lives", "seconds", "result" or "error"}`` of each piece, by key.
        left_out: for each piece that the last run left out, by key, the reason.
    """

    path: Path
    header: dict[str, str]
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def opened(cls, path: Path, header: dict[str, str]) -> Record:
        """Reads what an earlier run has written, or returns an empty record.

        Raises:
            SettingError: the file is something else, has results of another machine or other versions, or cannot be
                written.
        """
        check_folder("the folder of --out", path.parent, [path.name])
        try:
            found = read_json(path)
            written, pieces = dict(found["header"]), {key: dict(piece) for key, piece in found["pieces"].items()}
        except FileNotFoundError:
            return cls(path, header)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SettingError(
                f"--out {path}: this is not a file of results ({error}). Move it away, or give another name."
            ) from error
        other = [
            f"{name} {written.get(name)!r}, now {now!r}" for name, now in header.items() if written.get(name) != now
        ]
        if other:
            raise SettingError(
                f"--out {path} has results of another machine or other versions ({'; '.join(other)}), which cannot be "
                "compared with new ones. Give another name, or move the file away."
            )
        return cls(path, header, pieces)

    def status(self, piece: Piece) -> str:
        """``ok``, ``failed``, ``cut`` by its limit, ``begun`` by a process that ended, or empty."""
        return str(self.pieces.get(piece.key, {}).get("status", ""))

    def result(self, piece: Piece) -> Result | None:
        """The result of a piece, ``None`` if there is none."""
        return self.pieces.get(piece.key, {}).get("result")

    def usual_seconds(self, group: str) -> float:
        """The longest time that a piece of the group took, 0 if none is known."""
        known = [float(found.get("seconds", 0.0)) for key, found in self.pieces.items() if key.startswith(f"{group}: ")]
        return max(known, default=0.0)

    def forget_failures(self) -> None:
        """Drops pieces without a result or with only a part of it, so that they run again."""
        self.pieces = {
            key: found
            for key, found in self.pieces.items()
            if found.get("status") == "ok" and not found["result"].get("errors")
        }

    def begin(self, piece: Piece) -> bool:
        """Records that a piece starts; returns false (and a failure) if processes have died in it too often."""
        lives = int(self.pieces.get(piece.key, {}).get("lives", _LIVES))
        if lives < 1:
            self.fail(piece, 0.0, f"the process ended {_LIVES} times while this ran", "")
            return False
        self.pieces[piece.key] = {"status": "begun", "lives": lives - 1}
        self.save()
        return True

    def withdraw(self, piece: Piece) -> None:
        """Removes a piece that was started."""
        self.pieces.pop(piece.key, None)
        self.save()

    def finish(self, piece: Piece, seconds: float, result: Result) -> None:
        """Records a result."""
        self.pieces[piece.key] = {"status": "ok", "seconds": seconds, "result": result}
        self.save()

    def fail(self, piece: Piece, seconds: float, error: str, where: str, status: str = "failed") -> None:
        """Records what was raised, and where."""
        self.pieces[piece.key] = {"status": status, "seconds": seconds, "error": error, "where": where}
        self.save()

    def save(self) -> None:
        """Writes the file."""
        content = {"header": self.header, "pieces": self.pieces, "left_out": self.left_out}
        with reported(self.path), written_whole(self.path) as beside:
            beside.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
