"""``generate`` with a ``SelfSpec``, wrapped as soon as this module is imported."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..call import Request, decode_plainly
from ..errors import SelfSpecError, UnsupportedOptionError, warn_once_ignoring_numbers
from ..model.anatomy import Anatomy
from ..model.inputs import check_inputs
from ..refusals import check_options
from ..selfspec import SelfSpec
from ..stats import GenerationStats
from .choosing import CONFIG_NAMES, Chosen, choose
from .pipelines import PIPELINES, with_assistant
from .seams import add_seam

# The parameters of generate itself; other arguments are for its config or the model.
_OWN_ARGUMENTS = frozenset(inspect.signature(GenerationMixin.generate).parameters)
# Of what decodes a call: ``generate`` looks at it twice, and working it out takes longer than all checks.
_SIGNATURE = inspect.signature(SelfSpec.__call__)


def _with_assistant(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        # All arguments by name, so that those which callables do not get can be removed.
        given = signature.bind(self, *args, **kwargs).arguments
        named = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        named.update(given.get("kwargs", {}))
        chosen = choose(self, assistant, named)
        if chosen is None:
            return original(self, *args, **kwargs)
        try:
            served = _served(self, chosen, named)
        except SelfSpecError as error:
            if not chosen.default_of:
                raise
            why, begun = _warn_of_plain(chosen, error), perf_counter()
            output = original(self, *args, **kwargs)
            seconds = perf_counter() - begun
            chosen.spec._knowledge.add_call(GenerationStats(total_seconds=seconds, drafts=False, left_to_generate=why))
            return output
        return original(self, **served)

    return generate


def _served(model: Any, chosen: Chosen, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make ``generate`` decode with a ``SelfSpec``.

    Raises:
        SelfSpecError: the ``SelfSpec`` cannot serve this call.
    """
    Anatomy.of(model)
    named = {**named, "generation_config": _without_assistant(named.get("generation_config"))}
    effective = _Options(model, named)
    check_options(model, effective)
    if effective.cache_implementation == "static":
        # Ours is one, if need be.
        compile_config = effective.compile_config or CompileConfig()
        named |= {"cache_implementation": "dynamic", "compile_config": compile_config}
    for_model = {k: v for k, v in named.items() if k not in _OWN_ARGUMENTS and not hasattr(model.generation_config, k)}
    check_inputs(model, named.get("inputs"), for_model)
    decode = chosen.spec if not chosen.default_of else functools.partial(_decode_or_plain, chosen)
    decode = functools.partial(
        decode, streamer=named.get("streamer"), synced_gpus=_is_synced(model, named.get("synced_gpus"))
    )
    vars(decode)["__signature__"] = _SIGNATURE
    named["custom_generate"] = decode
    if effective.stop_strings is not None:
        _serve_stop_strings(named, effective.stop_strings)
    return named


class _Options:
    """The options of a call: its arguments, else those of its config, else those of the model's.

    ``generate`` has the same in the end, but merges whole configs, which takes longer than all checks.
    """

    def __init__(self, model: Any, named: dict[str, Any]) -> None:
        self._own, self._named = model.generation_config, named

    def __getattr__(self, name: str) -> Any:
        default = getattr(self._own, name, None)
        if name in self._named and hasattr(self._own, name):
            return self._named[name]
        passed = getattr(self._named["generation_config"], name, None)
        # Unset by transformers, too: models of the Hub have this default for sliding windows.
        found = default if passed is None else passed
        return None if name == "cache_implementation" and found == "hybrid" else found


def _decode_or_plain(
    chosen: Chosen,
    model: Any,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    streamer: BaseStreamer | None,
    **model_kwargs: Any,
) -> Any:
    """Decodes with the ``SelfSpec``, and with transformers' own loop where it cannot serve the call.

    The caller did not request the ``SelfSpec``, so invalid logits are not an error either.
    """
    prepared: dict[str, Any] = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "synced_gpus": synced_gpus,
        "streamer": streamer,
    }
    request = Request(model, input_ids, **prepared, model_kwargs=model_kwargs)
    try:
        decode = chosen.spec.generation(request, checks_logits=False).ready(request)
    except SelfSpecError as error:
        output, stats = decode_plainly(model, input_ids, prepared | model_kwargs, _warn_of_plain(chosen, error))
        chosen.spec._knowledge.add_call(stats)
        return output
    return decode()


def _warn_of_plain(chosen: Chosen, error: SelfSpecError) -> str:
    """Warns that plain generate serves a call, and returns why, for the statistics."""
    warn_once_ignoring_numbers(
        f"the SelfSpec {chosen.default_of} cannot serve a call, so plain generate serves it: {error} (A call with "
        "generate(assistant=False) does without it and without this warning.)"
    )
    return f"this SelfSpec cannot serve it ({error})"


def _without_assistant(config: Any) -> Any:
    """Returns a copy of a passed generation config without the ``SelfSpec`` in it."""
    if not isinstance(config, GenerationConfig):
        return config
    kept = copy.copy(config)
    for name in CONFIG_NAMES:
        vars(kept).pop(name, None)
    return kept


def _is_synced(model: Any, synced_gpus: bool | None) -> bool:
    """The value that ``generate`` resolves ``synced_gpus`` to, which it does not pass to callables."""
    if synced_gpus is not None:
        return synced_gpus
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return False
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


def _serve_stop_strings(named: dict[str, Any], stop_strings: str | list[str]) -> None:
    """Builds the criterion for stop strings, since transformers drops the tokenizer when a callable decodes."""
    tokenizer = named.get("tokenizer")
    if tokenizer is None:
        raise UnsupportedOptionError(
            f"stop_strings={stop_strings!r} need the tokenizer: pass generate(tokenizer=tokenizer)."
        )
    criteria = named.get("stopping_criteria") or ()
    named["stopping_criteria"] = StoppingCriteriaList(
        [*criteria, StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)]
    )
    named["stop_strings"] = None


add_seam(GenerationMixin, "generate", _with_assistant)
for _pipeline in PIPELINES:
    add_seam(_pipeline, "_sanitize_parameters", with_assistant)
