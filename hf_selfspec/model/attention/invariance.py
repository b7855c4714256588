"""Whether a model's results for several tokens can be had, bit for bit, as plain ``generate`` has them one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from transformers import DynamicCache, PreTrainedModel

from ...errors import brief
from ..anatomy import Anatomy
from ..cache.speculative_cache import cache_for
from ..forward_pass import ForwardPass, obeying
from ..internals import ACCELERATE_HOOK, ACTIVE_ADAPTER, ADAPTED, attention_implementation
from ..kernels.experts import decoding_experts
from ..module_tools import all_modules, forward_of_others, global_hooks
from ..plan import LayerPlan
from ..prompt import cache_name
from ..target import Target
from .exact import MOST_TOKENS, reduced_precision

# Tokens of the text after which results are compared, and that go through all layers together then.
_TEXT, _NEW = 24, 8
# The numbers of tokens that are compared with each other.
_COUNTS = range(MOST_TOKENS, 0, -1)

_CHANGING = "training", "_forward_hooks", "_forward_pre_hooks", ACCELERATE_HOOK, ACTIVE_ADAPTER, ADAPTED

# For each model the part whose results differ, by what changes when that may change.
_differing: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()


def differing_part(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """The name of the first layer (or of the head) whose results are not those of plain ``generate``, empty if all are;
    compared once for each state of a model."""
    outcomes = _differing.setdefault(model, {})
    key = (
        *(hash(_mark(model)), attention_implementation(model.config)),
        *(torch.get_num_threads(), reduced_precision(model.device)),
    )
    if key not in outcomes:
        try:
            outcomes[key] = _difference(model, anatomy)
        except (RuntimeError, IndexError) as error:  # experts may mix tokens
            outcomes[key] = f"a module that does not take one token at a time ({brief(error)})"
    return outcomes[key]


def _difference(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Compares a forward of the whole model over several tokens with those of plain ``generate``, one by one, and
    forwards of one layer of each sort over all numbers of tokens."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    plain = partial(model, **{cache_name(model): cache, "use_cache": True})
    with _begun(model, anatomy) as (target, text, new):
        whole, tokens = target.full_plan, new[:, :_NEW].split(1, dim=1)
        plain(text)
        target.install()
        alone = [_results(ForwardPass(whole), partial(plain, token)) for token in tokens]
        expected = {layer: torch.cat([of_token[layer] for of_token in alone], dim=-2) for layer in alone[0]}
        sample = _sample_plan(model, anatomy)
        return _first_apart(target, whole, new, [_NEW], expected) or _first_apart(target, sample, new, _COUNTS, {})


def _first_apart(
    target: Target, plan: LayerPlan, new: torch.Tensor, counts: Iterable[int], expected: dict[int, torch.Tensor]
) -> str:
    """The first part whose results over any of ``counts`` tokens are not the expected ones (default: the first)."""
    model, layers = target.model, target.anatomy.layers
    for count in counts:
        run = ForwardPass(plan, stop=None if plan is target.full_plan else plan.num_layers)
        results = _results(run, partial(target.step, new[:, :count], [_TEXT], run))
        if run.num_exact < plan.num_layers - len(run.skipped):
            return "attention that transformers' interface does not call"
        expected = expected or results
        for layer, states in results.items():
            if not torch.equal(states, expected[layer][..., :count, :]):
                names = (name for name, module in model.named_modules() if module is layers[layer])
                return "the output head" if layer == plan.num_layers else next(names)
    return ""


def _results(run: ForwardPass, forward: Callable[[], Any]) -> dict[int, torch.Tensor]:
    """The results ``[..., s, d]`` of each layer, and as the last one the logits if there are any."""
    results: dict[int, torch.Tensor] = {}
    run.after_layer = lambda layer, entered, left: results.setdefault(layer, left)
    with obeying(run):
        logits: torch.Tensor | None = getattr(forward(), "logits", None)
    return results if logits is None else results | {run.plan.num_layers: logits}


def _sample_plan(model: PreTrainedModel, anatomy: Anatomy) -> LayerPlan:
    """The plan of the first layer of each sort: with other modules, or with another type of attention."""
    config, first = model.config.get_text_config(decoder=True), dict[Hashable, int]()
    types = getattr(config, "layer_types", None) or [""] * anatomy.num_layers
    for index, (layer, type_) in enumerate(zip(anatomy.layers, types, strict=False)):
        first.setdefault((type_, _mark(layer)), index)
    skipped = frozenset(range(anatomy.num_layers)) - anatomy.kv_sources - set(first.values())
    return LayerPlan(anatomy.num_layers, skipped, skipped)


def _mark(module: nn.Module) -> str:
    """A text that differs when a model, or a layer, may use other kernels."""
    parts: list[Any] = [global_hooks()]
    for inner in all_modules(module):
        values = map(inner.__dict__.get, _CHANGING)
        parts += type(inner), *(list(value.items()) if isinstance(value, dict) else value for value in values)
        parts.append(forward_of_others(inner))
        weights = [weight for weight in list(inner._parameters.values()) if weight is not None]
        parts += [(weight.dtype, weight.device, weight.shape) for weight in weights]
    return str(parts)


@contextmanager
def _begun(model: PreTrainedModel, anatomy: Anatomy) -> Iterator[tuple[Target, torch.Tensor, torch.Tensor]]:
    """The model after a text, that text, and as many new tokens as go through together at most."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator, total = torch.Generator("cpu").manual_seed(0), _TEXT + MOST_TOKENS
    ids = torch.randint(vocabulary, (1, total), generator=generator, device="cpu").to(model.device)
    target = Target(model, anatomy, cache_for(model, anatomy, 1, total), is_exact=True)
    target.roots = target.roots.ahead(_TEXT)
    with torch.no_grad(), target.prepared(), decoding_experts(model, is_exact=True):
        target.prefill(ids[:, :_TEXT], [0], [_TEXT])
        yield target, ids[:, :_TEXT], ids[:, _TEXT:]
