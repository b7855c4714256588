"""Options that several commands take, declared once, and dataclasses of options as parameters of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

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
        options += _options(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    vars(flat).pop("__wrapped__")  # otherwise its signature would be used
    vars(flat)["__signature__"] = inspect.Signature(options)
    flat.__annotations__ = {option.name: option.annotation for option in options}
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
