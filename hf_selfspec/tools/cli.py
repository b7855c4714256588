"""``hf-selfspec``, the command line of ``hf_selfspec``: one parser for all commands.

A command imports what it needs of the package when it runs, so that ``--help`` need not wait for torch and
transformers. Only the options of fits are known once the package is imported: they are the settings of the fits and
transformers' ``TrainingArguments``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from . import commands

if TYPE_CHECKING:
    from ..train.fit import Fit

__all__ = ["main"]

PROGRAM = "hf-selfspec"
# Exit codes. 1 is for a bad result, such as that of a failed audit.
_MISTAKE, _STOPPED = 2, 130
# What the config of every causal LM has, by these names or by those that it maps to them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


class _UsageError(Exception):
    """Words that the parser does not take."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message.rstrip('.')}. See `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line: 0, 1 for a bad result, 2 (with a line on stderr) for a user error, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings.catch_warnings():
            # Without the lines of code that they come from.
            warnings.showwarning = lambda message, *_, **__: _print_error(message)
            args, rest = parser_of(words).parse_known_args(words)
            if rest:
                raise _UsageError(f"unrecognized arguments: {' '.join(rest)}. See `{PROGRAM} {args.command} --help`.")
            return int(args.run(args) or 0)
    except SystemExit as end:  # of --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        _print_error("stopped.")
        return _STOPPED
    except _UsageError as error:
        _print_error(error)
    except _mistakes() as error:
        _print_error(error)
    return _MISTAKE


def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; those that fit have their options if the first word is ``fit``."""
    parser = _Parser(prog=PROGRAM, description="Generate faster with drafts from the model itself.", allow_abbrev=False)
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (run, options) in commands.COMMANDS.items():
        about = str(run.__doc__)
        command = subparsers.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.set_defaults(run=run)
        for names, how in options:
            command.add_argument(*names, **how)
    about = "Fit a small module to a frozen model."
    fit = subparsers.add_parser("fit", help=about, description=about, allow_abbrev=False)
    if words[:1] == ["fit"]:
        _add_fits(fit)
    return parser


def _add_fits(parser: argparse.ArgumentParser) -> None:
    """Adds a command for each fit: the model and the text, its settings, and what its ``Trainer`` takes."""
    import torch
    from transformers import HfArgumentParser, TrainingArguments

    from ..train.fit import USUAL_ARGUMENTS

    class FitParser(_Parser, HfArgumentParser): ...

    subparsers = parser.add_subparsers(metavar="FIT", dest="kind", required=True, parser_class=FitParser)
    for name, fit_class in fits().items():
        about, hints = str(fit_class.__doc__), get_type_hints(fit_class)
        trained = [TrainingArguments] if "args" in hints else []
        layout = {"usage": "%(prog)s [options]", "formatter_class": argparse.RawDescriptionHelpFormatter}
        texts: Any = {"help": about.splitlines()[0], "description": about.replace("%", "%%"), **layout}
        command = subparsers.add_parser(name, dataclass_types=trained, allow_abbrev=False, **texts)
        for names, how in commands.OF_FITS:
            command.add_argument(*names, **how)
        for setting in fields(fit_class):
            if setting.name != "output_dir" and (how := _read_as(hints[setting.name])):
                how |= {"required": True} if setting.default is MISSING else {"default": setting.default}
                command.add_argument(f"--{setting.name.replace('_', '-')}", help="see above", **how)
        if trained:
            is_on_cpu = torch.accelerator.current_accelerator() is None
            command.set_defaults(output_dir="", use_cpu=is_on_cpu, **USUAL_ARGUMENTS)
        command.set_defaults(run=fit, fit_class=fit_class)


def _read_as(hint: Any) -> dict[str, Any]:
    """How the command line reads a setting of that type, not at all where that is empty."""
    if hint is bool:
        return {"action": "store_true"}
    for item in (int, float, str):
        if hint in (Sequence[item], Sequence[item] | None):  # type: ignore[valid-type]  # a variable as a type
            return {"type": _list_of(item)}
        if item in (hint, *get_args(hint)):
            return {"type": item}
    return {}


def _list_of(item_type: type) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        return [item_type(item.strip()) for item in text.split(",") if item.strip()]

    read.__name__ = f"list of {item_type.__name__}, separated by commas,"  # which messages name
    return read


def fits() -> dict[str, type[Fit[Any]]]:
    """The settings of all fits, by the names of their commands."""
    import hf_selfspec

    functions = [getattr(hf_selfspec, name) for name in hf_selfspec.__all__ if name.startswith("fit_")]
    return {vars(function)["fit_class"].command: vars(function)["fit_class"] for function in functions}


def fit(args: argparse.Namespace) -> None:
    """Checks everything, loads the model and fits; mistakes are found before weights are loaded where possible."""
    import torch
    from transformers import TrainingArguments

    from .. import SettingError
    from ..learned.files import check_folder
    from ..train.loading import NamedModel, texts

    names = {setting.name for setting in fields(args.fit_class)}
    chosen = {name: value for name, value in vars(args).items() if name in names}
    device = torch.device("cpu")
    if "args" in names:
        given = {setting.name: getattr(args, setting.name) for setting in fields(TrainingArguments) if setting.init}
        try:
            training = TrainingArguments(**given | {"output_dir": args.output_dir or args.out})
        except (ValueError, ImportError) as error:
            raise SettingError(str(error)) from error
        chosen["args"], device = training, training.device
    settings = args.fit_class(**chosen | {"output_dir": args.out})
    settings.check()
    check_folder("--out", args.out)
    dataset = texts(args.data, args.field, or_ids=True)
    weights = {"dtype": args.dtype, "attn_implementation": args.attn_implementation}
    named = NamedModel(args.model, device, args.revision, **weights)
    config = named.config.get_text_config(decoder=True)
    if all(isinstance(getattr(config, size, None), int) for size in _SIZES):  # otherwise loading it raises
        settings.check_config(config)
    text = settings.read(named.tokenizer(), dataset)
    module = settings.fit(named.model(), text)
    for about, value in {**module.about["recipe"], **module.about["figures"]}.items():
        print(f"{about:<32} {value}")
    print(f"{module.kind} of {module.num_parameters:,} parameters in {args.out}")


def _mistakes() -> tuple[type[Exception], ...]:
    """Errors that a user can correct; only imported after an exception, since ``hf_selfspec`` imports torch."""
    import torch

    from .. import SelfSpecError

    return SelfSpecError, torch.OutOfMemoryError, MemoryError


def _print_error(message: object) -> None:
    """Prints a message as one line on stderr."""
    print(f"{PROGRAM}: {' '.join(str(message).split())}", file=sys.stderr)
