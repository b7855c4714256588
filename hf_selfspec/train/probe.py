"""Fitting a probe of acceptance (AdaSPEED §II.B)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TrainingArguments,
)

from ..errors import SettingError
from ..parts.probe import LinearProbe
from ..selfspec import SelfSpec
from ..settings import check_count, check_exit, check_positive, check_share
from .backbone import Backbone, Observed
from .checkpoints import ended
from .fitting import Fitting, agreement, fit, per_token, prepared, seeded
from .speed import HeldOutSpeed, early_stop, with_speeds


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
    cache_bytes: int | None = None,
    patience: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> LinearProbe:
    """Fits AdaSPEED's probe (§II.B), which predicts from an exit's state whether the token drafted there is accepted.

    Labels depend on the decoding mode: whether the exit's first choice is the whole model's (greedy), or the
    probability ``Σ min(p, q)`` that a token drawn from the exit's distribution is accepted (sampling).

    Args:
        model, tokenizer, dataset, block_size, args, cache_dir, cache_bytes, patience, output_dir: see
            :func:`fit_adapter`.
        exit_layer: the exit layer ``E``.
        do_sample: whether tokens are sampled, with ``temperature``, ``top_k`` and ``top_p`` as in ``generate``.

    Returns:
        The probe, for ``SelfSpec.adaspeed(probe=probe)``.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`.
    """
    name = "fit_probe"
    check_warping(lambda setting: f"{name}({setting})", temperature, top_k, top_p)
    if do_sample and patience is not None:
        raise SettingError(
            f"{name}(do_sample=True, patience={patience}): speed is measured on greedy text, for which this "
            "probe is not made. Leave patience out."
        )
    inner, text = prepared(name, model, tokenizer, dataset, block_size, args)
    rows, held_out = text.split()
    config = inner.config.get_text_config(decoder=True)
    check_exit(name, "exit_layer", exit_layer, config.num_hidden_layers)
    backbone = Backbone(inner, (exit_layer,), cache_dir, cache_bytes)
    with seeded(args):
        probe = LinearProbe(exit_layer, backbone.width, do_sample).to(backbone.device, torch.float32)
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

    mode = f"drawn, temperature {temperature}, top-k {top_k}, top-p {top_p}" if do_sample else "greedy"
    recipe = {"exit layer": exit_layer, "decoding": mode}
    # Speed is found with greedy text, for which a probe of drawn tokens is not made.
    speed = HeldOutSpeed(inner, held_out[:0] if do_sample else held_out, lambda part: SelfSpec.adaspeed(probe=part))
    callbacks = early_stop(name, probe, speed, patience)
    fitting = Fitting(probe, backbone, lambda o: F.binary_cross_entropy_with_logits(scores(o), labels(o)), recipe)
    with backbone.frozen():
        fit(fitting, rows, held_out, {"accuracy": right, "accepted": labels}, args, output_dir, callbacks)
    return ended(with_speeds(probe, backbone, speed, output_dir), args, output_dir)


def check_warping(name: Callable[[str], str], temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Checks the settings of sampling.

    Args:
        name: returns the name of a setting in messages.
        temperature, top_k, top_p: see :func:`fit_probe`.

    Raises:
        SettingError, SettingTypeError: one is not allowed.
    """
    check_positive(name("temperature"), temperature)
    if top_k is not None:
        check_count(name("top_k"), top_k, least=0)
    if top_p is not None:
        check_share(name("top_p"), top_p, zero=False, one=True)


def _warpers(temperature: float, top_k: int | None, top_p: float | None) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers
