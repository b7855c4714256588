"""``hf-selfspec fit``: a small module for a frozen model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataOption, DtypeOption, FieldOption, ModelOption, takes_options

if TYPE_CHECKING:
    from hf_selfspec.train.request import FitRequest

app = typer.Typer(help="Fit a small module to a frozen model.")


@dataclass(frozen=True)
class TextOptions:
    """The options of every fit."""

    model: ModelOption
    data: DataOption
    out: Annotated[str, typer.Option(help="Folder for the fitted module.")]
    field: FieldOption = None
    dtype: DtypeOption = "auto"


@dataclass(frozen=True)
class FitOptions(TextOptions):
    """The options of every fit that trains."""

    block_size: Annotated[int, typer.Option(help="Tokens of a row.")] = 256
    batch: Annotated[int, typer.Option(help="Rows in a step, on each device.")] = 8
    learning_rate: float = 1e-3
    epochs: float = 1.0
    cache: Annotated[
        str | None, typer.Option(help="Folder that keeps the model's states for further epochs and fits.")
    ] = None
    cache_gib: Annotated[float | None, typer.Option(help="The most that the folder may hold, in GiB.")] = None
    patience: Annotated[
        int | None,
        typer.Option(help="Looks at the speed (every 100 steps, or tenth of a fit) without a gain, then it ends."),
    ] = None


@app.command()
@takes_options
def adapter(
    common: FitOptions,
    exit_layer: Annotated[int | None, typer.Option(help="The exit layer; 2 by default, 3 from 40 layers on.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, the model's by default.")] = None,
    blocks: Annotated[str, typer.Option(help="attention, mlp, or both separated by a comma.")] = "attention",
    own_head: Annotated[bool, typer.Option("--own-head", help="Fit a head of its own as well.")] = False,
) -> None:
    """Fit Kangaroo's adapter, attention after a shallow exit."""
    from hf_selfspec.spec_text import split
    from hf_selfspec.train.request import AdapterFit

    chosen: dict[str, Any] = {"exit_layer": exit_layer, "heads": heads, "own_head": own_head}
    _fit(AdapterFit(**vars(common), blocks=tuple(split([blocks])), **chosen))


@app.command()
@takes_options
def heads(
    common: FitOptions,
    layers: Annotated[
        str | None, typer.Option(help="Exit layers separated by commas, spread over the depth by default.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads if no layers are given; 4 by default.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the heads' linear layers, full by default.")] = None,
    copied: Annotated[bool, typer.Option("--copied", help="Start with copies of the model's own head.")] = False,
    metric: Annotated[str | None, typer.Option(help="Metric of confidence; by default the best one.")] = None,
) -> None:
    """Fit DSSD's exit heads and calibrate their thresholds."""
    from hf_selfspec.train.request import HeadsFit

    chosen: dict[str, Any] = {"heads": heads, "rank": rank, "copied": copied, "metric": metric}
    _fit(HeadsFit(**vars(common), layers=None if layers is None else _whole_numbers("--layers", layers), **chosen))


@app.command()
@takes_options
def lora(
    common: FitOptions,
    exit_layer: Annotated[int | None, typer.Option(help="The exit layer; a quarter of the layers by default.")] = None,
    rank: Annotated[int, typer.Option(help="Rank of what is added to each linear layer.")] = 16,
) -> None:
    """Fit LoRA of the first layers that is active only while they draft."""
    from hf_selfspec.train.request import LoraFit

    _fit(LoraFit(**vars(common), exit_layer=exit_layer, rank=rank))


@app.command()
@takes_options
def probe(
    common: FitOptions,
    exit_layer: Annotated[int, typer.Option(help="The layer whose states the probe reads.")],
    sample: Annotated[bool, typer.Option("--sample", help="Fit it for sampling instead of greedy decoding.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling, 1.0 by default.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Top-k of sampling.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Top-p of sampling.")] = None,
) -> None:
    """Fit AdaSPEED's probe, which predicts acceptance."""
    from hf_selfspec.train.request import ProbeFit

    drawing: dict[str, Any] = {"sample": sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    _fit(ProbeFit(**vars(common), exit_layer=exit_layer, **drawing))


@app.command()
@takes_options
def head(common: TextOptions, size: Annotated[int, typer.Option(help="How many tokens.")] = 8192) -> None:
    """The most frequent tokens of the text, which drafts are made of (nothing is trained)."""
    from hf_selfspec.train.request import HeadFit

    _fit(HeadFit(**vars(common), size=size))


def _fit(request: FitRequest) -> None:
    part = request.run()
    for name, value in {**part.about["recipe"], **part.about["figures"]}.items():
        print(f"{name:<32} {value}")
    print(f"{part.kind} of {part.num_parameters:,} parameters in {request.out}")


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    from hf_selfspec import SettingError
    from hf_selfspec.spec_text import split

    try:
        return tuple(int(item) for item in split([text]))
    except ValueError as error:
        raise SettingError(f"{option} {text}: give whole numbers separated by commas, e.g. 3,6,12.") from error
