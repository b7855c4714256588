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
STATIC = "static-compiled"
_LOOKUP = re.compile(r"prompt-lookup\((\d+)(?:, ?(\d+))?\)")
# Tokens that prompt lookup drafts unless another number is given: transformers' own default.
_LOOKUP_TOKENS = 10
# New tokens of a call that shows whether a method fits the model.
_TRIED = 3
# What this package and transformers raise for a method that does not fit a model.
_REFUSALS = (SelfSpecError, ValueError, NotImplementedError)

Methods = Iterable[str | SelfSpec] | Mapping[str, str | SelfSpec]


@dataclass(frozen=True)
class Method:
    """One method of generating: its own arguments of ``generate``, or what creates its ``SelfSpec``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], SelfSpec] | None = None


def _lookup(size: int, tokens: int = _LOOKUP_TOKENS) -> Method:
    """Transformers' prompt lookup with n-grams of up to ``size`` tokens and ``tokens`` drafted ones."""
    name = f"prompt-lookup({size})" if tokens == _LOOKUP_TOKENS else f"prompt-lookup({size}, {tokens})"
    return Method(name, {"max_matching_ngram_size": size, "prompt_lookup_num_tokens": tokens})


_LOOKUPS = (_lookup(2), _lookup(3), _lookup(2, 5))
_PRESETS = ("lookup", "quantized", "mtp", "layerskip", "swift", "adaspeed")
_SPECS = ("SelfSpec()", *(f"SelfSpec.{name}()" for name in _PRESETS))
METHODS = {
    method.name: method
    for method in (
        Method(PLAIN),
        *_LOOKUPS,
        Method(LAYERS),
        Method(STATIC, {"cache_implementation": "static", "compile_config": let_compile_on_cpu(CompileConfig())}),
        *(Method(text, make=partial(read_spec, text)) for text in _SPECS),
    )
}
# Short names on the command line for one or several of them.
SHORT = {
    "prompt-lookup": tuple(method.name for method in _LOOKUPS),
    "selfspec": ("SelfSpec()",),
    **{name: (f"SelfSpec.{name}()",) for name in _PRESETS},
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
        return [Method(name or repr(choice), make=lambda: begun_anew(choice))]
    if not isinstance(choice, str):
        raise SettingTypeError(f"methods must be names or SelfSpec objects, got {choice!r}.")
    if names := SHORT.get(choice, (choice,) if choice in METHODS else ()):
        return [METHODS[each] for each in names]
    if numbers := _LOOKUP.fullmatch(choice):
        return [_lookup(int(numbers[1]), int(numbers[2] or _LOOKUP_TOKENS))]
    try:
        return _methods(name or choice, read_spec(choice, "--methods"))
    except SettingError as error:
        raise SettingError(f"{error} Other methods are {', '.join([PLAIN, STATIC, *SHORT])}.") from error


def fitting(model: PreTrainedModel, chosen: Sequence[Method] | None, batch: Any) -> tuple[list[Method], dict[str, str]]:
    """Returns the chosen methods if all fit, as calls of a few tokens show; without a choice all that fit, and reasons
    against the others."""
    left_out = dict[str, str]()
    for method in METHODS.values() if chosen is None else chosen:
        if why := ("" if chosen else _why_only_by_name(model, method)) or _why_not(model, method, batch):
            left_out[method.name] = why
    if chosen is None:
        return [method for name, method in METHODS.items() if name not in left_out], left_out
    for name, why in left_out.items():
        raise SettingError(f"methods: {name} does not fit this model: {why}. Leave it out.")
    return list(chosen), {}


def _why_only_by_name(model: PreTrainedModel, method: Method) -> str:
    if method.name == STATIC and model.device.type == "cpu":
        return "transformers compiles on a CPU only when told to; name it in --methods to measure it"
    if method.name == "SelfSpec.mtp()" and attached_mtp(model) is None:
        return "it attaches MTP layers, with which SelfSpec() drafts, too; name it in --methods to measure it"
    return ""


def _why_not(model: PreTrainedModel, method: Method, batch: Any) -> str:
    if method.name == PLAIN:
        return ""
    if method.name == LAYERS:
        has_ways = model.device.type == "cpu" and any(map(is_served, model.modules()))
        return "" if has_ways else "no linear layer has another way here: only large ones in float32 on a CPU do"
    call: dict[str, Any] = dict(method.options) if method.make is None else {"assistant": method.make()}
    if method.name == STATIC:
        call["disable_compile"] = True  # graphs for so short a cache would be found again by calls that count
    sources = getattr(getattr(call.get("assistant"), "draft", None), "sources", ())
    # A cascade leaves out what does not fit.
    alone = [{"assistant": SelfSpec(source)} for source in sources]
    try:
        with muted():
            for options in (*alone, call):
                model.generate(**batch.inputs, max_new_tokens=_TRIED, do_sample=False, **options)
    except _REFUSALS as error:
        return brief(error).removesuffix(".")
    return ""
