"""The command: runs what the file does not have yet, as far as time permits."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from ... import __version__
from ...errors import SelfSpecError, SettingError, brief
from ..measure import machine
from .checks import check_pieces
from .options import Options, parsed, parser
from .record import LIMITS, Piece, Record
from .report import report
from .speed import speed_pieces

# Characters of a traceback that are kept.
_TRACEBACK = 4000


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 1 if a check failed, 2 for options that are not allowed."""
    try:
        return _serve(arguments)
    except SelfSpecError as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2


def _serve(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    _check_device(options)
    header = {"machine": machine(options.place), "package": f"hf_selfspec {__version__}"}
    record = Record.opened(options.out, header)
    if options.retry:
        record.forget_failures()
    pieces = [*check_pieces(options), *speed_pieces(options)]
    begun = perf_counter()
    if not _run(pieces, record, options):
        _go_on_in_a_new_process(arguments, max(options.seconds - (perf_counter() - begun), 0.0))
    print(f"\n{report(record, pieces)}")
    return int(any(piece.is_check and record.status(piece) == "failed" for piece in pieces))


def _check_device(options: Options) -> None:
    try:
        torch.tensor(1, device=options.place)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"--device {options.device}: torch cannot use it here ({brief(error)}). Use --device cpu --shapes tiny "
            "--check-shape tiny to try the command without an accelerator."
        ) from error
    if options.place.index:
        raise SettingError(
            f"--device {options.device}: Trainer and the tests use the first device that they see. Make this one the "
            f"first: CUDA_VISIBLE_DEVICES={options.place.index} and --device {options.place.type}."
        )


def _run(pieces: Sequence[Piece], record: Record, options: Options) -> bool:
    """Runs pieces in turn; returns false if this process can no longer use the device."""
    begun = perf_counter()
    record.left_out = {}
    for piece in pieces:
        if record.status(piece) in ("ok", "failed", "cut"):
            continue
        left = options.seconds - (perf_counter() - begun)
        why = _why_not(piece, record, left)
        if why:
            record.left_out[piece.key] = why
            continue
        _run_one(piece, record, left)
        if not _is_usable(options.place):
            return False
    record.save()
    return True


def _why_not(piece: Piece, record: Record, left: float) -> str:
    """Why a piece is not run, empty if it is."""
    if piece.unfit:
        return piece.unfit
    if piece.needs is not None and record.result(piece.needs) is None:
        return f"it needs the result of {piece.needs.group}: {piece.needs.name}"
    usual = record.usual_seconds(piece.group)
    if left <= usual:
        return f"{max(left, 0):.0f} s are left, but such a piece took {usual:.0f} s"
    return ""


class _TimeIsOver(BaseException):
    """Nothing but this command handles it."""


@contextmanager
def _cut_after(seconds: float) -> Iterator[None]:
    """Raises where the block is at that time."""

    def cut(*_: Any) -> None:
        raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, cut)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run_one(piece: Piece, record: Record, left: float) -> None:
    """Runs a piece for as long as its limit and the run's allow, and keeps its result, or what it raised."""
    if not record.begin(piece):
        return
    needed = {} if piece.needs is None else record.result(piece.needs)
    limit, begun = LIMITS[piece.group], perf_counter()
    try:
        with _cut_after(min(limit, left)):
            result = piece.work(needed or {})
        record.finish(piece, perf_counter() - begun, result)
    except _TimeIsOver:
        if limit <= left:
            record.fail(piece, limit, f"it is not done after {limit:.0f} s, the limit of {piece.group}", "", "cut")
        else:
            record.withdraw(piece)
            record.left_out[piece.key] = f"it was not done when the time was over, after {left:.0f} s"
    except Exception as error:  # whatever it is, it is recorded, and the other pieces are still useful
        record.fail(piece, perf_counter() - begun, brief(error), traceback.format_exc()[-_TRACEBACK:])
    except BaseException:  # the user stopped the run, so the piece has not failed
        record.withdraw(piece)
        raise
    status = record.status(piece) or "cut"
    print(f"{perf_counter() - begun:7.1f} s  {status:<6}  {piece.group}: {piece.name}", flush=True)
    _free()


def _free() -> None:
    """Frees the memory of models and graphs."""
    if torch.cuda.is_available():
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_usable(device: torch.device) -> bool:
    """Whether the device still works: after some errors of CUDA nothing does in the same process."""
    try:
        return bool(torch.tensor(1, device=device).item() == 1)
    except RuntimeError:
        return False


def _go_on_in_a_new_process(arguments: Sequence[str], seconds: float) -> None:
    """Replaces this process by one that resumes after what has failed."""
    again = [argument for argument in arguments if argument != "--retry"]
    print("this process can no longer use the device; a new one resumes", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "hf_selfspec.bench", "gpu", *again, "--seconds", f"{seconds:.0f}"])
