"""Fits described by names and numbers alone: of a model, a text and an output folder, as on the command line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from ..errors import SettingError
from ..files import check_folder
from ..loading import NamedModel
from ..model.anatomy import max_positions
from ..parts.adapter import BLOCKS, Adapter
from ..parts.heads import METRICS, ExitHeads
from ..parts.part import FILES, Part
from ..settings import check_count, check_exit, check_positive
from .adapter import fit_adapter, usual_exit, usual_heads
from .blocks import Blocks
from .checkpoints import KEPT, checkpoints_of
from .fitting import check_length, training_arguments
from .heads import chosen_layers, fit_exit_heads, split
from .lora import USUAL_RANK, fit_draft_lora, quarter
from .probe import check_warping, fit_probe
from .reduced_head import USUAL_SIZE, fit_reduced_head
from .texts import texts

_USUAL_HEADS, _USUAL_TEMPERATURE = 4, 1.0
# What the config of every causal LM has, by these names or by those that it maps to them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class FitRequest(ABC):
    """The settings of every fit. Messages use the names of the command line.

    Attributes:
        model: folder or name on the Hub.
        data: see :func:`.texts.texts`.
        out: folder for what is fitted.
        field: column of the text.
        dtype: data type of the model.
    """

    kind: ClassVar[str]

    model: str
    data: str
    out: str
    field: str | None = None
    dtype: str = "auto"

    @property
    def name(self) -> str:
        """The name of the fit, for messages."""
        return f"fit {self.kind}"

    def run(self) -> Part:
        """Checks everything, loads the model and fits; mistakes are found before weights are loaded where possible.

        Raises:
            SettingError, SettingTypeError: something is not allowed.
        """
        self._check()
        check_folder("--out", self.out, FILES)
        data = texts(self.data, self.field)
        named = NamedModel.find(self.model)
        self._check_config(named.config().get_text_config(decoder=True))
        return self._made(named, data)

    @abstractmethod
    def _check(self) -> None:
        """Checks what can be known without the text and the model."""

    @abstractmethod
    def _check_config(self, config: Any) -> None:
        """Checks what the config of the model's text decoder tells, before there are weights.

        Raises:
            SettingError: the model has not what is named.
        """

    @abstractmethod
    def _made(self, named: NamedModel, data: list[str]) -> Part:
        """Loads and fits."""


@dataclass(frozen=True, kw_only=True)
class HeadFit(FitRequest):
    """The tokens that drafts are made of, see :func:`fit_reduced_head`."""

    kind: ClassVar[str] = "head"

    size: int = USUAL_SIZE

    def _check(self) -> None:
        check_count("--size", self.size)

    def _check_config(self, config: Any) -> None:
        """All configs will do: a size beyond the vocabulary is all of it."""

    def _made(self, named: NamedModel, data: list[str]) -> Part:
        rows = Blocks(named.tokenizer(), data, 1, self.name).rows.flatten().tolist()
        model = named.model(self.dtype, torch.device("cpu"))
        return fit_reduced_head(model, None, [{"input_ids": rows}], size=self.size, output_dir=self.out)


@dataclass(frozen=True, kw_only=True)
class TrainedFit(FitRequest):
    """What every fit takes that trains.

    Attributes:
        block_size: tokens of a row.
        batch: rows in a step, on each device.
        learning_rate, epochs: of the Trainer.
        cache: folder that keeps the model's states for further epochs and fits.
        cache_gib: the most that it may hold, in GiB; ``None`` for no limit.
        patience: looks at the speed without a gain after which the fit ends; ``None`` for all epochs.
    """

    least_block: ClassVar[int] = 1

    block_size: int = 256
    batch: int = 8
    learning_rate: float = 1e-3
    epochs: float = 1.0
    cache: str | None = None
    cache_gib: float | None = None
    patience: int | None = None

    def _made(self, named: NamedModel, data: list[str]) -> Part:
        rows = self._rows(Blocks(named.tokenizer(), data, self.block_size, self.name))
        training = self._training()
        return self._fit(named.model(self.dtype, training.device), rows, training)

    def _check(self) -> None:
        for name, value in {"--batch": self.batch, "--patience": self.patience, **self._counts()}.items():
            if value is not None:
                check_count(name, value)
        check_count("--block-size", self.block_size, least=self.least_block)
        check_positive("--learning-rate", self.learning_rate)
        check_positive("--epochs", self.epochs)
        for message in self._without_effect():
            raise SettingError(message)
        self._check_choices()
        if self.cache is not None:
            check_folder("--cache", self.cache)
        if self.cache_gib is not None:
            check_positive("--cache-gib", self.cache_gib)
            if self.cache is None:
                raise SettingError(f"--cache-gib {self.cache_gib} has no effect without --cache: leave it out.")

    def _check_config(self, config: Any) -> None:
        check_length(self.name, self.block_size, max_positions(config))
        if all(isinstance(getattr(config, size, None), int) for size in _SIZES):  # otherwise loading it raises
            with torch.device("meta"):
                self._check_sizes(config)

    def _training(self) -> TrainingArguments:
        return training_arguments(
            checkpoints_of(self.out),
            torch.accelerator.current_accelerator() or torch.device("cpu"),
            per_device_train_batch_size=self.batch,
            learning_rate=self.learning_rate,
            num_train_epochs=self.epochs,
            **KEPT,
        )

    def _common(self, training: TrainingArguments) -> dict[str, Any]:
        room = None if self.cache_gib is None else max(1, round(self.cache_gib * 2**30))
        cache = {"cache_dir": self.cache, "cache_bytes": room}
        others = {"args": training, "patience": self.patience, "output_dir": self.out}
        return {"block_size": self.block_size, **cache, **others}

    def _rows(self, blocks: Blocks) -> list[dict[str, list[int]]]:
        """The text as rows of tokens; raises if there are too few."""
        return [{"input_ids": ids} for ids in blocks.rows.tolist()]

    def _check_choices(self) -> None:
        """Checks settings of this kind of fit that are not counts; by default there are none."""

    @abstractmethod
    def _counts(self) -> dict[str, int | None]:
        """Settings of this kind that are whole numbers."""

    def _without_effect(self) -> Iterator[str]:
        """Yields a message for each setting that has no effect because of another one; by default none."""
        yield from ()

    @abstractmethod
    def _check_sizes(self, config: Any) -> None:
        """Checks that a model with this config has the layers and sizes of the settings."""

    @abstractmethod
    def _fit(self, model: Any, rows: list[dict[str, list[int]]], training: TrainingArguments) -> Part:
        """Fits the part."""


@dataclass(frozen=True, kw_only=True)
class AdapterFit(TrainedFit):
    """Kangaroo's adapter, see :func:`fit_adapter`."""

    kind: ClassVar[str] = "adapter"

    exit_layer: int | None = None
    heads: int | None = None
    blocks: tuple[str, ...] = ("attention",)
    own_head: bool = False

    def _counts(self) -> dict[str, int | None]:
        return {"--exit-layer": self.exit_layer, "--heads": self.heads}

    def _check_choices(self) -> None:
        for block in self.blocks:
            _check_choice("--blocks", block, BLOCKS)

    def _without_effect(self) -> Iterator[str]:
        if self.heads is not None and "attention" not in self.blocks:
            yield f"--heads {self.heads} has no effect with --blocks {','.join(self.blocks)}: leave it out."

    def _check_sizes(self, config: Any) -> None:
        layer = usual_exit(config) if self.exit_layer is None else self.exit_layer
        check_exit(self.name, "exit_layer", layer, config.num_hidden_layers)
        heads = self.heads or usual_heads(config.num_attention_heads, config.hidden_size)
        Adapter(layer, config.hidden_size, heads, self.blocks)

    def _fit(self, model: Any, rows: list[dict[str, list[int]]], training: TrainingArguments) -> Part:
        chosen: dict[str, Any] = {"blocks": self.blocks, "num_heads": self.heads, "own_head": self.own_head}
        return fit_adapter(model, None, rows, exit_layer=self.exit_layer, **chosen, **self._common(training))


@dataclass(frozen=True, kw_only=True)
class HeadsFit(TrainedFit):
    """DSSD's exit heads, see :func:`fit_exit_heads`."""

    kind: ClassVar[str] = "heads"
    # Exit heads are calibrated on what the model writes after the beginning of a row.
    least_block: ClassVar[int] = 2

    layers: tuple[int, ...] | None = None
    heads: int | None = None
    rank: int | None = None
    copied: bool = False
    metric: str | None = None

    def _counts(self) -> dict[str, int | None]:
        return {"--heads": self.heads, "--rank": self.rank}

    def _check_choices(self) -> None:
        for layer in self.layers or ():
            check_count("--layers", layer)
        if self.metric is not None:
            _check_choice("--metric", self.metric, METRICS)

    def _without_effect(self) -> Iterator[str]:
        if self.heads is not None and self.layers is not None:
            yield f"--heads {self.heads} has no effect with --layers, which gives their number: leave it out."
        if self.copied and self.rank is not None:
            yield f"--copied has no effect with --rank {self.rank}: the model's own head has full rank. Leave one out."

    def _check_sizes(self, config: Any) -> None:
        layers = chosen_layers(self.name, config.num_hidden_layers, self._num_heads, self.layers)
        ExitHeads(layers, config.hidden_size, config.vocab_size, self.rank)

    def _rows(self, blocks: Blocks) -> list[dict[str, list[int]]]:
        split(self.name, blocks)
        return super()._rows(blocks)

    @property
    def _num_heads(self) -> int:
        return _USUAL_HEADS if self.heads is None else self.heads

    def _fit(self, model: Any, rows: list[dict[str, list[int]]], training: TrainingArguments) -> Part:
        chosen: dict[str, Any] = {"layers": self.layers, "num_heads": self._num_heads, "metric": self.metric}
        chosen |= {"rank": self.rank, "copied": self.copied}
        return fit_exit_heads(model, None, rows, **chosen, **self._common(training))


@dataclass(frozen=True, kw_only=True)
class LoraFit(TrainedFit):
    """LoRA for drafts alone, see :func:`fit_draft_lora`."""

    kind: ClassVar[str] = "lora"

    exit_layer: int | None = None
    rank: int = USUAL_RANK

    def _counts(self) -> dict[str, int | None]:
        return {"--exit-layer": self.exit_layer, "--rank": self.rank}

    def _check_sizes(self, config: Any) -> None:
        layers = config.num_hidden_layers
        chosen = quarter(layers) if self.exit_layer is None else self.exit_layer
        check_exit(self.name, "exit_layer", chosen, layers)

    def _fit(self, model: Any, rows: list[dict[str, list[int]]], training: TrainingArguments) -> Part:
        chosen: dict[str, Any] = {"exit_layer": self.exit_layer, "rank": self.rank}
        return fit_draft_lora(model, None, rows, **chosen, **self._common(training))


@dataclass(frozen=True, kw_only=True)
class ProbeFit(TrainedFit):
    """AdaSPEED's probe, see :func:`fit_probe`."""

    kind: ClassVar[str] = "probe"

    exit_layer: int
    sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def _counts(self) -> dict[str, int | None]:
        return {"--exit-layer": self.exit_layer}

    def _check_choices(self) -> None:
        if self.sample:
            check_warping(_option, self._temperature, self.top_k, self.top_p)

    def _without_effect(self) -> Iterator[str]:
        for name, value in (("temperature", self.temperature), ("top_k", self.top_k), ("top_p", self.top_p)):
            if value is not None and not self.sample:
                yield f"{_option(name)} {value} has no effect without --sample: add that, or leave it out."
        if self.sample and self.patience is not None:
            yield f"--patience {self.patience} needs greedy text to measure on: leave it or --sample out."

    def _check_sizes(self, config: Any) -> None:
        check_exit(self.name, "exit_layer", self.exit_layer, config.num_hidden_layers)

    @property
    def _temperature(self) -> float:
        return _USUAL_TEMPERATURE if self.temperature is None else self.temperature

    def _fit(self, model: Any, rows: list[dict[str, list[int]]], training: TrainingArguments) -> Part:
        drawing: dict[str, Any] = {"do_sample": self.sample, "temperature": self._temperature}
        drawing |= {"top_k": self.top_k, "top_p": self.top_p}
        return fit_probe(model, None, rows, exit_layer=self.exit_layer, **drawing, **self._common(training))


def _option(setting: str) -> str:
    """The name of a setting on the command line."""
    return f"--{setting.replace('_', '-')}"


def _check_choice(option: str, value: str, known: Any) -> None:
    if value not in known:
        raise SettingError(f"{option} {value}: there is no such choice. Give one of {', '.join(sorted(known))}.")
