"""``hf-selfspec fit``: one command for each fit of the package, made of its settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@functools.cache
def _commands() -> dict[str, Any]:
    made = typer.Typer()
    for name in hf_selfspec.__all__:
        if name.startswith("fit_"):
            kind = vars(getattr(hf_selfspec, name))["kind"]
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
    from ..validation import Option

    hints, parameters = get_type_hints(kind, include_extras=True), signature(kind).parameters
    settings = {name: one for name in parameters for one in get_args(hints[name])[1:] if isinstance(one, Option)}
    names = {name: f"--{option.name or name.replace('_', '-')}" for name, option in settings.items()}

    def command(
        model: options.Model,
        data: options.Data,
        out: Annotated[str, typer.Option(help="Folder for the fitted module.")],
        field: options.Field = None,
        dtype: options.Dtype = "auto",
        **given: Any,
    ) -> None:
        found = {name: _value(names[name], given.pop(name), option) for name, option in settings.items()}
        if given:
            found |= _training(out, found["cache_dir"], **given)
        with _named_as(names, kind):
            _fit(kind(output_dir=out, **found), model, data, out, field, dtype)

    own = list(signature(command, eval_str=True).parameters.values())[:-1]
    if "prompts" in settings:  # in place of data
        own[1] = own[1].replace(default=None, annotation=options.OptionalData)
    if issubclass(kind, TrainedFit):
        own += list(signature(_training, eval_str=True).parameters.values())[2:]
    own += [_parameter(names[name], parameters[name], hints[name], option) for name, option in settings.items()]
    vars(command)["__signature__"] = Signature([one.replace(kind=Parameter.KEYWORD_ONLY) for one in own])
    command.__annotations__ = {one.name: one.annotation for one in own}
    return command


def _parameter(name: str, setting: Parameter, hint: Any, option: Option) -> Parameter:
    kind, default = get_args(hint)[0], setting.default
    if option.parse is not None:
        kind, default = str | None, ",".join(default) if isinstance(default, tuple) else default
    return setting.replace(default=default, annotation=Annotated[kind, typer.Option(name, help=option.help)])


def _value(name: str, value: Any, option: Option) -> Any:
    from .. import SettingError

    if option.parse is None or value is None:
        return value
    try:
        return option.parse(value)
    except ValueError as error:
        raise SettingError(f"{name} {value}: give whole numbers separated by commas, e.g. 3,6,12.") from error


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
