"""Whether a model's results for several tokens can be had, bit for bit, as plain ``generate`` has them one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
from transformers import DynamicCache, PreTrainedModel

from ..errors import brief
from .anatomy import Anatomy
from .cache import cache_for
from .exact import MOST_TOKENS, reduced_precision
from .experts import decoding_experts
from .internals import ACCELERATE_HOOK, ACTIVE_ADAPTER, ADAPTED, attention_implementation
from .modules import all_modules, forward_of_others
from .partial import ForwardPass, obeying
from .plan import LayerPlan
from .prompt import cache_name
from .target import Target
from .transfer import wait_for

# Tokens of the text with which results are compared, and of the one with which forwards are timed.
_KNOWN, _LONG = 24, 128
# Tokens that go through all layers together, and in a timed forward; how often that runs, the first time for nothing.
_NEW, _TIMED, _TURNS = 8, 4, 6
# The numbers of tokens that are compared with each other.
_COUNTS = range(MOST_TOKENS, 0, -1)

_CHANGING = "training", "_forward_hooks", "_forward_pre_hooks", ACCELERATE_HOOK, ACTIVE_ADAPTER, ADAPTED

_found: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()


def differing_part(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """The name of the first layer (or of the head) whose results are not plain's, found once for each state of a model;
    empty if all are."""
    known = _found.setdefault(model, {})
    key = (
        *(hash(_mark(model)), attention_implementation(model.config)),
        *(torch.get_num_threads(), reduced_precision(model.device)),
    )
    if key not in known:
        try:
            known[key] = _difference(model, anatomy)
        except (RuntimeError, IndexError) as error:  # experts may mix tokens
            known[key] = f"a module that does not take one token at a time ({brief(error)})"
    return known[key]


def price_of(model: PreTrainedModel, anatomy: Anatomy) -> float:
    """By which share of its time a forward over a few tokens, through a layer of each kind, takes longer where each has
    its own results."""
    plan, seconds = _one_of_each(model, anatomy), dict[bool, list[float]]({True: [], False: []})
    known = min(_LONG, anatomy.position_limit - _TIMED if anatomy.position_limit else _LONG)
    with _begun(model, anatomy, known) as (target, _, new):
        for _ in range(_TURNS):
            for target.is_exact, times in seconds.items():
                begun = perf_counter()
                target.step(new[:, :_TIMED], [known], ForwardPass(plan, stop=plan.num_layers))
                wait_for(model.device)
                times.append(perf_counter() - begun)
    return min(seconds[True][1:]) / min(seconds[False][1:]) - 1.0


def _difference(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Compares a forward of the whole model over several tokens with those of plain ``generate``, one by one, and
    forwards of one layer of each kind over all numbers of tokens."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    plain = partial(model, **{cache_name(model): cache, "use_cache": True})
    with _begun(model, anatomy, _KNOWN) as (target, text, new):
        whole, tokens = target.full_plan, new[:, :_NEW].split(1, dim=1)
        plain(text)
        target.obey()
        alone = [_results(ForwardPass(whole), partial(plain, token)) for token in tokens]
        expected = {layer: torch.cat([one[layer] for one in alone], dim=-2) for layer in alone[0]}
        some = _one_of_each(model, anatomy)
        return _first_of(target, whole, new, [_NEW], expected) or _first_of(target, some, new, _COUNTS, {})


def _first_of(
    target: Target, plan: LayerPlan, new: torch.Tensor, counts: Iterable[int], expected: dict[int, torch.Tensor]
) -> str:
    """The first part whose results over some numbers of tokens are not the expected ones, by default the first ones."""
    model, layers = target.model, target.anatomy.layers
    for count in counts:
        run = ForwardPass(plan, stop=None if plan is target.full_plan else plan.num_layers)
        found = _results(run, partial(target.step, new[:, :count], [_KNOWN], run))
        if run.num_exact < plan.num_layers - len(run.passed):
            return "attention that transformers' interface does not call"
        expected = expected or found
        for layer, results in found.items():
            if not torch.equal(results, expected[layer][..., :count, :]):
                names = (name for name, module in model.named_modules() if module is layers[layer])
                return "the output head" if layer == plan.num_layers else next(names)
    return ""


def _results(run: ForwardPass, forward: Callable[[], Any]) -> dict[int, torch.Tensor]:
    """The results ``[..., s, d]`` of each layer, and as the last one the logits if there are any."""
    found: dict[int, torch.Tensor] = {}
    run.after_layer = lambda layer, entered, left: found.setdefault(layer, left)
    with obeying(run):
        logits: torch.Tensor | None = getattr(forward(), "logits", None)
    return found if logits is None else found | {run.plan.num_layers: logits}


def _one_of_each(model: PreTrainedModel, anatomy: Anatomy) -> LayerPlan:
    """The plan of the first layer of each kind, by its modules and the kind of its attention."""
    config, first = model.config.get_text_config(decoder=True), dict[Hashable, int]()
    kinds = getattr(config, "layer_types", None) or [""] * anatomy.num_layers
    for index, (layer, kind) in enumerate(zip(anatomy.layers, kinds, strict=False)):
        first.setdefault((kind, _mark(layer)), index)
    skipped = frozenset(range(anatomy.num_layers)) - anatomy.kv_sources - set(first.values())
    return LayerPlan(anatomy.num_layers, skipped, skipped)


def _mark(module: nn.Module) -> str:
    """What changes when the kernels of a model, or of a layer, may do."""
    of = nn.modules.module
    seen: list[Any] = [list(of._global_forward_hooks.items()), list(of._global_forward_pre_hooks.items())]
    for one in all_modules(module):
        changing = map(one.__dict__.get, _CHANGING)
        seen += type(one), *(list(x.items()) if isinstance(x, dict) else x for x in changing), forward_of_others(one)
        seen += [(x.dtype, x.device, x.shape) for x in list(one._parameters.values()) if x is not None]
    return str(seen)


@contextmanager
def _begun(model: PreTrainedModel, anatomy: Anatomy, known: int) -> Iterator[tuple[Target, torch.Tensor, torch.Tensor]]:
    """The model after a text of so many tokens, that text, and as many new tokens as go through together at most."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator, length = torch.Generator("cpu").manual_seed(0), known + MOST_TOKENS
    ids = torch.randint(vocabulary, (1, length), generator=generator, device="cpu").to(model.device)
    target = Target(model, anatomy, cache_for(model, anatomy, 1, length), is_exact=True)
    target.roots = target.roots.ahead(known)
    with torch.no_grad(), target.prepared(), decoding_experts(model, is_exact=True):
        target.prefill(ids[:, :known], [0], [known])
        yield target, ids[:, :known], ids[:, known:]
