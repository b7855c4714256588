"""Fitting an adapter behind a shallow exit (Kangaroo §3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..modules.adapter import Adapter
from ..validation import check_exit
from .exits import FrozenModel, HiddenStates, Metric, agreement, cross_entropy
from .fit import TrainedFit, as_function


@dataclass(frozen=True, kw_only=True)
class AdapterFit(TrainedFit[Adapter], command="adapter", function="fit_adapter"):
    """Fits Kangaroo's adapter (§3.1): cross entropy against the whole model's distribution, no labels needed.

    Args:
        model: a causal LM of transformers, or a PEFT model around one; it stays as it is.
        tokenizer: its tokenizer; ``None`` where the rows have ``input_ids``.
        dataset: texts, or rows with a ``text`` or with ``input_ids``; 5 % at the end are held out.
        exit_layer: the exit layer ``E``; 2 by default, 3 from 40 layers on, as in the paper.
        blocks: blocks of the adapter, see :class:`Adapter`.
        block_size: tokens of a row.
        args: arguments of the Trainer (learning rate, epochs, precision, devices, logging, checkpoints); one epoch at
            1e-3 without checkpoints by default. ``resume_from_checkpoint`` continues a fit of the same settings from
            one; with an ``eval_strategy``, the loss and the agreement with the whole model on the held-out rows are
            logged, for ``metric_for_best_model``.
        callbacks: of the Trainer, such as ``EarlyStoppingCallback``.
        output_dir: folder in which the adapter is saved, with a model card.

    Returns:
        The adapter, for ``SelfSpec.kangaroo(adapter)``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model's layers were not found, or nothing can be fitted to them.
    """

    exit_layer: int | None = None
    blocks: Sequence[str] = ("attention",)

    def exit_layers(self, config: Any) -> Sequence[int]:
        usual = 3 if config.num_hidden_layers >= 40 else 2
        layer = usual if self.exit_layer is None else self.exit_layer
        check_exit(self.function, "exit_layer", layer, config.num_hidden_layers)
        return (layer,)

    def module(self, frozen: FrozenModel) -> Adapter:
        adapter = super().module(frozen)
        frozen.imitate_norm(adapter.norm, adapter.exit_layer)
        return adapter

    def loss(self, module: Adapter, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        return _per_token(cross_entropy, module, frozen, states).mean()

    def metrics(self, module: Adapter, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        return {"agreement_with_the_whole_model": _per_token(agreement, module, frozen, states)}

    def recipe(self, module: Adapter) -> dict[str, Any]:
        shape = {"blocks": ", ".join(self.blocks), "heads": module.num_heads}
        return {"exit layer": module.exit_layer, **shape}

    def made(self, config: Any) -> Adapter:
        width, most = config.hidden_size, config.num_attention_heads
        heads = next((count for count in range(most, 0, -1) if width % (2 * count) == 0), 1)
        return Adapter(self.exit_layers(config)[0], width, heads, tuple(self.blocks), **_settings_of(config))


fit_adapter = as_function(AdapterFit)


def _per_token(metric: Metric, module: Adapter, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
    """``[b s]`` the values of a metric, from the draft's logits and those of the whole model."""
    hidden, final = module(states[f"states_{module.exit_layer}"]), states["final"]
    return frozen.per_token(metric, frozen.own_head, hidden.to(final.dtype), final)


def _settings_of(config: Any) -> dict[str, Any]:
    """An adapter's base of rotary positions and epsilon: the model's, so that the adapter can be a layer of it."""
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    settings = {"rope_theta": theta, "norm_eps": getattr(config, "rms_norm_eps", None)}
    return {name: float(value) for name, value in settings.items() if value}
