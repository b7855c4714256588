"""Heads that are attached to a model, with which every cascade drafts."""

from __future__ import annotations

import logging
import os
from typing import Any, cast

from transformers import PreTrainedModel

from ..errors import SettingError, SettingTypeError
from ..learned.saving import class_named
from ..model.anatomy import Anatomy, causal_lm
from ..model.fingerprint import Fingerprint
from ..modules.block import BlockHead
from ..modules.draft_module import DraftModule, format_of, read_config, reading
from ..modules.mtp import MtpHead
from ..modules.published import verifier_of
from ..modules.shipped import COUNTS, SPECULATORS, attach, load_layers, load_mtp, ships_layers
from .source import DraftSource

_logger = logging.getLogger(__name__)


def load_head(model: Any, path: str | os.PathLike[str]) -> DraftModule:
    """Attaches a head to a model: from then on it drafts in every cascade, that of ``SelfSpec()`` included.

    It is freed with the model, and replaces a head that was attached before, by :func:`load_mtp`, too.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        path: the folder or Hub repository of a block head (see :class:`Block`), an EAGLE-3 head (see
            :meth:`MTP.from_eagle3`), an MTP layer (of speculators, of this package, or in a checkpoint of the model,
            see :func:`load_mtp`), an assistant of Gemma 4, an adapter (see :class:`EarlyExitAdapter`), or exit heads
            (see :class:`DynamicExit`).

    Returns:
        The head, whose ``str`` tells in one line what it is (it is logged, too): kind, layers, vocabulary, and for
        which model it was made.

    Raises:
        SettingError, SettingTypeError: there is no such head, it is damaged, of a variant that is not served, or of
            another model.
        UnsupportedModelError: its layers keep more than keys and values.
    """
    inner: PreTrainedModel = causal_lm(model, "load_head")
    if not isinstance(path, (str, os.PathLike)):
        raise SettingTypeError(f"load_head(path) must be a folder or a name on the Hub, got {path!r}.")
    name = os.fspath(path)
    config = read_config("head", name)
    if config.get("speculators_model_type") == "mtp":
        head: DraftModule = load_layers(inner, name, SPECULATORS)
    elif format_of(config) is None and ships_layers(inner):
        head = load_mtp(inner, name)
    else:
        head = DraftModule.from_pretrained(name)
    source = source_of(head)
    if isinstance(head, (MtpHead, BlockHead)):
        head.read_layers(inner)
    head.check(lambda: Fingerprint.of_decoder(inner))
    source.check(Anatomy.of(inner))
    attach(inner, head)
    _logger.info(f"{name}: {head}")
    return head


def describe_head(path: str) -> str:
    """Returns what the head in a folder or Hub repository is, in one line; no weights are loaded.

    Raises:
        SettingError: there is none, or one that is not served.
    """
    config = read_config("head", path)
    if (known := format_of(config)) is not None:
        with reading("head", path):
            return str(known.make(path, config))
    layer = config.get("transformer_layer_config") or config.get("text_config") or config
    counts = [place.get(name) for place in (config, layer) for name in (*COUNTS, "mtp_num_hidden_layers")]
    if not (count := next(filter(None, counts), 0)):
        raise SettingError(f"{path} holds no head: its config.json is that of no known kind of head.")
    made_for = verifier_of(config) or f"the {config.get('model_type')} that it ships with"
    return f"{MtpHead.kind}, {count} layer{'s' * (count > 1)}, made for {made_for}"


def source_of(head: DraftModule) -> DraftSource:
    """What drafts with a head that is attached to a model."""
    source_class: Any = class_named(head.source)
    if source_class is None:
        raise SettingError(
            f"load_head: a {head.kind} drafts by itself for no model. Give the folder or the Hub repository of a "
            "DFlash, DSpark or EAGLE-3 head, MTP layer, Gemma 4 assistant, or an adapter or exit heads fitted to it."
        )
    return cast(DraftSource, source_class(head))
