"""Fitting LoRA that is active only while the first layers draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ..drafts.layers.early_exit import EarlyExitLora
from ..errors import UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.attention.interface import MaskSpec, at_positions, speculative_attention
from ..model.forward_pass import ForwardPass, obeying, partial_forwards
from ..model.kernels.linear import linear_layers
from ..model.module_tools import forward_parameters
from ..model.patching import states_of
from ..model.plan import LayerPlan
from ..model.prompt import cache_name
from ..modules.lora import DraftLora, Shape, widths
from ..selfspec import SelfSpec
from ..validation import check_count, check_exit
from .fit import TrainedFit, as_function
from .frozen_model import FrozenModel, Head, HiddenStates, agreement

# Tokens that are drafted one after another in the fit.
_WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class LoraFit(TrainedFit[DraftLora], command="lora", function="fit_draft_lora"):
    """Fits LoRA to the first layers that is active while they draft: the whole model's output stays what it is.

    The layers learn the distribution of the model's own last layer (cross entropy, no labels needed), as they will
    draft: a few tokens one after another with LoRA, after a text whose keys and values the whole model has written.

    Args:
        model, tokenizer, block_size, args, cache_dir, cache_bytes, patience, output_dir: see :func:`fit_adapter`.
        dataset: see :func:`fit_adapter`; best is what the model itself writes.
        exit_layer: the exit layer ``E``; a quarter of the layers by default.
        rank: ``r`` of the additions to each linear layer.

    Returns:
        The LoRA, for ``SelfSpec(EarlyExitLora(lora))``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model's layers were not found, or do not draft after given keys and values.
    """

    references = ("agreement_without_LoRA",)

    exit_layer: int | None = None
    rank: int = 16

    def check(self) -> None:
        super().check()
        check_count("fit_draft_lora(rank)", self.rank)

    def exit_layers(self, config: Any) -> Sequence[int]:
        layer = max(1, config.num_hidden_layers // 4) if self.exit_layer is None else self.exit_layer
        check_exit(self.function, "exit_layer", layer, config.num_hidden_layers)
        return (layer,)

    def module(self, frozen: FrozenModel) -> DraftLora:
        anatomy, (exit_layer,) = frozen.anatomy, frozen.layers
        takes_them = forward_parameters(anatomy.stack) >= {"input_ids", "position_ids", cache_name(anatomy.stack)}
        if anatomy.is_recurrent or anatomy.kv_sources or not anatomy.tree or not takes_them:
            raise UnsupportedModelError(
                "fit_draft_lora feeds a row's tokens to the first layers again, after the keys and values of the whole "
                f"model, which {anatomy.model_name} does not take (recurrent states, shared keys and values, or no "
                "`position_ids`). Fit an adapter instead: fit_adapter."
            )
        return DraftLora(exit_layer, self.rank, shapes_of(anatomy, exit_layer))

    def drafted(self, module: DraftLora, frozen: FrozenModel, states: HiddenStates) -> tuple[Head, torch.Tensor]:
        return frozen.own_head, drafted_states(frozen, module, states["ids"]).to(states["final"])

    def metrics(self, module: DraftLora, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        exits = states[f"exits_{module.exit_layer}"]
        without = frozen.per_token(agreement, frozen.own_head, exits, states["final"])
        return super().metrics(module, frozen, states) | {"agreement_without_LoRA": without}

    def spec(self, module: DraftLora) -> SelfSpec:
        return SelfSpec(EarlyExitLora(module))

    def recipe(self, module: DraftLora) -> dict[str, Any]:
        return {"exit layer": module.exit_layer, "rank": self.rank, "tokens of a draft": _WINDOW}


fit_draft_lora = as_function(LoraFit)


def shapes_of(anatomy: Anatomy, exit_layer: int) -> list[Shape]:
    """Names and widths of all linear layers in the first ``exit_layer`` layers."""
    modules = linear_layers(dict(enumerate(anatomy.layers[:exit_layer])))
    return [(name, *widths(module)) for name, module in modules]


def _offset() -> int:
    return int(torch.randint(_WINDOW, (), device="cpu"))  # where the windows of a call begin


def drafted_states(frozen: FrozenModel, lora: DraftLora, ids: torch.Tensor) -> torch.Tensor:
    """Returns what goes into the head ``[b, s, d]`` when the ids ``[b, s]`` are drafted in windows: each token attends
    to its window with LoRA, and to the text before it without LoRA."""
    ids = ids.to(frozen.device)
    (b, s), anatomy = ids.shape, frozen.anatomy
    count, stack, substitutes = anatomy.num_layers, anatomy.stack, lora.substitutes(anatomy)
    past = {cache_name(stack): DynamicCache()}
    places = torch.arange(s, device=ids.device)
    begins = places - (places + _offset()) % _WINDOW
    before = places[None, :] < begins[:, None]  # [s, s]
    within = ~before & (places[None, :] <= places[:, None])  # [s, s]
    geometry = MaskSpec(
        query_positions=places.expand(b, s),
        length=2 * s,
        key_positions=torch.cat([places, places])[None],
        visible=torch.cat([before, within], dim=1).expand(b, s, 2 * s),
    )
    with partial_forwards(frozen.model, anatomy, [substitutes]), speculative_attention():
        with torch.no_grad(), obeying(ForwardPass(LayerPlan(count), stop=lora.exit_layer)):
            stack(input_ids=ids, use_cache=True, **past)
        plan = LayerPlan.early_exit(count, lora.exit_layer, substitutes)
        with obeying(ForwardPass(plan)), at_positions(geometry):
            # Their keys and values come behind those of the first forward.
            output = stack(input_ids=ids, position_ids=places.expand(b, s), use_cache=True, **past)
    return states_of(output)
