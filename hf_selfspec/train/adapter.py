"""Fitting an adapter behind a shallow exit (Kangaroo §3.1)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..parts.adapter import Adapter
from ..selfspec import SelfSpec
from ..settings import check_exit
from .backbone import Backbone, Observed
from .checkpoints import ended
from .fitting import (
    Fitting,
    Pair,
    agreement,
    cross_entropy,
    fit,
    per_token,
    prepared,
    seeded,
)
from .own_weights import copy_head, norm_like_the_models
from .speed import HeldOutSpeed, early_stop, with_speeds


def fit_adapter(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    exit_layer: int | None = None,
    blocks: Sequence[str] = ("attention",),
    num_heads: int | None = None,
    own_head: bool = False,
    block_size: int = 256,
    args: TrainingArguments | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    patience: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Adapter:
    """Fits Kangaroo's adapter (§3.1): cross entropy against the whole model's distribution, no labels needed.

    Args:
        model: a causal LM of transformers, or a PEFT model around one; it stays as it is.
        tokenizer: its tokenizer; ``None`` where the rows have ``input_ids``.
        dataset: texts, or rows with a ``text`` or with ``input_ids``; 5 % at the end are held out.
        exit_layer: the exit layer ``E``; 2 by default, 3 from 40 layers on, as in the paper.
        blocks: blocks of the adapter, see :class:`Adapter`.
        num_heads: number of its attention heads; the model's by default.
        own_head: whether the adapter has a head of its own, which starts with the weights of the model's (without its
            bias, scale or soft-cap).
        block_size: tokens of a row.
        args: arguments of the Trainer (learning rate, epochs, precision, devices, logging); one epoch at 1e-3 by
            default. With a ``save_strategy``, a fit that was stopped resumes from its last checkpoint in their
            ``output_dir``. With an ``eval_strategy``, the loss of the held-out rows is logged.
        cache_dir: folder that keeps the model's states for further epochs and fits, which then run no layer (those of
            a draft LoRA run the layers that it changes), see :class:`Backbone`.
        cache_bytes: maximum size of this model's states in ``cache_dir``; for rows without room the model runs in each
            epoch.
        patience: ends the fit when the speed of generation on held-out text has not risen in so many measurements in a
            row, and keeps the fastest weights. It is measured every 100 steps (every tenth of a shorter fit, or every
            ``args.eval_steps``). ``None`` for all steps.
        output_dir: folder in which the adapter is saved, with a model card. Without ``args``, checkpoints are kept
            beside it while the fit runs, and after it was stopped, the same call resumes from them.

    Returns:
        The adapter, for ``SelfSpec.kangaroo(adapter)``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model's layers were not found, or nothing can be fitted to them.
    """
    name = "fit_adapter"
    inner, text = prepared(name, model, tokenizer, dataset, block_size, args)
    rows, held_out = text.split()
    config = inner.config.get_text_config(decoder=True)
    chosen = usual_exit(config) if exit_layer is None else exit_layer
    check_exit(name, "exit_layer", chosen, config.num_hidden_layers)
    backbone = Backbone(inner, (chosen,), cache_dir, cache_bytes)
    width = backbone.width
    heads = num_heads or usual_heads(config.num_attention_heads, width)
    with seeded(args):
        vocabulary = config.vocab_size if own_head else None
        settings = (usual_theta(config), usual_eps(config))
        adapter = Adapter(chosen, width, heads, tuple(blocks), vocabulary, *settings).to(backbone.device, torch.float32)
    if adapter.head is not None:
        copy_head(adapter.head, backbone)

    def logits_of(what: Pair, observed: Observed) -> torch.Tensor:
        hidden, whole = adapter(observed.states[chosen]), backbone.own_head
        head = whole if adapter.head is None else adapter.head
        if adapter.head is None:
            hidden = hidden.to(observed.final.dtype)
        return per_token(what, head, hidden, whole, observed.final, config.vocab_size)

    recipe = {"exit layer": chosen, "blocks": ", ".join(blocks), "heads": heads, "own head": own_head}
    speed = HeldOutSpeed(inner, held_out, SelfSpec.kangaroo)
    callbacks = early_stop(name, adapter, speed, patience)
    fitting = Fitting(adapter, backbone, lambda observed: logits_of(cross_entropy, observed).mean(), recipe)
    with backbone.frozen():
        norm_like_the_models(adapter.norm, backbone, chosen)
        figures = {"agreement with the whole model": lambda observed: logits_of(agreement, observed)}
        fit(fitting, rows, held_out, figures, args, output_dir, callbacks)
    return ended(with_speeds(adapter, backbone, speed, output_dir), args, output_dir)


def usual_exit(config: Any) -> int:
    """The paper's exit layer for a model of this config."""
    return 3 if config.num_hidden_layers >= 40 else 2


def usual_heads(most: int, width: int) -> int:
    """The number of attention heads of an adapter: the model's, or fewer so that each has an even width."""
    return next((count for count in range(most, 0, -1) if width % (2 * count) == 0), 1)


def usual_theta(config: Any) -> float:
    """Base of an adapter's rotary positions: the model's, so that the adapter can be a layer of it."""
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return float(theta) if isinstance(theta, (int, float)) and theta > 0 else 10000.0


def usual_eps(config: Any) -> float:
    """Epsilon of an adapter's norms: the model's, or 1e-6."""
    eps = getattr(config, "rms_norm_eps", None)
    return float(eps) if isinstance(eps, (int, float)) and 0 < eps < 1 else 1e-6
