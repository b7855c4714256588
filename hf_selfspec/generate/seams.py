"""The places where transformers is changed, and how that is undone. Imports neither transformers nor torch."""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

# The attribute in which a wrapper of ours, of this import of the package or an earlier one, keeps itself and what it
# wraps. It keeps itself since wrappers of others have copies of all attributes.
_OURS = "_hf_selfspec_wrapper"
# The first seam, which is needed before any name of the package is used: ``model.generate(assistant=SelfSpec())`` looks
# ``generate`` up first. The module that serves it is imported when it is needed.
_GENERATION, _MIXIN, _SERVING = "transformers.generation.utils", "GenerationMixin", "hf_selfspec.generate.wrapper"
_CLASS = "hf_selfspec.selfspec"

Method = Callable[..., Any]
Wrap = Callable[[Method], Method]

# What wraps each method, None until that is imported. A reload of this module keeps the dictionary, since wrappers look
# things up in it.
_wraps: dict[tuple[type, str], Wrap | None] = globals().get("_wraps", {})
_is_installed = True
_running = threading.local()  # the wrappers that serve calls of this thread, and the objects whose methods they are


def add_seam(owner: type, name: str, wrap: Wrap | None) -> None:
    """Wraps a method of transformers, now and at each :func:`install`; ``None`` for what is imported later."""
    _wraps[owner, name] = wrap
    if _is_installed:
        _place(owner, name)


def install() -> None:
    """Gives ``generate`` of all transformers models the argument ``assistant``, and ``Trainer`` our training callbacks.

    Happens by itself when a name of the package is first used. Calls and trainings that use neither are not affected.
    Calling this again changes nothing; :func:`uninstall` undoes it. Wrappers of other packages stay.
    """
    global _is_installed
    _is_installed = True
    for owner, name in _wraps:
        _place(owner, name)


def uninstall() -> None:
    """Undoes :func:`install`. Below a wrapper of another package ours stays, and passes all calls on.

    ``generate(custom_generate=SelfSpec())`` still works; callbacks, and a ``SelfSpec`` that is attached or in a
    generation config, have no effect until the next :func:`install`.
    """
    global _is_installed
    _is_installed = False
    for owner, name in _wraps:
        _take_off(owner, name)


def watch_for_generate() -> None:
    """Makes ``generate`` take ``assistant`` as soon as transformers has it."""
    if (module := sys.modules.get(_GENERATION)) is None:
        sys.meta_path.insert(0, _Watch())
    else:
        _add_generate(module)


def _add_generate(module: Any) -> None:
    if (owner := getattr(module, _MIXIN, None)) is not None:
        add_seam(owner, "generate", _wraps.get((owner, "generate")))


class _Watch:
    """Among the finders of ``sys.meta_path``: wraps ``generate`` when its module is imported, which others find."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _GENERATION:
            return None
        others: list[Any] = sys.meta_path[sys.meta_path.index(self) + 1 :]
        if spec := next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None):
            run = spec.loader.exec_module

            def run_and_wrap(module: Any) -> None:
                run(module)
                _add_generate(module)

            spec.loader.exec_module = run_and_wrap
        return spec


def _wrapped_by(method: Any) -> Any:
    """What a wrapper of ours wraps, ``None`` for other methods."""
    wrapper, original = getattr(method, _OURS, (None, None))
    return original if wrapper is method else None


def _take_off(owner: type, name: str) -> None:
    while (original := _wrapped_by(getattr(owner, name))) is not None:
        setattr(owner, name, original)


def is_wrapped(method: Any) -> bool:
    """Returns whether a method is wrapped by this import of the package, perhaps below wrappers of others."""
    while method is not None:
        if getattr(method, "__globals__", None) is globals() and _wrapped_by(method) is not None:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _place(owner: type, name: str) -> None:
    if not is_wrapped(getattr(owner, name)):
        _take_off(owner, name)  # wrappers of an earlier import of the package
        setattr(owner, name, _wrapper(owner, name, getattr(owner, name)))


def _wrapper(owner: type, name: str, original: Method) -> Method:
    """A method that serves while we are installed, unless another wrapper of ours above it serves the call already."""
    serving: dict[Wrap, Method] = {}

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        running: dict[Any, Any] = vars(_running)
        key = owner, name
        outer, obj = before = running.get(key, (None, None))
        is_inner = outer is not None and outer is not method and obj is self
        if not _is_installed or is_inner:
            return original(self, *args, **kwargs)
        # There may be a SelfSpec: as an argument, or attached, also where a pickle alone has imported its class.
        if (wrap := _wraps[key]) is None and ("assistant" in kwargs or _CLASS in sys.modules):
            importlib.import_module(_SERVING)
            wrap = _wraps[key]
        if wrap is None:
            return original(self, *args, **kwargs)
        if wrap not in serving:
            serving.clear()
            serving[wrap] = wrap(original)
        running[key] = method, self
        try:
            return serving[wrap](self, *args, **kwargs)
        finally:
            running[key] = before

    setattr(method, _OURS, (method, original))
    return method
