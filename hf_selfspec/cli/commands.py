"""The commands that wrap one function of the package each: ``audit``, ``exit-report``, ``inspect`` and ``tune``."""

from typing import Annotated, Any

import typer

from . import options


def audit(
    model: options.Model,
    data: Annotated[str, typer.Option(help=f"{options.PROMPT_DATA}.")],
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    field: options.PromptField = None,
    prompts: options.Prompts = 8,
    chat: options.Chat = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="As generate's --spec; several separated by commas or by repeating the option; selfspec by default."
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    max_prompt_tokens: options.MaxPromptTokens = 512,
    sample: Annotated[
        bool, typer.Option("--sample", help="Test the distribution of the first sampled tokens, on short prompts.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling, 1.0 by default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Top-p of sampling.")] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Samples for each prompt, 1000 by default.")] = None,
    seed: options.Seed = 0,
) -> None:
    """Compare texts with those of plain generate; exit with 1 if a difference is not a near tie."""
    import torch
    from transformers.utils import logging

    from .. import SampleTest, SettingError, audit
    from ..data.loading import NamedModel, set_up
    from ..data.prompts import as_prompts
    from ..data.texts import read_prompts
    from .spec_text import read_spec, split

    given = {"temperature": temperature, "top_p": top_p, "draws": draws}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if settings and not sample:
        which = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        raise SettingError(f"{which} has no effect without --sample: add that, or leave it out.")
    test = SampleTest(**settings) if sample else None
    specs = {name: read_spec(name, "--methods") for name in split(methods or ["selfspec"])}
    texts, place, named = read_prompts(data, field)[:prompts], set_up(device, threads), NamedModel(model)
    tokenizer = named.tokenizer()
    asked = as_prompts(tokenizer, texts, chat)
    network = named.model(dtype, place)
    torch.manual_seed(seed)
    all_passed = True
    for name, spec in specs.items():
        with logging.tqdm(total=len(asked), desc=f"audit of {name}", leave=False) as bar:
            found = audit(
                network,
                tokenizer,
                asked,
                spec,
                max_new_tokens=max_new_tokens,
                max_prompt_tokens=max_prompt_tokens,
                sample=test,
                name=name,
                after_prompt=bar.update,
            )
        print(f"{found}\n")
        all_passed &= found.passed
    if not all_passed:
        raise typer.Exit(1)


def exit_report(
    model: options.Model,
    data: options.Data,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    field: options.Field = None,
    prompts: options.Prompts = 8,
    max_length: Annotated[int, typer.Option(min=2, help="The most tokens of a text; the rest is cut off.")] = 512,
    plot: Annotated[str | None, typer.Option(help="File for a plot, e.g. exits.png; needs matplotlib.")] = None,
) -> None:
    """Show how well each layer of a model predicts the next token."""
    from .. import exit_report
    from ..data.loading import NamedModel, set_up
    from ..data.texts import texts

    given, place, named = texts(data, field)[:prompts], set_up(device, threads), NamedModel(model)
    tokenizer = named.tokenizer()
    report = exit_report(named.model(dtype, place), tokenizer, given, max_length=max_length)
    print(report)
    if plot is not None:
        report.plot(plot)


def inspect(model: options.Model) -> None:
    """Show what a model is made of and what is supported with it; no weights are loaded."""
    from .. import inspect_model
    from ..data.loading import NamedModel

    print(inspect_model(NamedModel(model).config))


def tune(
    model: options.Model,
    data: options.Data,
    out: Annotated[
        str, typer.Option(help="Folder for the result, and for the steps from which a stopped search resumes.")
    ],
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    field: options.Field = None,
    prompts: options.Prompts = 8,
    max_prompt_tokens: options.MaxPromptTokens = 256,
    max_new_tokens: options.MaxNewTokens = 64,
    steps: Annotated[int, typer.Option(min=1, help="Sets of blocks to time.")] = 100,
    seed: options.Seed = 0,
) -> None:
    """Find the blocks to skip for a kind of text by timing drafts on it (Self-SD)."""
    from .. import OfflineSearch, tune
    from ..data.loading import NamedModel, set_up
    from ..data.texts import texts
    from ..learned.files import check_folder
    from ..learned.saving import FILE_NAME

    check_folder("--out", out, [FILE_NAME])
    given, place, named = texts(data, field)[:prompts], set_up(device, threads), NamedModel(model)
    tokenizer = named.tokenizer()
    spec = tune(
        named.model(dtype, place),
        tokenizer,
        given,
        search=OfflineSearch(max_steps=steps, seed=seed),
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        folder=out,
    )
    print(f"{spec.draft}\n{spec.stop}\n\nTo use it:\n")
    print(f"model.generate(**inputs, assistant=SelfSpec.from_pretrained({out!r}))")
