"""Whether a model's results for several tokens can be had, bit for bit, as plain ``generate`` has them one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
from transformers import DynamicCache, PreTrainedModel

from ..errors import brief
from .anatomy import Anatomy
from .cache import cache_for
from .exact import MOST_TOKENS
from .experts import decoding_experts
from .modules import all_modules
from .partial import ForwardPass, obeying
from .plan import LayerPlan
from .prompt import cache_name
from .target import Target
from .transfer import wait_for

# Tokens of the text with which results are compared, and of the one with which forwards are timed.
_KNOWN, _LONG = 24, 128
# Tokens that go through all layers together, and in a timed forward; how often that runs, the first time for nothing.
_NEW, _TIMED, _TURNS = 8, 4, 6

_CHANGING = "training", "_forward_hooks", "_forward_pre_hooks", "_hf_hook", "_active_adapter", "_disable_adapters"

_found: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def differing_part(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """The name of the first layer (or of the head) whose results are not plain's; empty if all are."""
    part: str = _known(model, anatomy, _difference)
    return part


def price_of(model: PreTrainedModel, anatomy: Anatomy) -> float:
    """By which share of its time a forward over a few tokens takes longer where each has its own results."""
    price: float = _known(model, anatomy, _price)
    return price


@torch.no_grad()
def _known(model: PreTrainedModel, anatomy: Anatomy, find: Callable[[PreTrainedModel, Anatomy], Any]) -> Any:
    """What ``find`` has found, once for each state of a model."""
    known = _found.setdefault(model, {})
    key = find.__name__, hash(_mark(model)), torch.get_num_threads(), model.config._attn_implementation
    if key not in known:
        known[key] = find(model, anatomy)
    return known[key]


def _difference(model: PreTrainedModel, anatomy: Anatomy) -> str:
    try:
        return _first_in_whole(model, anatomy) or _first_by_count(model, anatomy)
    except (RuntimeError, IndexError) as error:  # experts may mix tokens
        return f"a module that does not take one token at a time ({brief(error)})"


def _price(model: PreTrainedModel, anatomy: Anatomy) -> float:
    """The price, on a layer of each kind."""
    plan = _one_of_each(model, anatomy)
    known = min(_LONG, anatomy.position_limit - _TIMED if anatomy.position_limit else _LONG)
    target, ids = _target(model, anatomy, known, plan), _ids(model, known + _TIMED)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with target.prepared():
        target.prefill(ids[:, :known], [0], [known])
        for _ in range(_TURNS):
            for target.is_exact, times in seconds.items():
                begun = perf_counter()
                target.step(ids[:, known:], [known], ForwardPass(plan, stop=plan.num_layers))
                wait_for(model.device)
                times.append(perf_counter() - begun)
    return min(seconds[True][1:]) / min(seconds[False][1:]) - 1.0


def _mark(module: nn.Module) -> str:
    """What changes when the kernels of a model, or of a layer, may do."""
    seen: list[Any] = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    for one in all_modules(module):
        forward = one.__dict__.get("forward")
        is_ours = str(getattr(forward, "__module__", "")).startswith("hf_selfspec")
        seen += type(one), *map(one.__dict__.get, _CHANGING), None if is_ours else forward
        seen += [(x.dtype, x.device, x.shape) for x in one._parameters.values() if x is not None]
    return str(seen)


def _first_in_whole(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Compares a forward of the whole model over several tokens with one by one, as plain ``generate`` runs them."""
    target, ids = _target(model, anatomy, _KNOWN), _ids(model, _KNOWN + _NEW)
    text, new = ids.split([_KNOWN, _NEW], dim=1)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    past: dict[str, Any] = {cache_name(model): cache, "use_cache": True}
    with target.prepared(), decoding_experts(model):
        target.prefill(text, [0], [_KNOWN])
        model(text, **past)
        alone = []
        for token in new.split(1, dim=1):
            with obeying(run := ForwardPass(target.full_plan)):
                alone.append(_results(run, lambda: model(token, **past).logits))  # noqa: B023  # runs at once
        run = ForwardPass(target.full_plan)
        together = _results(run, lambda: target.step(new, [_KNOWN], run).logits)
    if run.num_exact < anatomy.num_layers:
        return "attention that transformers' interface does not call"
    for layer, results in together.items():
        if not torch.equal(results, torch.cat([one[layer] for one in alone], dim=-2)):
            return _name(model, anatomy, layer)
    return ""


def _first_by_count(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Compares forwards over all numbers of tokens, of one layer of each kind."""
    plan = _one_of_each(model, anatomy)
    target, ids = _target(model, anatomy, _KNOWN, plan), _ids(model, _KNOWN + MOST_TOKENS)
    text, new = ids.split([_KNOWN, MOST_TOKENS], dim=1)
    every: dict[int, torch.Tensor] = {}
    with target.prepared(), decoding_experts(model):
        target.prefill(text, [0], [_KNOWN])
        for count in range(MOST_TOKENS, 0, -1):
            run = ForwardPass(plan, stop=plan.num_layers)
            some = _results(run, lambda: target.step(new[:, :count], [_KNOWN], run).logits)  # noqa: B023  # runs at once
            every = every or some
            for layer, results in some.items():
                if not torch.equal(results, every[layer][..., :count, :]):
                    return _name(model, anatomy, layer)
    return ""


def _results(run: ForwardPass, forward: Callable[[], torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """The results ``[..., s, d]`` of each layer that runs, and as the last one the logits if there are any."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int, entered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        if layer not in run.passed:
            found[layer] = left
        return left

    run.after_layer = keep
    logits = forward()
    return found if logits is None else found | {run.plan.num_layers: logits}


def _one_of_each(model: PreTrainedModel, anatomy: Anatomy) -> LayerPlan:
    """The plan of the first layer of each kind, by its modules and the kind of its attention."""
    config, first = model.config.get_text_config(decoder=True), dict[Hashable, int]()
    kinds = getattr(config, "layer_types", None) or [""] * anatomy.num_layers
    for index, (layer, kind) in enumerate(zip(anatomy.layers, kinds, strict=False)):
        first.setdefault((kind, _mark(layer)), index)
    skipped = frozenset(range(anatomy.num_layers)) - anatomy.kv_sources - set(first.values())
    return LayerPlan(anatomy.num_layers, skipped, skipped)


def _target(model: PreTrainedModel, anatomy: Anatomy, known: int, plan: LayerPlan | None = None) -> Target:
    target = Target(model, anatomy, cache_for(model, anatomy, 1, known + MOST_TOKENS), plan=plan, is_exact=True)
    target.roots = target.roots.ahead(known)
    return target


def _ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(vocabulary, (1, count), generator=generator, device="cpu").to(model.device)


def _name(model: PreTrainedModel, anatomy: Anatomy, layer: int) -> str:
    if layer == anatomy.num_layers:
        return "the output head"
    return next(name for name, module in model.named_modules() if module is anatomy.layers[layer])
