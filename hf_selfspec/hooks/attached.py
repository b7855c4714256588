"""Attaching a ``SelfSpec`` to a model, so that every ``generate`` uses it: for callers that cannot pass an argument."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from ..errors import SettingTypeError
from ..model.anatomy import causal_lm
from ..selfspec import SelfSpec

_specs: weakref.WeakKeyDictionary[PreTrainedModel, SelfSpec] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Attachment:
    """What :func:`attach` returns: a context manager that ends the attachment.

    Attributes:
        spec: the attached ``SelfSpec``; ``with ... as`` binds it, too.
    """

    def __init__(self, model: PreTrainedModel, spec: SelfSpec) -> None:
        self.spec = spec
        self._model = model
        self._before = _replace(model, spec)

    def __enter__(self) -> SelfSpec:
        if attached(self._model) is not self.spec:
            self._before = _replace(self._model, self.spec)
        return self.spec

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _replace(self._model, self._before)


def attach(model: Any, spec: SelfSpec) -> Attachment:
    """Makes every ``model.generate(...)`` use ``spec``, for trainers, harnesses, pipelines and agents that call it.

    A call that chooses for itself is not changed: ``assistant=`` with another ``SelfSpec``, ``assistant=False`` for
    plain ``generate``, ``assistant_model``, ``custom_generate``, ``prompt_lookup_num_tokens`` and the like; nor is one
    whose generation config has an ``assistant``. Calls that ``spec`` cannot serve (beam search, ``output_attentions``,
    an encoder-decoder model) use plain ``generate``, and a warning gives the reason once.

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
    return Attachment(causal_lm(model, "attach"), spec)


def detach(model: Any) -> None:
    """Undoes :func:`attach`; a model that has nothing attached is left as it is.

    Args:
        model: the model that was given to :func:`attach`, or the PEFT model around it, or the one inside.

    Raises:
        SettingTypeError: ``model`` is neither a model of transformers nor a PEFT model around one.
    """
    _replace(causal_lm(model, "detach"), None)


def attached(model: PreTrainedModel) -> SelfSpec | None:
    """Returns what is attached to ``model``, ``None`` if nothing is."""
    with _lock:
        return _specs.get(model)


def _replace(model: PreTrainedModel, spec: SelfSpec | None) -> SelfSpec | None:
    """Attaches ``spec``, or nothing, and returns what was attached before."""
    with _lock:
        before = _specs.pop(model, None)
        if spec is not None:
            _specs[model] = spec
        return before
