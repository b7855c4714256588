"""Fitting small modules to a frozen model on one's own text, with the stock ``transformers.Trainer``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import PartialState
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from ..errors import SettingError, SettingTypeError, UnsupportedModelError
from ..model.anatomy import Anatomy, causal_lm
from ..model.exits import LOGIT_ELEMENTS
from ..parts.adapter import Adapter
from ..parts.heads import METRICS, ExitHeads, calibrate, default_layers
from ..parts.part import Part, about
from ..parts.probe import LinearProbe
from ..settings import check_count, check_share
from .backbone import Backbone, Observed

_P = TypeVar("_P", bound=Part)
# Share of the text that is not trained on but measured, and its most blocks.
_HELD_OUT, _MOST_HELD_OUT = 20, 64
# Positions of [chunk, v] and [chunk, v] each.
_Pair = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Head = Callable[[torch.Tensor], torch.Tensor]


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Texts as rows of as many tokens.

    Args:
        tokenizer: the model's tokenizer.
        texts: strings, or rows with a ``text`` or with ``input_ids``.
        length: tokens of a row. Texts follow each other, an end-of-text token between them where there is one; what is
            left at the end is dropped.
        name: what takes the texts, for messages.

    Raises:
        SettingError, SettingTypeError: there is no text, too little for one row, or something else.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, texts: Iterable[Any], length: int, name: str = "fit"
    ) -> None:
        check_count(f"{name}(block_size)", length)
        if isinstance(texts, (str, bytes, Mapping)):
            raise SettingTypeError(
                f"{name} takes a list of texts or a dataset with a `text` column, got one {texts!r}."
            )
        tokens: list[int] = []
        end = getattr(tokenizer, "eos_token_id", None)
        for text in texts:
            tokens += _tokens(tokenizer, text, name)
            if end is not None:
                tokens.append(end)
        if not tokens:
            raise SettingError(
                f"{name} was given no text: the dataset is empty. Give texts that the model is used for."
            )
        if len(tokens) < length:
            raise SettingError(
                f"{name} was given {len(tokens)} tokens, fewer than one row of block_size={length}. Give more text or "
                "a smaller block_size."
            )
        count = len(tokens) // length
        self.rows = torch.tensor(tokens[: count * length]).view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index]}

    def without(self, rows: int) -> Blocks:
        """All but the last ``rows`` rows."""
        part = Blocks.__new__(Blocks)
        part.rows = self.rows[: len(self.rows) - rows]
        return part


def _tokens(tokenizer: PreTrainedTokenizerBase | None, text: Any, name: str) -> list[int]:
    if isinstance(text, Mapping):
        if "input_ids" in text:
            return [int(token) for token in text["input_ids"]]
        text = text.get("text")
    if not isinstance(text, str) or tokenizer is None:
        raise SettingTypeError(
            f"{name} takes strings, or rows with a `text` (and the tokenizer) or with `input_ids`; got {text!r}."
        )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Fitting(nn.Module):
    """What the Trainer trains: the part alone. The model is beside it, not in it, and is neither moved nor saved.

    Args:
        part: what is fitted.
        backbone: the frozen model.
        loss: of the part, given what the model shows.
    """

    def __init__(self, part: Part, backbone: Backbone, loss: Callable[[Observed], torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        self._seen = (backbone, loss)  # in a tuple, so that it is no submodule

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """``{"loss": ...}`` of ids ``[b, s]``."""
        backbone, loss = self._seen
        return {"loss": loss(backbone.observe(input_ids).to(next(self.part.parameters()).device))}


def training_arguments(folder: str, device: torch.device, **changed: Any) -> TrainingArguments:
    """Arguments of the Trainer: one epoch of AdamW at 1e-3 with rows of 8, unless ``changed``."""
    usual: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": device.type == "cpu",
    }
    return TrainingArguments(**usual | changed)


@dataclass(frozen=True)
class Fitted:
    """How a fit went.

    Attributes:
        losses: as logged.
        seconds: of training.
        tokens: rows times their length, of one epoch.
        steps: of the optimiser.
    """

    losses: tuple[float, ...]
    seconds: float
    tokens: int
    steps: int


def _train(fitting: Fitting, blocks: Blocks, args: TrainingArguments | None, device: torch.device) -> Fitted:
    with tempfile.TemporaryDirectory() as folder:
        args = args or training_arguments(folder, device)
        if args.n_gpu > 1:
            args._n_gpu = 1  # the model is not copied to further devices of one process; torchrun serves them
        trainer = Trainer(
            model=fitting,
            args=args,
            train_dataset=blocks,
            data_collator=default_data_collator,
        )
        begun = perf_counter()
        trainer.train()
        seconds = perf_counter() - begun
    losses = tuple(float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    return Fitted(losses, seconds, blocks.rows.numel(), trainer.state.global_step)


def per_token(
    what: _Pair, head: _Head, states: torch.Tensor, whole_head: _Head, final: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """``what`` of the logits behind states, for a chunk of tokens at a time.

    Args:
        what: ``[n]`` of two ``[n, v]``, those of a draft and those of the whole model.
        head: the draft's logits ``[n, v]`` of ``states`` ``[b, s, d]``; gradients flow through it.
        states: see there.
        whole_head: the whole model's logits of ``final`` ``[b, s, d]``.
        final: see there.
        vocabulary: ``v``.

    Returns:
        ``[b s]``.
    """

    def of(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known = whole_head(others).float()
        return what(head(some).float(), known)

    pairs = states.flatten(0, 1), final.flatten(0, 1)
    chunk = max(1, LOGIT_ELEMENTS // vocabulary)
    found = []
    for start in range(0, len(pairs[0]), chunk):
        some = [rows[start : start + chunk] for rows in pairs]
        found.append(checkpoint(of, *some, use_reentrant=False) if torch.is_grad_enabled() else of(*some))
    return torch.cat(found)


def cross_entropy(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``[n]`` cross entropy of the draft's distribution against the whole model's (Kangaroo, equation 3)."""
    return -(whole.softmax(-1) * drafted.log_softmax(-1)).sum(-1)


def agreement(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``[n]`` whether both have the same first choice."""
    return (drafted.argmax(-1) == whole.argmax(-1)).float()


def _prepared(
    name: str, model: Any, tokenizer: Any, dataset: Iterable[Any], block_size: int, args: Any
) -> tuple[Any, Blocks, torch.Tensor]:
    """The model, the rows to train on and the held-out ones."""
    inner = causal_lm(model, name)
    if args is not None and not isinstance(args, TrainingArguments):
        raise SettingTypeError(f"{name}(args) must be TrainingArguments of transformers or None, got {args!r}.")
    most = Anatomy.of(inner).max_positions
    if most is not None and isinstance(block_size, int) and block_size > most:
        raise SettingError(f"{name}(block_size={block_size}) is more than the {most} positions of the model.")
    blocks = Blocks(tokenizer, dataset, block_size, name)
    held = min(_MOST_HELD_OUT, len(blocks) // _HELD_OUT)
    return inner, blocks.without(held), blocks.rows[len(blocks) - held :]


def fit_adapter(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    exit_layer: int | None = None,
    blocks: Sequence[str] = ("attention",),
    num_heads: int | None = None,
    block_size: int = 256,
    args: TrainingArguments | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Adapter:
    """Fits Kangaroo's adapter (§3.1): cross entropy against the whole model's distribution, no labels needed.

    Args:
        model: a causal LM of transformers, or a PEFT model around one; it stays as it is.
        tokenizer: its tokenizer; ``None`` where the rows have ``input_ids``.
        dataset: texts, or rows with a ``text`` or with ``input_ids``; 5 % at the end are held out.
        exit_layer: the exit layer ``E``; 2 by default, 3 from 40 layers on, as in the paper.
        blocks: of the adapter, see :class:`Adapter`.
        num_heads: its attention heads; the model's by default.
        block_size: tokens of a row.
        args: of the Trainer (learning rate, epochs, precision, devices, logging); one epoch at 1e-3 by default.
        cache_dir: keeps the model's states for further fits, see :class:`Backbone`.
        output_dir: folder in which the adapter is saved, with a model card.

    Returns:
        The adapter, for ``SelfSpec.kangaroo(adapter)``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model's layers were not found, or are not of the kind that can be served.
    """
    name = "fit_adapter"
    inner, rows, held_out = _prepared(name, model, tokenizer, dataset, block_size, args)
    config = inner.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    chosen = (3 if layers >= 40 else 2) if exit_layer is None else exit_layer
    _check_exit(name, chosen, layers)
    backbone = Backbone(inner, (chosen,), cache_dir)
    width = _width(backbone)
    heads = num_heads or next(count for count in range(config.num_attention_heads, 0, -1) if width % (2 * count) == 0)
    with _seeded(args):
        adapter = Adapter(chosen, width, heads, tuple(blocks), norm_eps=1e-6).to(backbone.device)

    def logits_of(what: _Pair, observed: Observed) -> torch.Tensor:
        hidden = adapter(observed.states[chosen])
        head, final = backbone.own_head, observed.final
        return per_token(what, head, hidden.to(final.dtype), head, final, config.vocab_size)

    with backbone.frozen():
        _norm_like_the_models(adapter, backbone)
        fitted = _train(
            Fitting(adapter, backbone, lambda observed: logits_of(cross_entropy, observed).mean()),
            rows, args, backbone.device,
        )  # fmt: skip
        adapter.eval()
        figures = _measured(backbone, held_out, {"agreement with the whole model": lambda o: logits_of(agreement, o)})
    recipe = {"exit layer": chosen, "blocks": ", ".join(blocks), "heads": heads}
    return _finished(adapter, inner, recipe, fitted, figures, output_dir)


def fit_probe(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    exit_layer: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    block_size: int = 256,
    args: TrainingArguments | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> LinearProbe:
    """Fits AdaSPEED's probe (§II.B): whether the token that an early exit drafts is accepted, from its state.

    Labels follow the decoding mode: the exit's first choice is the whole model's (greedy); or, where tokens are drawn,
    the probability ``Σ min(p, q)`` with which a token drawn from the exit's distribution is accepted.

    Args:
        model, tokenizer, dataset, block_size, args, cache_dir, output_dir: see :func:`fit_adapter`.
        exit_layer: the exit layer ``E``.
        do_sample: whether tokens are drawn, with ``temperature``, ``top_k`` and ``top_p`` as in ``generate``.

    Returns:
        The probe, for ``SelfSpec.adaspeed(probe=probe)``.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`.
    """
    name = "fit_probe"
    inner, rows, held_out = _prepared(name, model, tokenizer, dataset, block_size, args)
    config = inner.config.get_text_config(decoder=True)
    _check_exit(name, exit_layer, config.num_hidden_layers)
    backbone = Backbone(inner, (exit_layer,), cache_dir)
    probe = LinearProbe(exit_layer, _width(backbone), do_sample).to(backbone.device)
    warpers = _warpers(temperature, top_k, top_p)

    def accepted(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not do_sample:
            return agreement(drafted, whole)
        ids = torch.zeros(len(drafted), 0, dtype=torch.long, device=drafted.device)
        q, p = (warpers(ids, logits).softmax(-1) for logits in (drafted, whole))
        return torch.minimum(p, q).sum(-1)

    def labels(observed: Observed) -> torch.Tensor:
        with torch.no_grad():
            head, exits = backbone.own_head, observed.exits[exit_layer]
            return per_token(accepted, head, exits, head, observed.final, config.vocab_size)

    def scores(observed: Observed) -> torch.Tensor:
        return probe.scores(observed.states[exit_layer].flatten(0, 1).float())

    def right(observed: Observed) -> torch.Tensor:
        sure, label = scores(observed).sigmoid(), labels(observed)
        return (sure > 0.5) * label + (sure <= 0.5) * (1 - label)

    with backbone.frozen():
        fitted = _train(
            Fitting(probe, backbone, lambda o: F.binary_cross_entropy_with_logits(scores(o), labels(o))),
            rows, args, backbone.device,
        )  # fmt: skip
        probe.eval()
        figures = _measured(backbone, held_out, {"accuracy": right, "accepted": labels})
    mode = f"drawn, temperature {temperature}, top-k {top_k}, top-p {top_p}" if do_sample else "greedy"
    return _finished(probe, inner, {"exit layer": exit_layer, "decoding": mode}, fitted, figures, output_dir)


EPSILONS = tuple(round(0.5 + 0.01 * step, 2) for step in range(50))


def fit_exit_heads(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    layers: Sequence[int] | None = None,
    num_heads: int = 4,
    rank: int | None = None,
    labels: float = 0.0,
    metric: str = "entropy",
    epsilons: Sequence[float] = EPSILONS,
    block_size: int = 256,
    args: TrainingArguments | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> ExitHeads:
    """Fits DSSD's exit heads (§3.2) to a frozen model and calibrates them on held-out text (§3.4).

    A head begins at random (copies of the model's own head stay over-confident) and learns the whole model's
    distribution, or the next token, or both.

    Args:
        model, tokenizer, dataset, block_size, args, cache_dir, output_dir: see :func:`fit_adapter`.
        layers: exit layers; by default ``⌊k L / (K + 1)⌋`` for ``k = 1 .. K``.
        num_heads: ``K``, where no layers are given (4 in the paper).
        rank: of the heads' linear layers: ``rank (d + v)`` numbers a head instead of ``d v``; ``None`` for whole ones.
        labels: weight ``α`` of the cross entropy on the text's own next tokens; ``1 - α`` is that of the divergence
            from the whole model (0 is the paper's best).
        metric: how confidence is measured, ``"entropy"`` (the paper's best), ``"probability"`` or ``"margin"``.
        epsilons: accuracies for which thresholds are kept, rising.

    Returns:
        The heads, for ``SelfSpec.dssd(heads, epsilon)``.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`; or there is too little text to
            hold any out.
    """
    name = "fit_exit_heads"
    inner, rows, held_out = _prepared(name, model, tokenizer, dataset, block_size, args)
    config = inner.config.get_text_config(decoder=True)
    check_share(f"{name}(labels)", labels, zero=True, one=True)
    if metric not in METRICS:
        raise SettingError(f"{name}(metric) must be one of {sorted(METRICS)}, got {metric!r}.")
    for epsilon in epsilons:
        check_share(f"{name}(epsilons)", epsilon, zero=False, one=True)
    if not epsilons or list(epsilons) != sorted(set(epsilons)):
        raise SettingError(f"{name}(epsilons) must rise, got {list(epsilons)!r}.")
    if not len(held_out):
        raise SettingError(
            f"{name} was given {len(rows)} rows of {block_size} tokens, of which none can be held out to calibrate on: "
            f"give at least {_HELD_OUT} rows."
        )
    chosen = default_layers(config.num_hidden_layers, num_heads) if layers is None else list(layers)
    for layer in chosen:
        _check_exit(name, layer, config.num_hidden_layers)
    backbone = Backbone(inner, chosen, cache_dir)
    with _seeded(args):
        heads = ExitHeads(chosen, _width(backbone), config.vocab_size, rank).to(backbone.device)

    def divergence(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return F.kl_div(drafted.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="none").sum(-1)

    def of_head(what: _Pair, head: int, observed: Observed) -> torch.Tensor:
        states = observed.states[chosen[head]].float()
        own = partial(heads.logits, head)
        return per_token(what, own, states, backbone.own_head, observed.final, config.vocab_size)

    def loss(observed: Observed) -> torch.Tensor:
        losses = []
        for head, layer in enumerate(chosen):
            found = (1 - labels) * of_head(divergence, head, observed).mean() if labels < 1 else torch.zeros(())
            if labels:
                said = heads.logits(head, observed.states[layer][:, :-1]).float()
                found = found + labels * F.cross_entropy(said.flatten(0, 1), observed.ids[:, 1:].flatten())
            losses.append(found)
        return torch.stack(losses).mean()

    with backbone.frozen():
        fitted = _train(Fitting(heads, backbone, loss), rows, args, backbone.device)
        heads.eval()
        sure, right = _confidences(backbone, held_out, of_head, len(chosen))
    figures = {
        f"agreement at layer {layer}": round(correct.mean().item(), 4)
        for layer, correct in zip(chosen, right, strict=True)
    }
    recipe = {"exit layers": chosen, "rank": rank, "weight of labels": labels}
    found = calibrate(sure, right, list(epsilons), metric)
    return _finished(heads, inner, recipe, fitted, figures, output_dir, calibration=found)


@torch.no_grad()
def _confidences(
    backbone: Backbone, held_out: torch.Tensor, of_head: Callable[[_Pair, int, Observed], torch.Tensor], heads: int
) -> tuple[dict[str, list[torch.Tensor]], list[torch.Tensor]]:
    """For each metric and head ``[n]`` confidences, and for each head ``[n]`` whether its first choice is right."""
    sure: dict[str, list[list[torch.Tensor]]] = {metric: [[] for _ in range(heads)] for metric in METRICS}
    right: list[list[torch.Tensor]] = [[] for _ in range(heads)]
    for row in held_out:
        observed = backbone.observe(row[None])
        for head in range(heads):
            right[head].append(of_head(agreement, head, observed).cpu())
            for name, metric in METRICS.items():
                sure[name][head].append(of_head(_only_first(metric), head, observed).cpu())
    joined = {name: [torch.cat(parts) for parts in found] for name, found in sure.items()}
    return joined, [torch.cat(parts) for parts in right]


def _only_first(metric: _Head) -> _Pair:
    return lambda drafted, whole: metric(drafted)


def _check_exit(name: str, layer: int, layers: int) -> None:
    check_count(f"{name}(exit_layer)", layer)
    if layer >= layers:
        raise SettingError(
            f"{name}(exit_layer={layer}) is not possible: the model has {layers} layers, so the exit layer must be "
            f"between 1 and {layers - 1}."
        )


@contextmanager
def _seeded(args: TrainingArguments | None) -> Iterator[None]:
    """The Trainer's seed, for what is made before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42 if args is None else args.seed)
        yield


def _width(backbone: Backbone) -> int:
    with backbone.frozen():
        ids = torch.zeros(1, 1, dtype=torch.long, device=backbone.device)
        seen = backbone._forward(ids)
    width, final = seen[f"states_{backbone.layers[0]}"].shape[-1], seen["final"].shape[-1]
    if width != final:
        raise UnsupportedModelError(
            f"{backbone.anatomy.model_name} sends states of width {final} to its head and has {width} between its "
            "layers: nothing can be fitted to go from there to the head."
        )
    return width


@torch.no_grad()
def _norm_like_the_models(adapter: Adapter, backbone: Backbone) -> None:
    """The adapter's final norm begins as the model's own, as far as that only scales: ``w`` of ``w x / |x|``."""
    layer = adapter.exit_layer
    ids = torch.arange(2, 10, device=backbone.device)[None]
    observed = backbone.observe(ids)
    states, normed = observed.states[layer].double(), observed.exits[layer].double()
    if states.shape == normed.shape:
        unit = states / states.pow(2).mean(-1, keepdim=True).sqrt()
        adapter.norm.weight.copy_((unit * normed).sum((0, 1)) / (unit * unit).sum((0, 1)))


def _warpers(temperature: float, top_k: int | None, top_p: float | None) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


@torch.no_grad()
def _measured(
    backbone: Backbone, held_out: torch.Tensor, figures: Mapping[str, Callable[[Observed], torch.Tensor]]
) -> dict[str, float]:
    """Means over the tokens of the held-out rows, none where there are none."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in figures}
    for row in held_out:
        observed = backbone.observe(row[None])
        for name, figure in figures.items():
            found[name].append(figure(observed))
    return {name: round(torch.cat(values).mean().item(), 4) for name, values in found.items() if values}


def _finished(
    part: _P, model: Any, recipe: dict[str, Any], fitted: Fitted, figures: dict[str, float], folder: Any, **more: Any
) -> _P:
    recipe = {**recipe, "tokens": fitted.tokens, "steps": fitted.steps}
    if fitted.losses:
        figures = {"first loss": fitted.losses[0], "last loss": fitted.losses[-1], **figures}
    part.about = about(model, recipe, {**figures, "seconds of training": round(fitted.seconds, 1)}) | more
    part._hub_mixin_config = {**cast(dict[str, Any], part._hub_mixin_config), "about": part.about}
    if folder is not None:
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                part.save_pretrained(folder)
    return part.eval()
