"""``hf-selfspec fit``: a command for each fit, with its settings and transformers' ``TrainingArguments`` as options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

import typer

from . import commands

if TYPE_CHECKING:
    from ..train.fit import Fit

# Shorter names of options, by what they set.
_SHORT = {"do_sample": "--sample", "num_heads": "--heads"}
_OF_TRAINING = {"--batch": ("per_device_train_batch_size", int), "--epochs": ("num_train_epochs", float)}
# What the config of every causal LM has, by these names or by those that it maps to them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def parser_of(name: str, settings_class: type[Fit[Any]]) -> Any:
    """The options of a command: the model and the text, the fit's settings, and what its ``Trainer`` takes."""
    import torch
    from transformers import HfArgumentParser, TrainingArguments

    from .. import SettingError
    from ..train.adapter import AdapterFit
    from ..train.fit import usual_arguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise SettingError(f"{message}. See `{self.prog} --help`.")

    hints, options = get_type_hints(settings_class), argparse.ArgumentParser(add_help=False)
    options.add_argument("--model", required=True, help=commands.MODEL)
    options.add_argument("--data", required="prompts" not in hints, help=commands.DATA)
    options.add_argument("--out", required=True, help="Folder for the fitted module.")
    options.add_argument("--field", help=commands.FIELD)
    options.add_argument("--dtype", choices=commands.DTYPES, default="auto", help=commands.DTYPE)
    options.add_argument("--revision", help=commands.REVISION)
    options.add_argument("--attn-implementation", help=commands.ATTENTION)
    for setting in fields(settings_class):
        if setting.name != "output_dir" and (how := _read_as(setting.name, hints[setting.name])):
            how |= {"required": True} if setting.default is MISSING else {"default": setting.default}
            names = {f"--{setting.name.replace('_', '-')}", _SHORT.get(setting.name, f"--{setting.name}")}
            options.add_argument(*sorted(names), dest=setting.name, help="see above", **how)
    is_training = "args" in hints
    about, shared = str(settings_class.__doc__).partition("    Returns:")[0], str(AdapterFit.__doc__)
    if is_training and settings_class is not AdapterFit:  # whose documentation the others refer to
        about += shared[shared.index("        block_size:") : shared.index("        output_dir:")]
    layout = {"usage": "%(prog)s [options]", "formatter_class": argparse.RawDescriptionHelpFormatter}
    texts = {"prog": f"hf-selfspec fit {name}", "description": about, **layout}
    parser = Parser(*[TrainingArguments] * is_training, parents=[options], allow_abbrev=False, **texts)
    if not is_training:
        return parser
    for short, (sets, read) in _OF_TRAINING.items():
        parser.add_argument(short, dest=sets, type=read, default=argparse.SUPPRESS, help=sets)
    has_none = torch.accelerator.current_accelerator() is None
    parser.set_defaults(output_dir="", use_cpu=has_none, **usual_arguments())
    return parser


def _read_as(name: str, hint: Any) -> dict[str, Any]:
    """How the command line reads a setting of that type, not at all where that is empty."""
    if name == "prompts":  # a file
        return {"type": str}
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


def fit(context: typer.Context) -> None:
    """Fit a small module to a frozen model."""
    from .. import SettingError

    classes = fits()
    name, *words = context.args or [""]
    if name == "--help":
        print("usage: hf-selfspec fit COMMAND [options]\n")
        for command, settings_class in classes.items():
            print(f"  {command:<10} {str(settings_class.__doc__).splitlines()[0]}")
        print("\nhf-selfspec fit COMMAND --help shows the options.")
    elif name not in classes:
        mistake = f"No such command {name!r}" if name else "Missing command"
        raise SettingError(f"{mistake}. See `hf-selfspec fit --help`.")
    else:
        _fit(name, classes[name], words)


def fits() -> dict[str, type[Fit[Any]]]:
    """The settings of all fits, by the names of their commands."""
    import hf_selfspec

    functions = [getattr(hf_selfspec, name) for name in hf_selfspec.__all__ if name.startswith("fit_")]
    return {vars(function)["fit_class"].command: vars(function)["fit_class"] for function in functions}


def _fit(name: str, settings_class: type[Fit[Any]], words: list[str]) -> None:
    """Checks everything, loads the model and fits; mistakes are found before weights are loaded where possible."""
    import torch

    from .. import SettingError
    from ..learned.files import check_folder
    from ..modules.draft_module import FILES
    from ..train.loading import NamedModel
    from ..train.mtp import read_prompts_file
    from ..train.prompts import texts

    try:
        parser = parser_of(name, settings_class)
        *training, options = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    except SystemExit as end:  # of --help
        raise typer.Exit(int(end.code or 0)) from end
    except (ValueError, ImportError) as error:  # of TrainingArguments
        raise SettingError(str(error)) from error
    for args in training:
        args.output_dir = args.output_dir or options.out
    names = [setting.name for setting in fields(settings_class) if hasattr(options, setting.name)]
    chosen = {name: getattr(options, name) for name in names} | dict(zip(["args"], training, strict=False))
    if chosen.get("prompts") is not None:
        chosen["prompts"] = read_prompts_file(options.prompts)
    settings: Any = settings_class(**chosen, output_dir=options.out)
    settings.check()
    check_folder("--out", options.out, FILES)
    dataset = [] if options.data is None else texts(options.data, options.field)
    device = next((args.device for args in training), torch.device("cpu"))
    weights = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}
    named = NamedModel(options.model, device, options.revision, **weights)
    config = named.config.get_text_config(decoder=True)
    if all(isinstance(getattr(config, size, None), int) for size in _SIZES):  # otherwise loading it raises
        settings.check_config(config)
    text = settings.read(named.tokenizer(), dataset)
    module = settings.fit(named.model(), text)
    for about, value in {**module.about["recipe"], **module.about["figures"]}.items():
        print(f"{about:<32} {value}")
    print(f"{module.kind} of {module.num_parameters:,} parameters in {options.out}")
