"""``hf-selfspec audit``: whether the output is exact with a model, a dtype and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .options import (
    ChatOption,
    MaxNewTokensOption,
    MaxPromptTokensOption,
    MethodsOption,
    ModelOptions,
    PromptOptions,
    SeedOption,
    takes_options,
)

if TYPE_CHECKING:
    from .. import SampleTest


@takes_options
def audit(
    model: ModelOptions,
    data: PromptOptions,
    chat: ChatOption = None,
    methods: MethodsOption = None,
    max_new_tokens: MaxNewTokensOption = 64,
    max_prompt_tokens: MaxPromptTokensOption = 512,
    sample: Annotated[
        bool, typer.Option("--sample", help="Test the distribution of the first sampled tokens, on short prompts.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling, 1.0 by default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Top-p of sampling.")] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Samples for each prompt, 1000 by default.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Compare texts with those of plain generate; exit with 1 if a difference is not a near tie."""
    import torch

    from .. import audit
    from ..data.prompts import as_prompts
    from .spec_text import read_spec, split

    test = _test(sample, {"temperature": temperature, "top_p": top_p, "draws": draws})
    names = split(methods or ["selfspec"])
    specs = [read_spec(name, "--methods") for name in names]
    given, named = data.read(), model.find()
    tokenizer = named.tokenizer()
    prompts = as_prompts(tokenizer, given, chat)
    network = model.load(named)
    torch.manual_seed(seed)
    all_passed = True
    for name, spec in zip(names, specs, strict=True):
        with _progress(f"audit of {name}", len(prompts)) as advance:
            found = audit(
                network,
                tokenizer,
                prompts,
                spec,
                max_new_tokens=max_new_tokens,
                max_prompt_tokens=max_prompt_tokens,
                sample=test,
                name=name,
                after_prompt=advance,
            )
        print(f"{found}\n")
        all_passed &= found.passed
    if not all_passed:
        raise typer.Exit(1)


def _test(sample: bool, settings: dict[str, Any]) -> SampleTest | None:
    from .. import SampleTest, SettingError

    given = {name: value for name, value in settings.items() if value is not None}
    if sample:
        return SampleTest(**given)
    for name, value in given.items():
        option = name.replace("_", "-")
        raise SettingError(f"--{option} {value} has no effect without --sample: add that, or leave it out.")
    return None


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows a bar with the time left on stderr, if that is a terminal; yields a function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
