"""Fitting exit heads and calibrating them (DSSD §3.2-3.4)."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..errors import SettingError, SettingTypeError
from ..model.fingerprint import Fingerprint
from ..parts.heads import (
    METRICS,
    ExitHeads,
    HeadPredictions,
    calibrate,
    check_metric,
    default_layers,
    figures_of,
    reached,
)
from ..parts.part import part_of
from ..selfspec import SelfSpec
from ..settings import MOST_LAYERS, check_count, check_exit, check_share
from .backbone import Backbone, Observed
from .blocks import HELD_OUT, MOST_HELD_OUT, Blocks
from .checkpoints import ended
from .fitting import (
    Fitting,
    Pair,
    agreement,
    fit,
    keep,
    per_token,
    prepared,
    seeded,
)
from .own_weights import copy_head, norm_like_the_models
from .speed import HeldOutSpeed, early_stop, greedily, with_speeds

# Every hundredth from 0.5 on, and denser near 1: all tokens of a draft have to be right.
_EPSILONS = (*(step / 100 for step in range(50, 95)), *(step / 1000 for step in range(950, 1000)))
# One token in so many of a row is given to the model, which continues it; and rows that are generated at once.
_GIVEN, _AT_ONCE = 4, 16
# Accuracy at which the speed with heads is measured, if they reach it: the preset's.
_USUAL_EPSILON = 0.9


def fit_exit_heads(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    layers: Sequence[int] | None = None,
    num_heads: int = 4,
    rank: int | None = None,
    copied: bool = False,
    labels: float = 0.0,
    metric: str | None = None,
    epsilons: Sequence[float] = _EPSILONS,
    block_size: int = 256,
    args: TrainingArguments | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    patience: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> ExitHeads:
    """Fits DSSD's exit heads (§3.2) to a frozen model and calibrates them, see :func:`calibrate_exit_heads`.

    A head learns the whole model's distribution, or the next token, or both.

    Args:
        model, tokenizer, dataset, block_size, args, cache_dir, cache_bytes, patience, output_dir: see
            :func:`fit_adapter`.
        layers: exit layers; by default ``⌊k L / (K + 1)⌋`` for ``k = 1 .. K``.
        num_heads: ``K``, where no layers are given (4 in the paper).
        rank: rank of the heads' linear layers: ``rank (d + v)`` parameters a head; ``None`` for full ones, ``d v``.
        copied: whether heads start with the weights of the model's own norm and head (without its bias, scale or
            soft-cap); they start at random by default, which the paper found to be better after long fits
            (copies stay over-confident).
        labels: weight ``α`` of the cross entropy on the text's own next tokens; ``1 - α`` is that of the divergence
            from the whole model (0 is the paper's best).
        metric, epsilons: see :func:`calibrate_exit_heads`.

    Returns:
        The heads, for ``SelfSpec.dssd(heads, epsilon)``; a warning is issued if they reach none of the accuracies.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`; or there is too little text to
            hold any out.
    """
    name = "fit_exit_heads"
    inner, text = prepared(name, model, tokenizer, dataset, block_size, args)
    rows, held_out = split(name, text)
    config = inner.config.get_text_config(decoder=True)
    check_share(f"{name}(labels)", labels, zero=True, one=True)
    _check(name, metric, epsilons, block_size)
    if copied and rank is not None:
        raise SettingError(f"{name}(copied=True, rank={rank}): the model's own head has full rank, so leave rank out.")
    chosen = chosen_layers(name, config.num_hidden_layers, num_heads, layers)
    backbone = Backbone(inner, chosen, cache_dir, cache_bytes)
    with seeded(args):
        heads = ExitHeads(chosen, backbone.width, config.vocab_size, rank).to(backbone.device, torch.float32)

    def divergence(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return F.kl_div(drafted.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="none").sum(-1)

    def loss(observed: Observed) -> torch.Tensor:
        losses = []
        for head, layer in enumerate(chosen):
            found = torch.zeros((), device=observed.final.device, dtype=torch.float32)
            if labels < 1:
                found = (1 - labels) * _of_head(divergence, backbone, heads, head, observed).mean()
            if labels:
                predicted = heads.logits(head, observed.states[layer][:, :-1]).float()
                found = found + labels * F.cross_entropy(predicted.flatten(0, 1), observed.ids[:, 1:].flatten())
            losses.append(found)
        return torch.stack(losses).mean()

    texts: list[tuple[torch.Tensor, int]] = []  # of a frozen model, written once

    def with_thresholds(part: ExitHeads) -> SelfSpec:
        if not texts:
            texts.extend(_written(backbone, held_out[:_AT_ONCE]))
        tried = copy.copy(part)
        tried.about = {"calibration": calibrate(_predictions(backbone, part, texts), epsilons, metric)}
        return _dssd(tried)

    recipe = {"exit layers": chosen, "rank": rank, "copied": copied, "weight of labels": labels}
    callbacks = early_stop(name, heads, HeldOutSpeed(inner, held_out, with_thresholds), patience)
    with backbone.frozen():
        if copied:
            _copy_own_head(heads, backbone)
        figures = {
            f"agreement at layer {layer}": partial(_of_head, agreement, backbone, heads, head)
            for head, layer in enumerate(chosen)
        }
        fit(Fitting(heads, backbone, loss, recipe), rows, held_out, figures, args, output_dir, callbacks)
    return ended(_calibrated(name, heads, backbone, held_out, epsilons, metric, output_dir), args, output_dir)


def calibrate_exit_heads(
    heads: ExitHeads | str | os.PathLike[str],
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    metric: str | None = None,
    epsilons: Sequence[float] = _EPSILONS,
    block_size: int = 256,
    output_dir: str | os.PathLike[str] | None = None,
) -> ExitHeads:
    """Calibrates exit heads on other text (DSSD §3.4), as :func:`fit_exit_heads` does on what it holds out.

    The model continues the first quarter of each row greedily, and heads are calibrated on what it writes.

    Args:
        heads: heads that were fitted to the model, or the folder or Hub repository that holds them; they do not change.
        model, tokenizer: see :func:`fit_adapter`.
        dataset: texts like those that will be generated, of which the first 64 rows are used.
        metric: how confidence is measured by default, ``"entropy"`` (the paper's best), ``"probability"`` or
            ``"margin"``; ``None`` for the one with the highest mean ROC AUC. Thresholds are kept for all three.
        epsilons: accuracies for which thresholds are kept, in increasing order.
        block_size: tokens of a row.
        output_dir: folder in which the heads are saved.

    Returns:
        A copy with the new thresholds.

    Raises:
        SettingError, SettingTypeError: there is no text, a setting is not allowed, or the heads are another model's.
    """
    name = "calibrate_exit_heads"
    inner, text = prepared(name, model, tokenizer, dataset, block_size, None)
    _check(name, metric, epsilons, block_size)
    _, given = part_of(f"{name}(heads)", heads, ExitHeads)
    given.check(lambda: Fingerprint.of_decoder(inner))
    backbone = Backbone(inner, given.layers)
    found = copy.deepcopy(given.on(backbone.device)).eval()
    return _calibrated(name, found, backbone, text.rows[:MOST_HELD_OUT], epsilons, metric, output_dir)


def _check(name: str, metric: str | None, epsilons: Sequence[float], block_size: int) -> None:
    check_metric(name, metric)
    if block_size < 2:
        raise SettingError(f"{name}(block_size={block_size}) leaves the model nothing to write: give at least 2.")
    if not isinstance(epsilons, Sequence):
        raise SettingTypeError(f"{name}(epsilons) must be a list of accuracies, got {epsilons!r}.")
    for epsilon in epsilons:
        check_share(f"{name}(epsilons)", epsilon, zero=False, one=True)
    if not epsilons or list(epsilons) != sorted(set(epsilons)):
        raise SettingError(f"{name}(epsilons) must be in increasing order, got {list(epsilons)!r}.")


def split(name: str, text: Blocks) -> tuple[Blocks, torch.Tensor]:
    """Returns the rows to train on, and those that are held out to calibrate on.

    Raises:
        SettingError: there are too few rows to hold any out.
    """
    rows, held_out = text.split()
    if not len(held_out):
        raise SettingError(
            f"{name} was given {len(rows)} rows of {rows.rows.shape[1]} tokens, of which none can be held out to "
            f"calibrate on: give at least {HELD_OUT} rows."
        )
    return rows, held_out


def chosen_layers(name: str, num_layers: int, num_heads: int, layers: Sequence[int] | None) -> list[int]:
    """Exit layers of a model of ``num_layers`` layers, spread over its depth if none were given.

    Raises:
        SettingError, SettingTypeError: the model does not have these layers, or no exit layer at all.
    """
    check_count(f"{name}(num_heads)", num_heads, most=MOST_LAYERS)
    chosen = default_layers(num_layers, num_heads) or [1] if layers is None else list(layers)
    if not chosen:
        raise SettingError(f"{name}(layers) needs at least one exit layer, got {layers!r}.")
    for layer in chosen:
        check_exit(name, "exit_layer", layer, num_layers)
    return chosen


def _unreached(name: str, epsilon: float, rate: float) -> str:
    best = f"at best {rate} of what they draft is accepted" if rate else "no head is sure enough to draft a token"
    return (
        f"{name}: these exit heads reach none of the accuracies from {epsilon} on ({best}), so SelfSpec.dssd cannot "
        "draft with them at such an epsilon. Fit them on more text or for more epochs, or with copied=True, or "
        "calibrate them on text that is closer to what they are used for."
    )


def _calibrated(
    name: str,
    heads: ExitHeads,
    backbone: Backbone,
    rows: torch.Tensor,
    epsilons: Sequence[float],
    metric: str | None,
    folder: str | os.PathLike[str] | None,
) -> ExitHeads:
    with backbone.frozen():
        calibration = calibrate(_predictions(backbone, heads, _written(backbone, rows)), epsilons, metric)
    figures = (heads.about.get("figures") or {}) | figures_of(calibration)
    heads.about = {**heads.about, "figures": figures, "calibration": calibration}
    if reached(calibration) < epsilons[0]:
        warnings.warn(_unreached(name, epsilons[0], reached(calibration)), stacklevel=3)
        return keep(heads, heads.about, folder)
    return with_speeds(heads, backbone, HeldOutSpeed(backbone.model, rows, _dssd), folder)


def _dssd(heads: ExitHeads) -> SelfSpec:
    """Returns the preset at the usual accuracy, or at the highest one that the heads reach."""
    return SelfSpec.dssd(heads, min(_USUAL_EPSILON, reached(heads.about["calibration"])))


def _of_head(what: Pair, backbone: Backbone, heads: ExitHeads, head: int, observed: Observed) -> torch.Tensor:
    """Applies ``what`` to a head's logits and the whole model's, see :func:`per_token`."""
    states = observed.states[heads.layers[head]].float()
    own = partial(heads.logits, head)
    return per_token(what, own, states, backbone.own_head, observed.final, heads.vocabulary)


@torch.no_grad()
def _predictions(
    backbone: Backbone, heads: ExitHeads, texts: Sequence[tuple[torch.Tensor, int]]
) -> list[HeadPredictions]:
    """What heads predict where the model continues the beginnings of rows."""

    def both(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return torch.stack([agreement(drafted, whole), *(metric(drafted) for metric in METRICS.values())], -1)

    found = []
    for ids, given in texts:
        observed = backbone.look(ids[None])
        predicted = [_of_head(both, backbone, heads, head, observed) for head in range(len(heads.layers))]
        right, *sure = torch.stack(predicted)[:, given - 1 : -1].cpu().unbind(-1)
        found.append(HeadPredictions(dict(zip(METRICS, sure, strict=True)), right))
    return found


def _written(backbone: Backbone, rows: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """For each row, its beginning with the model's continuation, and the length of the beginning."""
    length, model = rows.shape[1], backbone.model
    given = max(1, length // _GIVEN)
    found = []
    with greedily(model, length - given) as ends:
        for some in rows.to(backbone.device).split(_AT_ONCE):
            texts = model.generate(some[:, :given], attention_mask=torch.ones_like(some[:, :given]), assistant=False)
            for ids in texts:
                written = enumerate(ids[given:].tolist(), given)
                end = next((at for at, token in written if token in ends), len(ids) - 1)
                found.append((ids[: end + 1], given))
    return found


@torch.no_grad()
def _copy_own_head(heads: ExitHeads, backbone: Backbone) -> None:
    """Copies the model's own norm, as far as that only scales, and its head into all heads."""
    for head, layer in enumerate(heads.layers):
        behind = cast(nn.Sequential, heads.heads[head])
        copy_head(cast(nn.Linear, behind[1]), backbone)
        norm_like_the_models(cast(nn.RMSNorm, behind[0]), backbone, layer)
