"""``hf-selfspec``, the command line of ``hf_selfspec``.

This package has a top-level name of its own because ``import hf_selfspec`` imports torch and transformers, for which
``hf-selfspec --help`` need not wait. Each command is a file, which declares its options and imports what it needs of
``hf_selfspec`` when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from . import fit
from .audit import audit
from .bench import bench
from .exit_report import exit_report
from .generate import generate
from .inspect import inspect
from .measure import SETTINGS, measure
from .output import PROGRAM, brief_warnings, tell
from .tune import tune

__all__ = ["main"]

# Exit codes. 1 is for results that are bad news, such as an audit's.
_WRONG, _STOPPED = 2, 130
# The base of everything that is wrong with a command line; typer exports this one of its kinds alone.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    help="Generating faster with a part of the model itself.", add_completion=False, pretty_exceptions_enable=False
)
app.command()(audit)
app.command()(bench)
app.command()(exit_report)
app.command()(generate)
app.command()(inspect)
app.command(context_settings=SETTINGS)(measure)
app.command()(tune)
app.add_typer(fit.app, name="fit")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: its words, ``None`` for those of the process.

    Returns:
        0, or 1 where a result is bad news, or 2 and one line on stderr where something is wrong with what was asked
        for, or 130 after Ctrl-C.
    """
    command = typer.main.get_command(app)
    words = None if arguments is None else list(arguments)
    try:
        with brief_warnings():
            code = command.main(words, prog_name=PROGRAM, standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = _STOPPED
    except _UsageError as error:
        tell(_told(error))
        return _WRONG
    except _mistakes() as error:
        tell(error)
        return _WRONG
    if code == _STOPPED:
        tell("stopped.")
    return int(code)


def _told(error: Any) -> str:
    """What is wrong with the words of a command line, and where to read about them."""
    message = error.format_message().strip().removesuffix(".")
    where = PROGRAM if error.ctx is None else error.ctx.command_path
    return f"{message}. See `{where} --help`."


def _mistakes() -> tuple[type[Exception], ...]:
    """What a user can do something about; looked up when something was raised, which only ``hf_selfspec`` raises."""
    import torch

    from hf_selfspec import SelfSpecError

    return SelfSpecError, torch.OutOfMemoryError, MemoryError
