"""``hf-selfspec fit``: one command for each fit of the package, made of its settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import Signature
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from .options import (
    DataOption,
    DtypeOption,
    FieldOption,
    ModelOption,
    option_name,
    options_of,
    setting_of,
    values_of,
)

if TYPE_CHECKING:
    from ..train.fit import Fit

# What the config of every causal LM has, by these names or by those that it maps to them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@functools.cache
def _commands() -> dict[str, Any]:
    from ..train import FITS

    made = typer.Typer()
    for kind in FITS:
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


@dataclass(frozen=True)
class FitOptions:
    """The options of every fit, besides its settings."""

    model: ModelOption
    data: DataOption
    out: Annotated[str, typer.Option(help="Folder for the fitted module.")]
    field: FieldOption = None
    dtype: DtypeOption = "auto"


@dataclass(frozen=True)
class TrainingOptions:
    """The options of every fit that trains, besides its settings."""

    batch: Annotated[int, typer.Option(help="Rows in a step, on each device.")] = 8
    learning_rate: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 1e-3
    epochs: Annotated[float, typer.Option(help="Passes over the text.")] = 1.0
    cache_gib: Annotated[float | None, typer.Option(help="The most that the cache may hold, in GiB.")] = None

    def settings(self, out: str, cache_dir: str | None) -> dict[str, Any]:
        """The settings that these options stand for.

        Raises:
            SettingError: one is not allowed.
        """
        import torch

        from .. import SettingError
        from ..learned.files import check_folder
        from ..train.fit_trainer import resumable_arguments
        from ..validation import check_count, check_positive

        check_count("--batch", self.batch)
        check_positive("--learning-rate", self.learning_rate)
        check_positive("--epochs", self.epochs)
        if cache_dir is not None:
            check_folder("--cache", cache_dir)
        room = None
        if self.cache_gib is not None:
            check_positive("--cache-gib", self.cache_gib)
            room = max(1, round(self.cache_gib * 2**30))
            if cache_dir is None:
                raise SettingError(f"--cache-gib {self.cache_gib} has no effect without --cache: leave it out.")
        chosen = {"per_device_train_batch_size": self.batch, "learning_rate": self.learning_rate}
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        args = resumable_arguments(out, device, num_train_epochs=self.epochs, **chosen)
        return {"args": args, "cache_bytes": room}


def _command(kind: type[Fit[Any]]) -> Callable[..., None]:
    """The command of a fit: an option for each of its settings that has one."""
    from ..train.fit import TrainedFit

    trains = issubclass(kind, TrainedFit)
    hints = get_type_hints(kind, include_extras=True)
    names = {one.name: option_name(one, option) for one in fields(kind) if (option := setting_of(hints[one.name]))}

    def command(**given: Any) -> None:
        common = FitOptions(**values_of(FitOptions, given))
        training = TrainingOptions(**values_of(TrainingOptions, given)) if trains else None
        settings = values_of(kind, given)
        if training is not None:
            settings |= training.settings(common.out, settings["cache_dir"])
        with _named_as(names, kind):
            _fit(kind(output_dir=common.out, **settings), common)

    groups = (FitOptions, TrainingOptions, kind) if trains else (FitOptions, kind)
    options = [one for group in groups for one in options_of(group)]
    vars(command)["__signature__"] = Signature(options)
    command.__annotations__ = {one.name: one.annotation for one in options}
    return command


def _fit(settings: Fit[Any], common: FitOptions) -> None:
    """Checks everything, loads the model and fits; mistakes are found before weights are loaded where possible."""
    import torch

    from ..data.loading import NamedModel
    from ..data.texts import texts
    from ..learned.files import check_folder
    from ..modules.draft_module import FILES

    settings.check()
    check_folder("--out", common.out, FILES)
    data = texts(common.data, common.field)
    named = NamedModel.find(common.model)
    config = named.config().get_text_config(decoder=True)
    if all(isinstance(getattr(config, size, None), int) for size in _SIZES):  # otherwise loading it raises
        settings.check_config(config)
    text = settings.read(named.tokenizer(), data)
    device = settings.args.device if hasattr(settings, "args") else torch.device("cpu")
    module = settings.fit(named.model(common.dtype, device), text)
    for name, value in {**module.about["recipe"], **module.about["figures"]}.items():
        print(f"{name:<32} {value}")
    print(f"{module.kind} of {module.num_parameters:,} parameters in {common.out}")


@contextmanager
def _named_as(options: dict[str, str], kind: type[Fit[Any]]) -> Iterator[None]:
    """Has messages name options in the place of settings: `--heads 3`, not `fit_adapter(num_heads=3)`."""
    from .. import SettingError, SettingTypeError

    def named(found: re.Match[str]) -> str:
        given = [setting.split("=") for setting in found[1].split(", ")]
        if any(name not in options for name, *_ in given):
            return found[0]
        return " ".join(" ".join([options[name], *(of for of in value if of != "True")]) for name, *value in given)

    module = get_args(kind.__orig_bases__[0])[0].__name__  # type: ignore[attr-defined]  # of a generic class
    try:
        yield
    except (SettingError, SettingTypeError) as error:
        message = re.sub(rf"(?:{kind.function}|{module})\((.*?)\)", named, str(error))
        raise type(error)(message.replace(kind.function, f"fit {kind.command}")) from error
