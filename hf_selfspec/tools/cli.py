"""``hf-selfspec``, the command line of ``hf_selfspec``.

A command imports what it needs of the package when it runs, so that ``--help`` need not wait for torch and
transformers.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from .commands import audit, bench, exit_report, generate, inspect, tune
from .fit_command import fit

__all__ = ["main"]

PROGRAM = "hf-selfspec"

# Exit codes. 1 is for a bad result, such as that of a failed audit.
_MISTAKE, _STOPPED = 2, 130
# The base class of all errors in a command line, of which typer exports only some subclasses.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    help="Generate faster with drafts from the model itself.", add_completion=False, pretty_exceptions_enable=False
)
for _command in (audit, bench, exit_report, generate, inspect, tune):
    app.command()(_command)
# Its options are only known once the package is imported.
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(fit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line: 0, 1 for a bad result, 2 (with a line on stderr) for a user error, 130 after Ctrl-C."""
    command = typer.main.get_command(app)
    try:
        with warnings.catch_warnings():
            # Without the lines of code that they come from.
            warnings.showwarning = lambda message, *_, **__: _print_error(message)
            code = command.main(arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = _STOPPED
    except _UsageError as error:
        where = PROGRAM if error.ctx is None else error.ctx.command_path
        _print_error(f"{error.format_message().strip().removesuffix('.')}. See `{where} --help`.")
        return _MISTAKE
    except _mistakes() as error:
        _print_error(error)
        return _MISTAKE
    if code == _STOPPED:
        _print_error("stopped.")
    return int(code)


def _mistakes() -> tuple[type[Exception], ...]:
    """Errors that a user can correct; only imported after an exception, since ``hf_selfspec`` imports torch."""
    import torch

    from .. import SelfSpecError

    return SelfSpecError, torch.OutOfMemoryError, MemoryError


def _print_error(message: object) -> None:
    """Prints a message as one line on stderr."""
    print(f"{PROGRAM}: {' '.join(str(message).split())}", file=sys.stderr)
