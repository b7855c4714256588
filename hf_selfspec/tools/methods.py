"""The methods of generating that are compared, and the texts that name them.

One more line adds a method. A ``SelfSpec`` is named by a preset, a folder or a Python expression.
"""

import ast
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from ..errors import SelfSpecError, SettingError, SettingTypeError, brief, muted
from ..learned.files import path_of
from ..learned.saving import FILE_NAME, class_named
from ..model.internals import let_compile_on_cpu
from ..model.linear import is_served
from ..modules.draft_module import DraftModule
from ..modules.mtp import MtpHead
from ..modules.shipped import attached_head
from ..selfspec import SelfSpec, begun_anew

PLAIN = "plain"
# Plain generate with the linear layers that a ``SelfSpec`` chooses: what of a gain is not drafts.
LAYERS = "plain-linears"
STATIC = "static-compiled"
# The presets that need no further argument, by their names on the command line.
_PRESETS = ("lookup", "quantized", "mtp", "layerskip", "swift", "adaspeed")
SPECS = {"selfspec": "SelfSpec()"} | {name: f"SelfSpec.{name}()" for name in _PRESETS}
# Methods of SelfSpec that an expression may call.
_CONSTRUCTORS = sorted([*_PRESETS, "dssd", "from_pretrained", "kangaroo"])
_OPENING, _CLOSING = "([{", ")]}"
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


def read_spec(text: str, option: str = "--spec") -> SelfSpec:
    """The ``SelfSpec`` of a preset's name, a saved folder, or an expression, which runs no code but settings'."""
    try:
        if text in SPECS:
            return _of_expression(SPECS[text])
        if text and os.path.isdir(path_of(text)):
            return _of_folder(text)
        return _of_expression(text)
    except SelfSpecError as error:
        raise SettingError(f"{option} {text}: {error}") from error


def split(texts: Iterable[str]) -> list[str]:
    """Splits the values of an option at commas, except at those inside brackets."""
    items: list[str] = []
    for text in texts:
        depth = 0
        for part in text.split(","):
            if depth:
                items[-1] += f",{part}"
            else:
                items.append(part)
            depth += sum(map(part.count, _OPENING)) - sum(map(part.count, _CLOSING))
    return [item.strip() for item in items if item.strip()]


def _of_folder(folder: str) -> SelfSpec:
    if (path_of(folder) / FILE_NAME).is_file():
        return SelfSpec.from_pretrained(folder)
    part = DraftModule.from_pretrained(folder)
    if not part.usage:
        raise SettingError(
            f"this folder holds a {part.kind}, which needs a draft: write SelfSpec(EarlyExit(8, {folder!r})) with the "
            "exit layer that is meant."
        )
    return _of_expression(part.usage.format(folder))


def _of_expression(text: str) -> SelfSpec:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingError(f"there is no such folder or preset. {_advice()}") from error
    if isinstance(tree, (ast.Name, ast.Attribute)):
        raise SettingError(f"there is no such folder or preset. {_advice()}")
    spec = _value(tree)
    if not isinstance(spec, SelfSpec):
        raise SettingError(f"this is not a SelfSpec but {type(spec).__name__}. {_advice()}")
    return spec


def _value(node: ast.expr) -> Any:
    match node:
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Call(func=function, args=args, keywords=keywords) if all(word.arg for word in keywords):
            return _called(function, [_value(arg) for arg in args], {str(w.arg): _value(w.value) for w in keywords})
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"`{ast.unparse(node)}` is not allowed in it: give only numbers, strings, lists, SelfSpec, its presets and "
            "classes of settings."
        ) from error


def _called(function: ast.expr, args: list[Any], keywords: dict[str, Any]) -> Any:
    name = ast.unparse(function)
    make: Callable[..., Any] | None = None
    match function:
        case ast.Name(id="SelfSpec"):
            make = SelfSpec
        case ast.Name(id=class_name):
            make = class_named(class_name)
        case ast.Attribute(value=ast.Name(id="SelfSpec"), attr=method) if method in _CONSTRUCTORS:
            make = getattr(SelfSpec, method)
    if make is None:
        raise SettingError(
            f"`{name}` cannot be called in it: only SelfSpec, SelfSpec.{', SelfSpec.'.join(_CONSTRUCTORS)} and classes "
            "of settings such as EarlyExit can."
        )
    try:
        return make(*args, **keywords)
    except SelfSpecError:
        raise
    except TypeError as error:
        raise SettingError(f"`{name}` does not take that ({brief(error)}).") from error


def _advice() -> str:
    return (
        f"Give one of {', '.join(sorted(SPECS))}, a folder that save_pretrained has written, or an expression such "
        'as "SelfSpec.layerskip(8)".'
    )


# Transformers' prompt lookup, by the longest n-grams, and the drafted tokens where these are not its default, 10.
_LOOKUPS = tuple(
    Method(f"prompt-lookup({of})", {"max_matching_ngram_size": size, "prompt_lookup_num_tokens": tokens})
    for of, size, tokens in (("2", 2, 10), ("3", 3, 10), ("2, 5", 2, 5))
)
METHODS = {
    method.name: method
    for method in (
        Method(PLAIN),
        *_LOOKUPS,
        Method(LAYERS),
        Method(STATIC, {"cache_implementation": "static", "compile_config": let_compile_on_cpu(CompileConfig())}),
        *(Method(text, make=partial(read_spec, text)) for text in SPECS.values()),
    )
}
# Short names on the command line for one or several of them.
SHORT = {"prompt-lookup": tuple(method.name for method in _LOOKUPS)} | {name: (text,) for name, text in SPECS.items()}


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
    if method.name == "SelfSpec.mtp()" and not isinstance(attached_head(model), MtpHead):
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
