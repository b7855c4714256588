"""``hf-selfspec fit``: one command for each fit of the package, made of its settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

import hf_selfspec

from . import options

if TYPE_CHECKING:
    from ..train.fit import Fit
    from ..validation import Option

# What the config of every causal LM has, by these names or by those that it maps to them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def fits() -> list[type[Fit[Any]]]:
    """The classes of the public functions that fit something."""
    functions = (getattr(hf_selfspec, name) for name in hf_selfspec.__all__ if name.startswith("fit_"))
    return [vars(function)["kind"] for function in functions]


@functools.cache
def _commands() -> dict[str, Any]:
    made = typer.Typer()
    for kind in fits():
        made.command(kind.command, help=str(kind.__doc__).split("\n")[0])(_command(kind))
    return dict(vars(typer.main.get_command(made))["commands"])


class _Fits(TyperGroup):
    """The commands of all fits. Their options are those of the package's settings, which is only imported for them."""

    @property
    def commands(self) -> dict[str, Any]:
        return _commands()

    @commands.setter
    def commands(self, given: object) -> None:
        """There are no others."""


app = typer.Typer(cls=_Fits)


@app.callback()
def fit() -> None:
    """Fit a small module to a frozen model."""


def _command(kind: type[Fit[Any]]) -> Callable[..., None]:
    """The command of a fit: an option for each of its settings that has one."""
    from ..train.fit import TrainedFit

    hints = get_type_hints(kind, include_extras=True)
    settings = {one.name: (one, option) for one in fields(kind) if (option := _option(hints[one.name]))}

    def command(
        model: options.Model,
        data: options.Data,
        out: Annotated[str, typer.Option(help="Folder for the fitted module.")],
        field: options.Field = None,
        dtype: options.Dtype = "auto",
        **given: Any,
    ) -> None:
        found = {name: _value(given.pop(name), *setting) for name, setting in settings.items()}
        if given:
            found |= _training(out, found["cache_dir"], **given)
        with _named_as({name: _name(*setting) for name, setting in settings.items()}, kind):
            _fit(kind(output_dir=out, **found), model, data, out, field, dtype)

    own = list(signature(command, eval_str=True).parameters.values())[:-1]
    if "prompts" in settings:  # in place of data
        own[1] = own[1].replace(default=None, annotation=options.OptionalData)
    if issubclass(kind, TrainedFit):
        own += list(signature(_training, eval_str=True).parameters.values())[2:]
    own += [_parameter(hints[name], *setting) for name, setting in settings.items()]
    vars(command)["__signature__"] = Signature([one.replace(kind=Parameter.KEYWORD_ONLY) for one in own])
    command.__annotations__ = {one.name: one.annotation for one in own}
    return command


def _option(hint: Any) -> Option | None:
    from ..validation import Option

    return next((one for one in get_args(hint)[1:] if isinstance(one, Option)), None)


def _name(field: Field[Any], option: Option) -> str:
    return f"--{option.name or field.name.replace('_', '-')}"


def _parameter(hint: Any, field: Field[Any], option: Option) -> Parameter:
    default: Any = Parameter.empty if field.default is MISSING else field.default
    kind = get_args(hint)[0]
    if option.parse is not None:
        kind, default = str | None, ",".join(default) if isinstance(default, tuple) else default
    hint = Annotated[kind, typer.Option(_name(field, option), help=option.help)]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _value(value: Any, field: Field[Any], option: Option) -> Any:
    from .. import SettingError

    if option.parse is None or value is None:
        return value
    try:
        return option.parse(value)
    except ValueError as error:
        raise SettingError(
            f"{_name(field, option)} {value}: give whole numbers separated by commas, e.g. 3,6,12."
        ) from error


def _training(
    out: str,
    cache_dir: str | None,
    batch: Annotated[int, typer.Option(help="Rows in a step, on each device.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 1e-3,
    epochs: Annotated[float, typer.Option(help="Passes over the text.")] = 1.0,
    cache_gib: Annotated[float | None, typer.Option(help="The most that the cache may hold, in GiB.")] = None,
) -> dict[str, Any]:
    """The settings of a fit that trains, of the options that all such fits have."""
    import torch

    from .. import SettingError
    from ..learned.files import check_folder
    from ..train.fit_trainer import resumable_arguments
    from ..validation import check_count, check_positive

    check_count("--batch", batch)
    check_positive("--learning-rate", learning_rate)
    check_positive("--epochs", epochs)
    if cache_dir is not None:
        check_folder("--cache", cache_dir)
    room = None
    if cache_gib is not None:
        check_positive("--cache-gib", cache_gib)
        room = max(1, round(cache_gib * 2**30))
        if cache_dir is None:
            raise SettingError(f"--cache-gib {cache_gib} has no effect without --cache: leave it out.")
    chosen = {"per_device_train_batch_size": batch, "learning_rate": learning_rate, "num_train_epochs": epochs}
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return {"args": resumable_arguments(out, device, **chosen), "cache_bytes": room}


def _fit(settings: Fit[Any], model: str, data: str | None, out: str, field: str | None, dtype: str) -> None:
    """Checks everything, loads the model and fits; mistakes are found before weights are loaded where possible."""
    import torch

    from ..data.loading import NamedModel
    from ..data.texts import texts
    from ..learned.files import check_folder
    from ..modules.draft_module import FILES

    settings.check()
    check_folder("--out", out, FILES)
    given, named = [] if data is None else texts(data, field), NamedModel(model)
    config = named.config.get_text_config(decoder=True)
    if all(isinstance(getattr(config, size, None), int) for size in _SIZES):  # otherwise loading it raises
        settings.check_config(config)
    text = settings.read(named.tokenizer(), given)
    device = settings.args.device if hasattr(settings, "args") else torch.device("cpu")
    module = settings.fit(named.model(dtype, device), text)
    for name, value in {**module.about["recipe"], **module.about["figures"]}.items():
        print(f"{name:<32} {value}")
    print(f"{module.kind} of {module.num_parameters:,} parameters in {out}")


@contextmanager
def _named_as(names: dict[str, str], kind: type[Fit[Any]]) -> Iterator[None]:
    """Has messages name options in the place of settings: `--heads 3`, not `fit_adapter(num_heads=3)`."""
    from .. import SettingError, SettingTypeError

    def named(found: re.Match[str]) -> str:
        given = [setting.split("=") for setting in found[1].split(", ")]
        if any(name not in names for name, *_ in given):
            return found[0]
        return " ".join(" ".join([names[name], *(of for of in value if of != "True")]) for name, *value in given)

    module = get_args(kind.__orig_bases__[0])[0].__name__  # type: ignore[attr-defined]  # of a generic class
    try:
        yield
    except (SettingError, SettingTypeError) as error:
        message = re.sub(rf"(?:{kind.function}|{module})\((.*?)\)", named, str(error))
        raise type(error)(message.replace(kind.function, f"fit {kind.command}")) from error
