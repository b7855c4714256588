"""``assistant=`` for pipelines that take the arguments of ``generate`` only in ``generate_kwargs``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import AnyToAnyPipeline, ImageTextToTextPipeline

# Their other arguments go to the processor, which ignores those that it does not know.
PIPELINES = (ImageTextToTextPipeline, AnyToAnyPipeline)


def with_assistant(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``_sanitize_parameters`` of a pipeline: ``assistant`` goes into its ``generate_kwargs``.

    An ``assistant`` given to the constructor also holds for calls with ``generate_kwargs`` of their own.
    """

    @functools.wraps(original)
    def sanitize(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        preprocess, forward, postprocess = original(self, *args, **kwargs)
        before = getattr(self, "_forward_params", {}).get("generate_kwargs") or {}
        now = forward.get("generate_kwargs") or before
        for given in (now, before):
            assistant = given.get("assistant") if assistant is None else assistant
        if assistant is not None:
            forward["generate_kwargs"] = {**now, "assistant": assistant}
        return preprocess, forward, postprocess

    return sanitize
