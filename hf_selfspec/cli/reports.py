"""``hf-selfspec inspect`` and ``exit-report``: what a model is made of, and what its layers predict."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import ModelOption, ModelOptions, TextOptions, takes_options


@takes_options
def exit_report(
    model: ModelOptions,
    data: TextOptions,
    max_length: Annotated[int, typer.Option(min=2, help="The most tokens of a text; the rest is cut off.")] = 512,
    plot: Annotated[str | None, typer.Option(help="File for a plot, e.g. exits.png; needs matplotlib.")] = None,
) -> None:
    """Show how well each layer of a model predicts the next token."""
    from .. import exit_report

    texts, named = data.read(), model.find()
    tokenizer = named.tokenizer()
    report = exit_report(model.load(named), tokenizer, texts, max_length=max_length)
    print(report)
    if plot is not None:
        report.plot(plot)


def inspect(model: ModelOption) -> None:
    """Show what a model is made of and what is supported with it; no weights are loaded."""
    from .. import inspect_model
    from ..data.loading import NamedModel

    print(inspect_model(NamedModel.find(model).config()))
