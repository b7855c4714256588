"""Options that several commands take, declared once, and dataclasses of options as parameters of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ..errors import SettingError
from ..validation import Option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..data.loading import NamedModel
    from ..data.prompts import Prompt

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]

ModelOption = Annotated[str, typer.Option(help="Folder of the model, or its name on the Hub.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Data type of the model's weights.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="E.g. cpu, cuda or cuda:1; by default the accelerator, if there is one.")
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Number of torch threads on the CPU.")]
DataOption = Annotated[str, typer.Option(help="A .jsonl or .txt file, or a dataset of the Hub.")]
FieldOption = Annotated[str | None, typer.Option(help="Column of the text, `text` by default.")]
PromptDataOption = Annotated[
    str,
    typer.Option(help="A .jsonl file of prompts, a .txt file with a prompt in each line, or a dataset of the Hub."),
]
PromptFieldOption = Annotated[
    str | None,
    typer.Option(
        help="Column of the prompt, a text or a chat; by default messages, prompt, text, question or instruction, the "
        "first one that is there."
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Whether a prompt is a chat message or a text to continue; by default a chat message if the model has a "
        "chat template.",
    ),
]
PromptsOption = Annotated[int, typer.Option(min=1, help="The number of texts to take, from the beginning of the data.")]
MaxNewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")]
MaxPromptTokensOption = Annotated[
    int, typer.Option(min=1, help="The most tokens of a prompt; the rest is cut off, except of chats.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
SpecOption = Annotated[
    str,
    typer.Option(
        help="selfspec, lookup, layerskip, swift or adaspeed; a folder that was saved or fitted; or an expression such "
        'as "SelfSpec.layerskip(8)".'
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="As generate's --spec; several separated by commas or by repeating the option; selfspec by default."
    ),
]


@dataclass(frozen=True)
class TextOptions:
    """Which texts."""

    data: DataOption
    field: FieldOption = None
    prompts: PromptsOption = 8

    def read(self) -> list[str]:
        """Reads the first texts, at most as many as wanted."""
        from ..data.texts import texts

        return texts(self.data, self.field)[: self.prompts]


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts."""

    data: PromptDataOption
    field: PromptFieldOption = None
    prompts: PromptsOption = 8

    def read(self) -> list[Prompt]:
        """Reads the first texts and chats, at most as many as wanted."""
        from ..data.texts import read_prompts

        return read_prompts(self.data, self.field)[: self.prompts]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: ModelOption
    dtype: DtypeOption = "auto"
    device: DeviceOption = None
    threads: ThreadsOption = None

    def find(self) -> NamedModel:
        """Checks all options and the config; nothing else of the model is loaded yet."""
        from ..data.loading import NamedModel, set_up

        set_up(self.device, self.threads)
        named = NamedModel.find(self.model)
        named.config()
        return named

    def load(self, named: NamedModel) -> PreTrainedModel:
        """Loads the model that :meth:`find` has found."""
        from ..data.loading import device_named

        return named.model(self.dtype, device_named(self.device))


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter of a command that is a dataclass by one option for each of its fields."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)}
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        options += options_of(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]

    def flat(**given: Any) -> None:
        made = {name: group(**values_of(group, given)) for name, group in groups.items()}
        command(**made, **given)

    flat.__doc__, flat.__name__ = command.__doc__, command.__name__
    vars(flat)["__signature__"] = inspect.Signature(options)
    flat.__annotations__ = {option.name: option.annotation for option in options}
    return flat


def options_of(group: Any) -> list[inspect.Parameter]:
    """The options of a dataclass: its fields with a ``typer.Option`` or an :class:`Option`."""
    return [_parameter(field, hint) for field, hint in _fields(group)]


def values_of(group: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Takes out of what was given the options of a dataclass, as its fields have them."""
    return {field.name: _value(given.pop(field.name), field, setting_of(hint)) for field, hint in _fields(group)}


def setting_of(hint: Any) -> Option | None:
    """The :class:`Option` of an annotation."""
    return next((one for one in get_args(hint)[1:] if isinstance(one, Option)), None)


def option_name(field: Field[Any], setting: Option) -> str:
    """What the command line calls a setting."""
    return f"--{setting.name or field.name.replace('_', '-')}"


def _fields(group: Any) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(group, include_extras=True)
    return [(field, hints[field.name]) for field in fields(group) if get_origin(hints[field.name]) is Annotated]


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    if (setting := setting_of(hint)) is not None:
        kind = get_args(hint)[0]
        if setting.parse is not None:
            kind, default = str | None, ",".join(default) if isinstance(default, tuple) else default
        elif get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]  # of what it repeats
        hint = Annotated[kind, typer.Option(option_name(field, setting), help=setting.help)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _value(value: Any, field: Field[Any], setting: Option | None) -> Any:
    if setting is None or setting.parse is None or value is None:
        return tuple(value) if isinstance(value, list) and setting is not None else value
    try:
        return setting.parse(value)
    except ValueError as error:
        option = option_name(field, setting)
        raise SettingError(f"{option} {value}: give whole numbers separated by commas, e.g. 3,6,12.") from error
