"""Heads that are attached to a model, with which every cascade drafts."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedModel

from ..errors import SettingError, SettingTypeError
from ..learned.files import read_json
from ..model.anatomy import Anatomy, causal_lm
from ..model.fingerprint import Fingerprint
from ..modules.adapter import Adapter
from ..modules.block import BlockHead, is_block_head
from ..modules.draft_module import CONFIG, DraftModule, file_of, reading_published
from ..modules.eagle import is_eagle3, load_eagle3
from ..modules.mtp import MtpHead
from ..modules.shipped import SPECULATORS, attach, load_layers, load_mtp, ships_layers
from .heads.adapter import EarlyExitAdapter
from .heads.block import Block
from .heads.mtp import MTP
from .source import DraftSource


def load_head(model: Any, path: str | os.PathLike[str]) -> DraftModule:
    """Attaches a head to a model: from then on it drafts in every cascade, that of ``SelfSpec()`` included.

    It is freed with the model, and replaces a head that was attached before, by :func:`load_mtp`, too.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        path: the folder or Hub repository of a block head (see :class:`Block`), an EAGLE-3 head (see
            :meth:`MTP.from_eagle3`), an MTP layer (of speculators, of this package, or in a checkpoint of the model,
            see :func:`load_mtp`), or an adapter (see :class:`EarlyExitAdapter`).

    Returns:
        The head.

    Raises:
        SettingError, SettingTypeError: there is no such head, it is damaged, of a variant that is not served, or of
            another model.
        UnsupportedModelError: its layers keep more than keys and values.
    """
    inner: PreTrainedModel = causal_lm(model, "load_head")
    if not isinstance(path, (str, os.PathLike)):
        raise SettingTypeError(f"load_head(path) must be a folder or a name on the Hub, got {path!r}.")
    name = os.fspath(path)
    with reading_published("head", name):
        config = read_json(file_of("head", name, CONFIG))
    config = config if isinstance(config, dict) else {}
    head: DraftModule
    if config.get("speculators_model_type") == "mtp":
        head = load_layers(inner, name, SPECULATORS)
    elif is_eagle3(config):
        head = load_eagle3(name)
    elif is_block_head(config):
        head = BlockHead.load(name)
    elif "configs" in config:
        head = MtpHead.load(name)
    elif "exit_layer" in config and "num_heads" in config:
        head = Adapter.load(name)
    elif ships_layers(inner) and "model_type" in config:
        return load_mtp(inner, name)
    else:
        raise SettingError(
            f"load_head: {name} holds no head that {type(inner).__name__} can draft with. Give the folder or the Hub "
            "repository of a DFlash, DSpark or EAGLE-3 head, an MTP layer, or an adapter that was fitted to it."
        )
    if isinstance(head, (MtpHead, BlockHead)):
        head.read_layers(inner)
    head.check(lambda: Fingerprint.of_decoder(inner))
    source_of(head).check(Anatomy.of(inner), None)
    attach(inner, head)
    return head


def source_of(head: DraftModule) -> DraftSource:
    """What drafts with a head that is attached to a model."""
    if isinstance(head, BlockHead):
        return Block(head)
    return EarlyExitAdapter(head) if isinstance(head, Adapter) else MTP()
