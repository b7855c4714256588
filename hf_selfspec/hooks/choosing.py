"""Which ``SelfSpec`` serves a call of ``generate``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from transformers import GenerationConfig

from ..errors import SelfSpecError, SettingError, SettingTypeError, UnsupportedOptionError, warn_once
from ..learned import saving
from ..selfspec import CONFIG_KEY, SelfSpec
from .attached import attached

# Options of a call or generation config that choose another way of decoding, and so override one set elsewhere.
_OTHER_WAYS = ("assistant_model", "custom_generate", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_ALLOWED = "a SelfSpec, e.g. SelfSpec() or SelfSpec(draft=EarlyExit(layer=8)), or False for none"
# Where a generation config may hold a SelfSpec, as in a call.
CONFIG_NAMES = ("custom_generate", "assistant")
# How many SelfSpecs of saved configs are kept.
_RESTORED = 64


def choose(model: Any, assistant: Any, call: Mapping[str, Any]) -> tuple[SelfSpec, str] | None:
    """Chooses what serves a call: its arguments, its generation config, the model's, or the attached, in this order.

    Returns it with where it was set, if not in the call itself: plain ``generate`` then serves the calls that it cannot
    serve. ``None`` is for transformers' own decoding.
    """
    passed, own = call.get("generation_config"), getattr(model, "generation_config", None)
    if assistant is not None or isinstance(call.get("custom_generate"), SelfSpec):
        return _of_call(assistant, call)
    # A model that drafts for transformers' own assisted generation gets a copy of the main model's config.
    if _has_other_way(call) or getattr(passed, "is_assistant", None):
        return None
    in_passed, in_own = _in_config(passed), _in_own_config(own)
    default_of = f"in the generation config of this {type(model).__name__}"
    if in_passed is not None:
        # Pipelines and servers pass a copy of the model's config, so the caller did not choose the SelfSpec in it.
        return (in_passed, default_of if in_passed == in_own else "") if in_passed else None
    if isinstance(passed, GenerationConfig) and _has_other_way(vars(passed)):
        return None
    if in_own is not None:
        return (in_own, default_of) if in_own else None
    spec = attached(model)
    return None if spec is None else (spec, f"attached to this {type(model).__name__}")


def _of_call(assistant: Any, call: Mapping[str, Any]) -> tuple[SelfSpec, str] | None:
    custom = call.get("custom_generate")
    if assistant is False and isinstance(custom, SelfSpec):
        raise UnsupportedOptionError(
            "generate(assistant=False) is plain generate, and generate(custom_generate=...) holds a SelfSpec: give one."
        )
    if assistant is None or assistant is False:
        spec = custom if isinstance(custom, SelfSpec) else None
    elif not isinstance(assistant, SelfSpec):
        raise SettingTypeError(
            f"generate(assistant=...) takes {_ALLOWED}, got {assistant!r}. For a second model use transformers' "
            "`assistant_model`."
        )
    elif custom is not None:
        raise UnsupportedOptionError(
            "generate(assistant=...) and generate(custom_generate=...) both replace the decode loop: give one."
        )
    else:
        spec = assistant
    if spec is not None and call.get("assistant_model") is not None:
        raise UnsupportedOptionError(
            "generate(assistant_model=...) is another way of drafting than `assistant`: give one of the two."
        )
    return None if spec is None else (spec, "")


def _has_other_way(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) not in (None, False) for name in _OTHER_WAYS)


def _in_config(config: Any) -> SelfSpec | Literal[False] | None:
    """The ``assistant`` of a generation config, ``False`` where it is switched off."""
    custom, assistant = (getattr(config, name, None) for name in CONFIG_NAMES)
    if assistant is None and isinstance(custom, SelfSpec):
        return custom
    if isinstance(assistant, Mapping) and CONFIG_KEY in assistant:
        # The object replaces the settings read from the file, so that its statistics can be seen.
        config.assistant = assistant = _restored(json.dumps(assistant[CONFIG_KEY], sort_keys=True))
    if assistant is None or assistant is False or isinstance(assistant, SelfSpec):
        return assistant
    raise SettingTypeError(f"GenerationConfig(assistant=...) takes {_ALLOWED}, got {assistant!r}.")


@lru_cache(maxsize=_RESTORED)
def _restored(settings: str) -> SelfSpec:
    """The ``SelfSpec`` of a saved config, one for equal settings (JSON of ``to_dict``), so that it keeps learning."""
    encoded = json.loads(settings)
    if isinstance(encoded, str):
        raise SettingError(
            f"the generation config was saved with {encoded}, which holds a function or generator of your own that "
            "cannot be saved. Set `assistant` again."
        )
    try:
        _check_parts(encoded)
        spec = SelfSpec(**saving.decode_settings(encoded))
        if not getattr(spec.draft, "lossless", True):
            raise SettingError(f"{spec.draft!r} changes the output, which a file must not choose")
        return spec
    except (SelfSpecError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"the generation config was saved with an assistant that this version of hf_selfspec cannot use ({error}): "
            f"{settings}. Set `assistant` again."
        ) from error


def _check_parts(settings: Any) -> None:
    """Checks that a config names adapters and heads by existing folders, since a config must not start downloads."""
    if isinstance(settings, list):
        for one in settings:
            _check_parts(one)
    elif isinstance(settings, dict):
        for name, value in settings.items():
            if name not in saving.PARTS:
                _check_parts(value)
            elif value is not None and not (isinstance(value, str) and Path(value).is_dir()):
                raise SettingError(f"draft.{name} is {value!r}, and there is no such folder")


def _in_own_config(config: Any) -> SelfSpec | Literal[False] | None:
    """:func:`_in_config` of the model's own config, where an error becomes a warning: the caller did not write it."""
    try:
        return _in_config(config)
    except (SettingError, SettingTypeError) as error:
        warn_once(f"the model's generation config has an assistant that cannot be used and is left out: {error}")
        return None
