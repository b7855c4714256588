"""``generate`` with a ``SelfSpec``, wrapped as soon as this module is imported."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import (
    AsyncTextIteratorStreamer,
    ContinuousMixin,
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..errors import SelfSpecError, UnsupportedModelError, UnsupportedOptionError, left_to_plain, warn_once
from ..model.anatomy import Anatomy
from ..model.inputs import check_inputs
from ..selfspec import SelfSpec
from ..stats import GenerationStats
from .call import Call, serve
from .choosing import CONFIG_NAMES, choose
from .refusals import check_options
from .seams import add_seam
from .unseen import why_plain

# The signature of what decodes a call: ``generate`` reads it twice, and Python takes longer to work it out than all
# checks take.
_SIGNATURE = inspect.signature(SelfSpec.__call__)


def _with_assistant(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        # All arguments by name, so that those which callables do not get can be removed.
        named = _by_name(signature, self, *args, **kwargs)
        with _ended(named.get("streamer")):
            chosen = choose(self, assistant, named)
        if chosen is None:
            return original(self, *args, **kwargs)
        (spec, default_of), why = chosen, ""
        with _ended(named.get("streamer")):
            try:
                if why := why_plain(self):  # whoever chose the SelfSpec
                    raise UnsupportedModelError(why)
                served = _served(self, spec, default_of, named)
            except Exception as error:  # of any kind: plain generate serves the call, or raises it itself
                # A SelfSpec that the caller did not choose must not make the call fail, nor may an unknown model.
                if isinstance(error, SelfSpecError) and not (default_of or why):
                    raise
                why, begun = left_to_plain(type(self).__name__, default_of, error), perf_counter()
                output = original(self, *args, **kwargs)
                seconds = perf_counter() - begun
                spec._knowledge.add_call(GenerationStats.of_plain(seconds, why))
                return output
            return original(self, **served)

    return generate


@contextmanager
def _ended(streamer: Any) -> Iterator[None]:
    """Ends a stream whose call fails, for whose next text another thread would wait for ever."""
    try:
        yield
    except BaseException:  # an interrupt, too, leaves the reader waiting
        if isinstance(streamer, (TextIteratorStreamer, AsyncTextIteratorStreamer)):
            streamer.end()
        raise


def _by_name(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a method's call, but ``self``."""
    arguments = signature.bind_partial(*args, **kwargs).arguments
    named = {name: value for name, value in arguments.items() if name not in ("self", "kwargs")}
    return named | arguments.get("kwargs", {})


def _without_assistant(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``generate_batch``, which would ignore the argument."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate_batch(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        chosen = choose(self, assistant, _by_name(signature, self, *args, **kwargs))
        if chosen is not None:
            _, default_of = chosen
            why = (
                "generate_batch (continuous batching) has a decode loop of its own, which does not draft: call generate"
            )
            if not default_of:
                raise UnsupportedOptionError(f"{why}, or leave out the SelfSpec.")
            warn_once(f"the SelfSpec {default_of} is not used. {why} for drafts.")
        return original(self, *args, **kwargs)

    return generate_batch


def _served(model: Any, spec: SelfSpec, default_of: str, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make ``generate`` decode with a ``SelfSpec``; raises if it cannot serve this call."""
    anatomy = Anatomy.of(model)
    config = named.get("generation_config")
    if isinstance(config, GenerationConfig):
        config = copy.copy(config)
        for name in CONFIG_NAMES:
            vars(config).pop(name, None)
    named = {**named, "generation_config": config}
    effective = _Options(model, named)
    check_options(model, effective)
    check_inputs(model, named.get("inputs"))
    if (strings := effective.stop_strings) is not None:
        # Where a callable decodes, transformers has no tokenizer for this option.
        if (tokenizer := named.get("tokenizer")) is None:
            raise UnsupportedOptionError(
                f"stop_strings={strings!r} needs the tokenizer: pass generate(tokenizer=tokenizer)."
            )
        criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
        criteria = StoppingCriteriaList([*(named.get("stopping_criteria") or ()), criterion])
        named |= {"stopping_criteria": criteria, "stop_strings": None}
    streamer, synced_gpus = named.get("streamer"), _is_synced(model, named.get("synced_gpus"))

    def decode(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any
    ) -> Any:
        prepared = (anatomy, model, input_ids, logits_processor, stopping_criteria, generation_config)
        return serve(Call(*prepared, synced_gpus, streamer, inputs, default_of), spec)

    vars(decode)["__signature__"] = _SIGNATURE
    return named | {"custom_generate": decode}


class _Options:
    """The options of a call: its arguments, else those of its config, else those of the model's config."""

    def __init__(self, model: Any, named: dict[str, Any]) -> None:
        self._of_model, self._named = model.generation_config, named

    def __getattr__(self, name: str) -> Any:
        if name in self._named and hasattr(self._of_model, name):
            return self._named[name]
        value = getattr(self._named["generation_config"], name, None)
        if value is None:
            value = getattr(self._of_model, name, None)
        # transformers drops it, too: models of the Hub have this default for sliding windows.
        return None if name == "cache_implementation" and value == "hybrid" else value


def _is_synced(model: Any, synced_gpus: bool | None) -> bool:
    """The value that ``generate`` resolves ``synced_gpus`` to, which it does not pass to callables."""
    if synced_gpus is not None:
        return synced_gpus
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)) and torch.distributed.get_world_size() > 1


add_seam(GenerationMixin, "generate", _with_assistant)
add_seam(ContinuousMixin, "generate_batch", _without_assistant)
