"""A ``SelfSpec`` from a command line: a preset's name, a folder, or a Python expression."""

import ast
import os
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import SelfSpecError, SettingError, brief
from ..learned.files import path_of
from ..learned.saving import FILE_NAME, class_named
from ..modules.draft_module import DraftModule
from ..selfspec import SelfSpec

# The presets that need no further argument, by their names in the table of methods.
PRESETS: dict[str, Callable[[], SelfSpec]] = {"selfspec": SelfSpec} | {
    name: getattr(SelfSpec, name) for name in ("adaspeed", "layerskip", "lookup", "mtp", "quantized", "swift")
}
# Methods of SelfSpec that an expression may call.
_CONSTRUCTORS = sorted({*PRESETS, "dssd", "from_pretrained", "kangaroo"} - {"selfspec"})
_OPENING, _CLOSING = "([{", ")]}"


def read_spec(text: str, option: str = "--spec") -> SelfSpec:
    """The ``SelfSpec`` of a preset's name, a saved folder, or an expression, which runs no code but settings'."""
    try:
        if text in PRESETS:
            return PRESETS[text]()
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
    part = DraftModule.load(folder)
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
        f"Give one of {', '.join(sorted(PRESETS))}, a folder that save_pretrained has written, or an expression such "
        'as "SelfSpec.layerskip(8)".'
    )
