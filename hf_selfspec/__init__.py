"""Self-speculative decoding: any causal language model of transformers generates faster, without a second model.

``model.generate(**inputs, assistant=SelfSpec())``: part of the model drafts tokens, the whole model verifies them, and
the output stays the same.
"""

import ast
import importlib
import pkgutil
from typing import Any

from .generate.seams import watch_for_generate

__version__ = "0.1.0"

# The module of each public name. Only the names that are used are imported.
_MODULES = {
    alias.name: f"{__name__}.{node.module}"
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.generate.wrapper")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


watch_for_generate()
