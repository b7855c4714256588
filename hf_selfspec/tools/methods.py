"""The methods of generating that are compared; one more line adds another."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from ..errors import SelfSpecError, SettingError, SettingTypeError, brief, muted
from ..model.internals import let_compile_on_cpu
from ..model.kernels.linear import is_served
from ..modules.shipped import attached_mtp
from ..selfspec import SelfSpec, begun_anew
from .spec_text import read_spec

PLAIN = "plain"
# Plain generate with the linear layers that a ``SelfSpec`` chooses: what of a gain is not drafts.
LAYERS = "plain-linears"
# How tables group methods.
PLAIN_GROUP, LOOKUP_GROUP, COMPILED_GROUP, OURS_GROUP = "plain", "prompt lookup", "compiled", "ours"
_LOOKUP = re.compile(r"prompt-lookup\((\d+)(?:, ?(\d+))?\)")
# Tokens that prompt lookup drafts unless another number is given: transformers' own default.
_LOOKUP_TOKENS = 10
# New tokens of a call that shows whether a preset fits the model.
_TRIED = 3
# What this package and transformers raise for a method that does not fit a model.
_REFUSALS = (SelfSpecError, ValueError, NotImplementedError)

Methods = Iterable[str | SelfSpec] | Mapping[str, str | SelfSpec]


@dataclass(frozen=True)
class Method:
    """One method of generating."""

    name: str
    group: str
    call: str  # the arguments of ``generate`` that a user writes for it
    options: Mapping[str, Any] = field(default_factory=dict)  # its own arguments of ``generate``
    make: Callable[[], SelfSpec] | None = None  # creates its ``SelfSpec``
    is_static: bool = False  # its static cache has one size in all calls, so that graphs can be reused


def _lookup(size: int, tokens: int = _LOOKUP_TOKENS) -> Method:
    """Transformers' prompt lookup with n-grams of up to ``size`` tokens and ``tokens`` drafted ones."""
    options = {"max_matching_ngram_size": size, "prompt_lookup_num_tokens": tokens}
    call = f"prompt_lookup_num_tokens={tokens}, max_matching_ngram_size={size}"
    name = f"prompt-lookup({size})" if tokens == _LOOKUP_TOKENS else f"prompt-lookup({size}, {tokens})"
    return Method(name, LOOKUP_GROUP, call, options)


def _ours(name: str, make: Callable[[], SelfSpec]) -> Method:
    return Method(name, OURS_GROUP, f"assistant={name}", make=make)


_COMPILING = let_compile_on_cpu(CompileConfig())
_STATIC = {"cache_implementation": "static", "compile_config": _COMPILING}
_STATIC_LOOKUP = (f'{_lookup(2).call}, cache_implementation="static"', {**_lookup(2).options, **_STATIC})
_FIT = "it needs a part that was fitted to the model: `hf-selfspec fit {0} ...`, then name the folder in --methods"
_ON_CPU = "it compiles, which transformers does on a CPU only when told to; name it in --methods to measure it"
_ATTACHES = "it attaches the model's MTP layers, with which SelfSpec() drafts, too; name it in --methods to measure it"
_WITH_PARTS = {
    "SelfSpec.kangaroo(adapter)": _FIT.format("adapter"),
    "SelfSpec.dssd(heads)": _FIT.format("heads"),
}
_LOOKUPS = (_lookup(2), _lookup(3), _lookup(2, 5))
_NAMES = ("lookup", "quantized", "mtp", "layerskip", "swift", "adaspeed")
_PRESETS = ("SelfSpec()", *(f"SelfSpec.{name}()" for name in _NAMES))
METHODS = {
    method.name: method
    for method in (
        Method(PLAIN, PLAIN_GROUP, "(nothing)"),
        *_LOOKUPS,
        Method(LAYERS, PLAIN_GROUP, "(plain with the linear layers of a SelfSpec, to compare with)"),
        Method("static-compiled", COMPILED_GROUP, 'cache_implementation="static"', _STATIC, is_static=True),
        Method("prompt-lookup-compiled", COMPILED_GROUP, _STATIC_LOOKUP[0], _STATIC_LOOKUP[1], is_static=True),
        *(_ours(text, partial(read_spec, text)) for text in _PRESETS),
    )
}

# Short names on the command line for one or several of them.
SHORT = {
    "prompt-lookup": tuple(method.name for method in _LOOKUPS),
    "selfspec": ("SelfSpec()",),
    **{name: (f"SelfSpec.{name}()",) for name in _NAMES},
}


def methods_of(chosen: Methods) -> list[Method]:
    """Returns plain generate and the chosen methods."""
    items = list(chosen.items()) if isinstance(chosen, Mapping) else [(None, method) for method in chosen]
    methods = [method for name, choice in items for method in _methods(name, choice)]
    names = [method.name for method in methods]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingError(f"methods: {', '.join(twice)} is given twice. Give each a name of its own: {{name: spec}}.")
    return list({method.name: method for method in (METHODS[PLAIN], *methods)}.values())


def _methods(name: str | None, choice: Any) -> list[Method]:
    """The methods of a name, also a short one, of a text as for ``--spec``, or of a ``SelfSpec``."""
    if isinstance(choice, SelfSpec):
        return [_ours(name or _shown(choice), lambda: begun_anew(choice))]
    if not isinstance(choice, str):
        raise SettingTypeError(f"methods must be names or SelfSpec objects, got {choice!r}.")
    if names := SHORT.get(choice, (choice,) if choice in METHODS else ()):
        return [METHODS[name] for name in names]
    if numbers := _LOOKUP.fullmatch(choice):
        return [_lookup(int(numbers[1]), int(numbers[2] or _LOOKUP_TOKENS))]
    try:
        spec = read_spec(choice, "--methods")
    except SettingError as error:
        others = ", ".join([PLAIN, "static-compiled", *SHORT])
        raise SettingError(f"{error} Other methods are {others}.") from error
    return _methods(name or choice, spec)


def _shown(spec: SelfSpec) -> str:
    usual = SelfSpec()
    names = ("draft", "stop", "tree", "max_draft", "graphs", "exact")
    shown = [f"{name}={getattr(spec, name)!r}" for name in names if getattr(spec, name) != getattr(usual, name)]
    return f"SelfSpec({', '.join(shown)})"


def fitting(model: PreTrainedModel, chosen: Sequence[Method] | None, batch: Any) -> tuple[list[Method], dict[str, str]]:
    """Returns the chosen methods if all fit, as calls of a few tokens show; without a choice all that fit, and reasons
    against the others."""
    for method in chosen or ():
        if why := _why_not(model, method, batch):
            raise SettingError(f"methods: {method.name} does not fit this model: {why}. Leave it out.")
    if chosen is not None:
        return list(chosen), {}
    left_out = dict(_WITH_PARTS)
    for name, method in METHODS.items():
        if why := _why_only_by_name(model, method) or _why_not(model, method, batch):
            left_out[name] = why
    return [method for name, method in METHODS.items() if name not in left_out], left_out


def _why_only_by_name(model: PreTrainedModel, method: Method) -> str:
    if method.group == COMPILED_GROUP and model.device.type == "cpu":
        return _ON_CPU
    return _ATTACHES if method.name == "SelfSpec.mtp()" and attached_mtp(model) is None else ""


def _why_not(model: PreTrainedModel, method: Method, batch: Any) -> str:
    if method.name == PLAIN:
        return ""
    if method.name == LAYERS:
        has_ways = model.device.type == "cpu" and any(is_served(module) for module in model.modules())
        return "" if has_ways else "no linear layer has another way here: only large ones in float32 on a CPU do"
    call: dict[str, Any] = dict(method.options) if method.make is None else {"assistant": method.make()}
    if method.is_static:
        call["disable_compile"] = True  # graphs for so short a cache would be found again by calls that count
    sources = getattr(getattr(call.get("assistant"), "draft", None), "sources", ())
    # A cascade leaves out silently what does not fit.
    alone = [{"assistant": SelfSpec(source)} for source in sources if not source.is_optional]
    try:
        with muted():
            for options in (*alone, call):
                limits = {"max_new_tokens": _TRIED, "do_sample": False}
                model.generate(batch.ids, attention_mask=batch.mask, **limits, **options)
    except _REFUSALS as error:
        return brief(error).removesuffix(".")
    return ""
