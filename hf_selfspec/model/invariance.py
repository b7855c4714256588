"""Whether a model's results for several tokens can be had, bit for bit, as plain ``generate`` has them one by one."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from .anatomy import Anatomy
from .cache import cache_for
from .patching import evaluating
from .prompt import cache_name
from .target import Target

# Tokens of the text with which it is tried out, and of those that follow it.
_KNOWN, _NEW = 24, 8

_found: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def differing_part(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """The name of the first module whose results are not the same, with this number of threads; empty if all are."""
    known, threads = _found.setdefault(model, {}), torch.get_num_threads()
    if threads not in known:
        with torch.no_grad(), evaluating(model):
            known[threads] = _differing_part(model, anatomy)
    return known[threads]


def _differing_part(model: PreTrainedModel, anatomy: Anatomy) -> str:
    config = model.config.get_text_config(decoder=True)
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, _KNOWN + _NEW), generator=generator, device="cpu").to(model.device)
    text, new = ids.split([_KNOWN, _NEW], dim=1)
    past: dict[str, Any] = {cache_name(model): DynamicCache(config=config), "use_cache": True}
    model(text, **past)
    alone = [_results(model, lambda: model(token, **past)) for token in new.split(1, dim=1)]  # noqa: B023
    target = Target(model, anatomy, cache_for(model, anatomy, 1, _KNOWN + _NEW), is_exact=True)
    with target.prepared():
        target.prefill(text, [0], [_KNOWN])
        together = _results(model, lambda: target.step(new, [_KNOWN]))
    differing = [name for name, found in together.items() if not _is_same(found, [one.get(name) for one in alone])]
    # Modules inside of a layer may see tokens in an order of their own, as experts do.
    layers = {name for name, module in model.named_modules() if module in anatomy.layers or module is model}
    return differing[0] if layers.intersection(differing) else ""


def _is_same(found: torch.Tensor, alone: list[torch.Tensor | None]) -> bool:
    each = [one for one in alone if one is not None]
    return len(each) == len(alone) and torch.equal(torch.cat(each, dim=-2), found)


def _results(model: nn.Module, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What each module returns, as far as it is a tensor ``[1, s, d]`` or ``[s, d]``, by name, in order."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, output: Any) -> None:
        if isinstance(output, ModelOutput):
            output = output.get("logits")
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() in (2, 3):
            found[name] = first

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(lambda _, given, output, name=name: keep(name, output))
            hooks.callback(hook.remove)
        run()
    return found
