"""Fitting LoRA that is active only while the first layers draft."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ..draft.lora import EarlyExitLora
from ..errors import UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.forwards import states_of
from ..model.masks import Geometry, at_positions, speculative_attention
from ..model.partial import ForwardPass, obeying, partial_forwards
from ..model.plan import LayerPlan
from ..parts.lora import DraftLora, Shape, widths
from ..selfspec import SelfSpec
from ..settings import check_count, check_exit
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
from .speed import HeldOutSpeed, early_stop, with_speeds

USUAL_RANK = 16
# Tokens that are drafted one after another in the fit.
_WINDOW = 4
# What a stack of layers has to take.
_TAKEN = {"input_ids", "position_ids", "past_key_values"}


def fit_draft_lora(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    exit_layer: int | None = None,
    rank: int = USUAL_RANK,
    block_size: int = 256,
    args: TrainingArguments | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    patience: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> DraftLora:
    """Fits LoRA to the first layers that is active while they draft: the whole model's output stays what it is.

    The layers learn the distribution of the model's own last layer (cross entropy, no labels needed), as they will
    draft: a few tokens one after another with LoRA, after a text whose keys and values the whole model has written.

    Args:
        model: a causal LM of transformers, or a PEFT model around one; it stays as it is.
        tokenizer: its tokenizer; ``None`` where the rows have ``input_ids``.
        dataset: texts, or rows with a ``text`` or with ``input_ids``; 5 % at the end are held out. Best is what the
            model itself writes.
        exit_layer: the exit layer ``E``; a quarter of the layers by default.
        rank: ``r`` of the additions to each linear layer.
        block_size: tokens of a row.
        args, cache_dir, cache_bytes, patience, output_dir: see :func:`fit_adapter`.

    Returns:
        The LoRA, for ``SelfSpec(EarlyExitLora(lora))``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model's layers were not found, or do not draft after given keys and values.
    """
    name = "fit_draft_lora"
    inner, text = prepared(name, model, tokenizer, dataset, block_size, args)
    check_count(f"{name}(rank)", rank)
    rows, held_out = text.split()
    layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    chosen = quarter(layers) if exit_layer is None else exit_layer
    check_exit(name, "exit_layer", chosen, layers)
    backbone = Backbone(inner, (chosen,), cache_dir, cache_bytes)
    anatomy = backbone.anatomy
    _check(anatomy)
    shapes = list(linear_layers(anatomy, chosen))
    if not shapes:
        raise UnsupportedModelError(
            f"{name}: no linear layer was found in the first {chosen} layers of {anatomy.model_name} (quantised by a "
            "library with layers of its own?). Fit to the model as it was before, or fit an adapter: fit_adapter."
        )
    with seeded(args):
        lora = DraftLora(chosen, rank, shapes).to(backbone.device, torch.float32)
    vocabulary = inner.config.get_text_config(decoder=True).vocab_size
    drafting = _Drafting(backbone, lora)

    def logits_of(what: Pair, observed: Observed) -> torch.Tensor:
        whole = backbone.own_head
        hidden = drafting.states(observed.ids.to(backbone.device)).to(observed.final)
        return per_token(what, whole, hidden, whole, observed.final, vocabulary)

    def plain(observed: Observed) -> torch.Tensor:
        whole = backbone.own_head
        return per_token(agreement, whole, observed.exits[chosen], whole, observed.final, vocabulary)

    recipe = {"exit layer": chosen, "rank": rank, "tokens of a draft": _WINDOW}
    speed = HeldOutSpeed(inner, held_out, lambda part: SelfSpec(EarlyExitLora(part)))
    callbacks = early_stop(name, lora, speed, patience)
    fitting = Fitting(lora, backbone, lambda observed: logits_of(cross_entropy, observed).mean(), recipe)
    figures = {
        "agreement with the whole model": lambda observed: logits_of(agreement, observed),
        "agreement without LoRA": plain,
    }
    with backbone.frozen(), drafting.prepared():
        fit(fitting, rows, held_out, figures, args, output_dir, callbacks)
    return ended(with_speeds(lora, backbone, speed, output_dir), args, output_dir)


def quarter(num_layers: int) -> int:
    """The exit layer of a draft LoRA: a quarter of the layers."""
    return max(1, num_layers // 4)


def linear_layers(anatomy: Anatomy, exit_layer: int) -> Iterator[Shape]:
    """Names and widths of all linear layers in the first ``exit_layer`` layers, but not those that PEFT has added."""
    for index, layer in enumerate(anatomy.layers[:exit_layer]):
        tuned = [path for path, module in layer.named_modules() if isinstance(module, BaseTunerLayer)]
        for path, module in layer.named_modules():
            outer = next((inside for inside in tuned if path.startswith(f"{inside}.")), None)
            is_models = outer is None or path == f"{outer}.base_layer"
            if is_models and (found := widths(module)) is not None:
                yield (f"{index}.{path}", *found)


def _check(anatomy: Anatomy) -> None:
    """Checks that some tokens of a row can go through the layers again, after keys and values of the others.

    Raises:
        UnsupportedModelError: they cannot.
    """
    taken = inspect.signature(type(anatomy.stack).forward).parameters
    if anatomy.is_recurrent or anatomy.kv_sources or not anatomy.tree or not taken.keys() >= _TAKEN:
        raise UnsupportedModelError(
            f"fit_draft_lora feeds a row's tokens to the first layers again, after the keys and values of the whole "
            f"model, which {anatomy.model_name} does not take (recurrent states, shared keys and values, or no "
            "`position_ids`). Fit an adapter instead: fit_adapter."
        )


def _offset() -> int:
    """Where the windows of a call begin."""
    return int(torch.randint(_WINDOW, (), device="cpu"))


class _Drafting:
    """The first layers of a model as they draft with LoRA.

    Args:
        backbone: the frozen model.
        lora: the LoRA.
    """

    def __init__(self, backbone: Backbone, lora: DraftLora) -> None:
        self._model, self._anatomy, self._lora = backbone.model, backbone.anatomy, lora

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Prepares the model for :meth:`states`, and restores it afterwards."""
        additions = self._lora.additions(self._anatomy)
        with partial_forwards(self._model, self._anatomy, [additions]), speculative_attention():
            yield

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns what goes into the head, ``[b, s, d]`` for ids ``[b, s]``.

        Each row is cut into windows, at another place in each call. In a window, a token reads keys and values of the
        window from the layers with LoRA, and those of everything before it from the layers without.
        """
        (b, s), device, lora = ids.shape, ids.device, self._lora
        count, stack = self._anatomy.num_layers, self._anatomy.stack
        known = DynamicCache()
        places = torch.arange(s, device=device)
        with torch.no_grad(), obeying(ForwardPass(LayerPlan(count), stop=lora.exit_layer)):
            stack(input_ids=ids, past_key_values=known, use_cache=True)
        begins = places - (places + _offset()) % _WINDOW
        before = places[None, :] < begins[:, None]  # [s, s], as below
        within = (places[None, :] >= begins[:, None]) & (places[None, :] <= places[:, None])
        geometry = Geometry(
            query_positions=places.expand(b, s),
            length=2 * s,
            key_positions=torch.cat([places, places])[None],
            visible=torch.cat([before, within], dim=1).expand(b, s, 2 * s),
        )
        plan = LayerPlan.early_exit(count, lora.exit_layer, lora.additions(self._anatomy))
        with obeying(ForwardPass(plan)), at_positions(geometry):
            output = stack(
                input_ids=ids, position_ids=places.expand(b, s), past_key_values=_Behind(known), use_cache=True
            )
        return states_of(output)


class _Behind(Cache):
    """Keys and values of a forward over the same tokens again, behind those of the first."""

    def __init__(self, known: DynamicCache) -> None:
        super().__init__(layers=[_BehindLayer(layer) for layer in known.layers])


class _BehindLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, known: Any) -> None:
        super().__init__()
        self._known = known

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._known
        return torch.cat([known.keys, key_states], dim=-2), torch.cat([known.values, value_states], dim=-2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 2 * query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
