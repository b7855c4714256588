"""Which ``SelfSpec`` serves a call of ``generate``: of the call, of a generation config, or attached to the model."""

import inspect
import sys
import weakref
from collections.abc import Mapping
from types import CodeType
from typing import Any, Literal

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..errors import SettingTypeError, UnsupportedOptionError, brief, warn_once
from ..model.anatomy import causal_lm
from ..model.forks import new_lock
from ..selfspec import SelfSpec

# Options of a call or generation config that choose another way of decoding, and so override a SelfSpec set elsewhere.
_OTHER_WAYS = ("assistant_model", "custom_generate", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_ALLOWED = "a SelfSpec, e.g. SelfSpec() or SelfSpec(draft=EarlyExit(layer=8)), or False for none"
_NO_CODE = compile("", "", "exec")
# Where a generation config may hold a SelfSpec, as in a call.
CONFIG_NAMES = ("custom_generate", "assistant")

_specs: weakref.WeakKeyDictionary[PreTrainedModel, SelfSpec] = weakref.WeakKeyDictionary()
_lock = new_lock()


def choose(model: Any, assistant: Any, call: Mapping[str, Any]) -> tuple[SelfSpec, str] | None:
    """Returns what serves a call, and where it was set if not in the call itself, else an empty string. The call's
    arguments come first, then its generation config, that of the model, and what is attached to the model. ``None`` is
    for transformers' own decoding."""
    custom = call.get("custom_generate")
    if isinstance(custom, SelfSpec):
        if assistant is False:
            raise UnsupportedOptionError(
                "generate(assistant=False) is plain generate, and generate(custom_generate=...) holds a SelfSpec: give "
                "one."
            )
        if assistant is None:
            assistant, custom = custom, None
    if assistant is not None:
        return (_checked(assistant, custom, call), "") if assistant is not False else None
    passed = call.get("generation_config")
    # A model that drafts for transformers' own assisted generation gets a copy of the main model's config.
    if _has_other_way(call) or getattr(passed, "is_assistant", None):
        return None
    in_passed = _in_config(passed)
    # Behind the wrapper and its seam is perhaps the generate of a model around this one, whose config then counts, too.
    caller = sys._getframe(3)
    outer = caller.f_locals.get("self") if caller.f_code.co_name == "generate" else None
    models = [model, outer] if isinstance(outer, PreTrainedModel) and _calls_others(caller.f_code) else [model]
    configs = [(getattr(each, "generation_config", None), type(each).__name__) for each in models]
    configured = [(_in_config(config), f"in the generation config of this {name}") for config, name in configs]
    if in_passed is not None:
        # Pipelines and servers pass a copy of the model's config, so the caller did not choose the SelfSpec in it.
        default_of = next((default_of for spec, default_of in configured if spec == in_passed), "")
        return (in_passed, default_of) if in_passed else None
    if isinstance(passed, GenerationConfig) and _has_other_way(vars(passed)):
        return None
    defaults = [*configured, (_attached(model), f"attached to this {type(model).__name__}")]
    spec, default_of = next((default for default in defaults if default[0] is not None), (None, ""))
    return (spec, default_of) if spec else None


def _checked(assistant: Any, custom: Any, call: Mapping[str, Any]) -> SelfSpec:
    if not isinstance(assistant, SelfSpec):
        raise SettingTypeError(
            f"generate(assistant=...) takes {_ALLOWED}, got {assistant!r}. For a second model use transformers' "
            "`assistant_model`."
        )
    if custom is not None:
        raise UnsupportedOptionError(
            "generate(assistant=...) and generate(custom_generate=...) both replace the decode loop: give one."
        )
    if call.get("assistant_model") is not None:
        raise UnsupportedOptionError(
            "generate(assistant_model=...) is another way of drafting than `assistant`: give one of the two."
        )
    return assistant


def _has_other_way(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) not in (None, False) for name in _OTHER_WAYS)


def _in_config(config: Any) -> SelfSpec | Literal[False] | None:
    """The ``assistant`` of a generation config, ``False`` where it is switched off."""
    custom, assistant = (getattr(config, name, None) for name in CONFIG_NAMES)
    if assistant is None and isinstance(custom, SelfSpec):
        return custom
    if assistant is None or assistant is False or isinstance(assistant, SelfSpec):
        return assistant
    why = f"GenerationConfig(assistant=...) takes {_ALLOWED}, got {brief(repr(assistant))}."
    if not isinstance(assistant, (dict, list, str, int, float)):
        raise SettingTypeError(why)
    warn_once(f"the assistant of a generation config is left out: {why}")  # as files hold it, which others wrote
    return None


def _own_generate(model: Any) -> CodeType | None:
    """The code of ``generate`` where a model, or its class, has one of its own."""
    generate = vars(model).get("generate", getattr(type(model), "generate", GenerationMixin.generate))
    return None if generate is GenerationMixin.generate else getattr(inspect.unwrap(generate), "__code__", None)


def _calls_others(code: CodeType | None) -> bool:
    """Whether a ``generate`` leaves decoding to models inside; one with ``super()`` decodes itself (as in Moshi)."""
    return code is not None and "generate" in code.co_names and "__class__" not in code.co_freevars


def _reached(model: PreTrainedModel) -> list[PreTrainedModel]:
    """What is attached to with a model: also the models inside that decode in its place."""
    parts = model.modules() if _calls_others(_own_generate(model)) else ()
    return [model, *(part for part in parts if isinstance(part, GenerationMixin) and part is not model)]


class Attachment:
    """What :func:`attach` returns: a context manager that ends the attachment.

    Attributes:
        spec: the attached ``SelfSpec``; ``with ... as`` binds it, too.
    """

    def __init__(self, model: PreTrainedModel, spec: SelfSpec) -> None:
        self.spec, self._models = spec, _reached(model)
        self._before = [_replace(each, spec) for each in self._models]

    def __enter__(self) -> SelfSpec:
        if any(_attached(each) is not self.spec for each in self._models):
            self._before = [_replace(each, self.spec) for each in self._models]
        return self.spec

    def __exit__(self, *error: object) -> None:
        for each, before in zip(self._models, self._before, strict=True):
            _replace(each, before)


def attach(model: Any, spec: SelfSpec) -> Attachment:
    """Makes every ``model.generate(...)`` use ``spec``, for trainers, harnesses, pipelines and agents that call it.

    A call that names its own way is not changed: ``assistant=`` with another ``SelfSpec``, ``assistant=False`` for
    plain ``generate``, ``assistant_model``, ``custom_generate``, ``prompt_lookup_num_tokens`` and the like; nor is one
    whose generation config has an ``assistant``. Calls that ``spec`` cannot serve (beam search, ``output_attentions``,
    an encoder-decoder model) use plain ``generate``, and a warning gives the reason once. Where a model's ``generate``
    calls that of a language model inside (BLIP-2, Kosmos-2), it is attached to that one, too. ``generate_batch`` is not
    reached, nor is a ``generate`` that does not call transformers' own as it is now; a warning says where that may be.

    The attachment belongs to the model object, in all threads. Nothing is stored on the model, so copies and pickles
    of it have no attachment. It lasts until :func:`detach`, or until the end of a ``with`` block, which restores what
    was attached before::

        hf_selfspec.attach(model, SelfSpec())

        with hf_selfspec.attach(model, SelfSpec()) as spec:
            model.generate(**inputs)
        print(spec.stats)

    Args:
        model: a model of transformers or a PEFT model around one; may be wrapped by PEFT or accelerate later.
        spec: the ``SelfSpec`` to use; it replaces one that was attached before.

    Returns:
        A context manager; using it as one is optional.

    Raises:
        SettingTypeError: ``model`` is not such a model, or ``spec`` is not a ``SelfSpec``.
    """
    if not isinstance(spec, SelfSpec):
        raise SettingTypeError(
            "attach(model, spec) takes a SelfSpec, e.g. SelfSpec() or SelfSpec(draft=EarlyExit(layer=8)), got "
            f"{spec!r}."
        )
    inner = causal_lm(model, "attach")
    own = vars(inner).get("generate", type(inner).generate)
    if own is not GenerationMixin.generate and "generate" not in getattr(own, "__code__", _NO_CODE).co_names:
        warn_once(
            f"the generate of {type(inner).__name__} has a decode loop of its own, or calls a method that was taken "
            "from the model before. An attached SelfSpec reaches it only if hf_selfspec was imported before that; "
            "otherwise nothing is drafted, and spec.stats stays None."
        )
    return Attachment(inner, spec)


def detach(model: Any) -> None:
    """Undoes :func:`attach`; a model that has nothing attached is left as it is.

    Args:
        model: the model that was given to :func:`attach`, or the PEFT model around it, or the one inside.

    Raises:
        SettingTypeError: ``model`` is neither a model of transformers nor a PEFT model around one.
    """
    for each in _reached(causal_lm(model, "detach")):
        _replace(each, None)


def _attached(model: PreTrainedModel) -> SelfSpec | None:
    with _lock:
        return _specs.get(model)


def _replace(model: PreTrainedModel, spec: SelfSpec | None) -> SelfSpec | None:
    """Attaches ``spec``, or nothing, and returns what was attached before."""
    with _lock:
        before = _specs.pop(model, None)
        if spec is not None:
            _specs[model] = spec
        return before
