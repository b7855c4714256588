"""The options of the command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import SettingError
from ...files import path_of
from .shapes import SHAPES


@dataclass(frozen=True)
class Options:
    """What is run, and for how long.

    Attributes:
        device: the device, such as ``cuda``.
        out: the file of results.
        seconds: time limit; pieces that would probably end later are left out, and one that is not done is cut.
        shapes, rows: models and batch sizes that are timed.
        tokens: new tokens of a timed generation.
        repeats: timings of each way.
        dtype: data type of the timed models; checks are in float32.
        check_shape: model of the checks.
        retry: whether pieces that failed in an earlier run are run again.
    """

    device: str
    out: Path
    seconds: float
    shapes: tuple[str, ...]
    rows: tuple[int, ...]
    tokens: int
    repeats: int
    dtype: str
    check_shape: str
    retry: bool

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("repeats", 1), ("seconds", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"--{name} must be at least {least}, got {getattr(self, name)}.")
        if min(self.rows) < 1:
            raise SettingError(f"--rows are batch sizes of at least 1, got {min(self.rows)}.")

    @property
    def place(self) -> torch.device:
        """The device as a ``torch.device``."""
        return torch.device(self.device)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m hf_selfspec.bench gpu",
        description="Checks that ids and losses are plain transformers' on this device, then times random models "
        "(synthetic acceptance). Each finished piece is saved at once; the same command resumes after it.",
        allow_abbrev=False,
    )
    made.add_argument("--device", default="cuda")
    made.add_argument("--out", default="gpu.json", help="file of results, which an earlier run may have begun")
    made.add_argument("--seconds", type=float, default=540, help="time limit; what takes longer is left out")
    made.add_argument("--shapes", nargs="+", default=["1b", "7b", "13b"], choices=SHAPES, help="models that are timed")
    made.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], help="batch sizes")
    made.add_argument("--tokens", type=int, default=96, help="new tokens of a timed generation")
    made.add_argument("--repeats", type=int, default=3, help="timings of each way")
    made.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="what is timed")
    made.add_argument("--check-shape", default="100m", choices=SHAPES, help="model of the checks, in float32")
    made.add_argument("--retry", action="store_true", help="run again what failed in an earlier run")
    return made


def parsed(arguments: Sequence[str]) -> Options:
    """Parses the options.

    Raises:
        SettingError: a value is not allowed.
    """
    given = vars(parser().parse_args(arguments))
    given |= {"out": path_of(given["out"]), "shapes": tuple(given["shapes"]), "rows": tuple(given["rows"])}
    return Options(**given)
