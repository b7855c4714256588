"""Drafts for other engines: the part of a model that drafts, as a checkpoint of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..draft.blocks import DraftBlocks
from ..errors import SettingError, SettingTypeError, UnsupportedModelError
from ..learned import saving
from ..learned.files import check_folder, folder_written_whole, path_of, reported
from ..learned.knowledge import KnowledgeOfCall
from ..model.anatomy import Anatomy, causal_lm
from ..model.fingerprint import Fingerprint
from ..model.parallel import is_tensor_parallel
from ..search.choice import Choice, choice_of_state
from .adapter_layer import AdapterLayer, adapter_layer
from .agreement import check_agreement
from .checkpoint import check_same_layers, kept_layers, layers_name, model_of_layers, silenced
from .config import config_of_layers
from .engines import TAG, USUAL_TOKENS, Card

if TYPE_CHECKING:
    from ..selfspec import SelfSpec

_C = TypeVar("_C", bound=Choice)
_README = "README.md"
# Files that show that a folder holds a model.
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf")
_WEIGHTS = "model*.safetensors*"
# An attribute that only PEFT's layers have.
_ADAPTED = "_disable_adapters"


def export_draft(
    spec: SelfSpec,
    folder: str | os.PathLike[str],
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Writes the part of a model that drafts as an ordinary checkpoint, for engines that take a draft model.

    That part is an early exit, the model without skipped blocks, or an exit with an adapter of attention alone; of a
    search or a probe, it is what was chosen for the model. The folder's README.md has the command for each engine. The
    checkpoint's logits are compared with the draft's before anything is written; the model stays as it is, and its
    tensors are not copied.

    Args:
        spec: the settings; its draft source is exported.
        folder: created if it does not exist; a draft that was exported there earlier is replaced.
        model: a causal LM of transformers on one device, not quantised, its adapters merged.
        tokenizer: the model's tokenizer, saved with the draft; llama.cpp's converter needs it.

    Raises:
        SelfSpecError: a checkpoint cannot hold this draft, nothing was chosen yet, or the folder holds another model or
            cannot be written.
    """
    name = "SelfSpec.export_draft"
    inner = causal_lm(model, name)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SettingTypeError(f"{name}(tokenizer) must be a tokenizer of transformers or None, got {tokenizer!r}.")
    at = path_of(folder)
    _check_place(name, folder, at)
    _check_model(name, inner)
    anatomy = Anatomy.of(inner)
    _check_anatomy(name, anatomy)
    known = KnowledgeOfCall(spec, inner)
    blocks = spec._source.blocks(anatomy, partial(_choice, known))
    if blocks.adapter is not None:
        blocks.adapter.check(known.fingerprint)
    draft = draft_model(inner, anatomy, blocks)
    check_agreement(inner, anatomy, blocks, draft)
    card = _card(spec, at, inner, blocks, draft, known.fingerprint())
    with reported(at), folder_written_whole(at) as inside:
        draft.save_pretrained(inside)
        if tokenizer is not None:
            tokenizer.save_pretrained(inside)
        (inside / _README).write_text(card.text(), encoding="utf-8")
        fresh = {file.name for file in inside.iterdir()}
    _remove(file for file in at.glob(_WEIGHTS) if file.name not in fresh)


def draft_model(model: PreTrainedModel, anatomy: Anatomy, blocks: DraftBlocks) -> PreTrainedModel:
    """Returns the blocks as an ordinary model with the same tensors.

    Args:
        model: the whole model, which stays as it is.
        anatomy: the model's anatomy.
        blocks: the blocks that draft.

    Raises:
        SelfSpecError: the blocks cannot be an ordinary model.
    """
    kept, prefix = kept_layers(blocks.plan), layers_name(model, anatomy)
    if anatomy.kv_sources and len(kept) < anatomy.num_layers:
        raise UnsupportedModelError(
            f"layers of {anatomy.model_name} read keys and values of layers {sorted(anatomy.kv_sources)}, so none can "
            "be taken out of it. Export a set that skips attention or MLP blocks, but no whole layer."
        )
    more = AdapterLayer(0, {})
    if blocks.adapter is not None:
        more = adapter_layer(model, anatomy, blocks.adapter, prefix)
        kept = [*kept, more.twin]
    config = config_of_layers(model.config, kept, **more.settings)
    replaced = {**silenced(blocks.plan, anatomy, prefix), **more.replaced}
    draft = model_of_layers(model, config, kept, prefix, replaced)
    check_same_layers(model, draft, kept, prefix, more.may_differ)
    draft.generation_config = copy.deepcopy(model.generation_config)
    if hasattr(draft.generation_config, "assistant"):
        del draft.generation_config.assistant
    return draft


def _choice(known: KnowledgeOfCall, kind: type[_C]) -> _C | None:
    """The choice of that class that was used last, else one that was loaded and not used yet."""
    found: _C | None = known.knowledge.choice(known.model, kind)
    if found is not None or (saved := known.read()) is None:
        return found
    with saving.reading(saved.path):
        depth = known.model.config.num_hidden_layers
        choices = [choice_of_state(state, depth) for state in saved.findings.values()]
    return next((choice for choice in choices if isinstance(choice, kind)), None)


def _check_place(name: str, folder: str | os.PathLike[str], at: Path) -> None:
    check_folder(f"{name}(folder)", folder, (_README,))
    card = at / _README
    is_ours = card.is_file() and TAG in card.read_text(encoding="utf-8", errors="replace")
    held = [file.name for pattern in _MODEL_FILES for file in at.glob(pattern)]
    if held and not is_ours:
        raise SettingError(
            f"{name}(folder={os.fspath(folder)!r}): there is {held[0]} of another model. Give a new folder; only "
            "a draft that was exported earlier is replaced."
        )


def _remove(files: Iterable[Path]) -> None:
    """Removes shards of an earlier draft, which loaders would take for parts of this one."""
    for file in list(files):
        with reported(file):
            file.unlink()


def _check_model(name: str, model: PreTrainedModel) -> None:
    """Refuses models whose tensors are not those of an ordinary checkpoint.

    Raises:
        UnsupportedModelError: the model cannot be exported; the message gives the reason.
    """
    which = type(model).__name__
    tensors = [*model.parameters(), *model.buffers()]
    devices = {str(tensor.device) for tensor in tensors}
    if any(hasattr(module, _ADAPTED) for module in model.modules()):
        why, what = "it has adapters (PEFT)", "Merge them first: model = model.merge_and_unload()"
    elif getattr(model, "hf_quantizer", None) is not None:
        why, what = "it is quantised", "Load it in its own precision, and quantise the draft with the engine's tools"
    elif is_tensor_parallel(model) or any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in tensors):
        why, what = "its tensors are spread over processes, or are not plain tensors", "Load it in one process"
    elif "meta" in devices or len(devices) > 1:
        why, what = f"its tensors are on {', '.join(sorted(devices))}", 'Load it on one device: device_map="cpu"'
    elif model.config.get_text_config(decoder=True) is not model.config:
        why, what = (
            "it is more than a text model (images, sound), for which engines take no draft model",
            "Load its text model alone, with the class for causal language models of its family",
        )
    else:
        return
    raise UnsupportedModelError(f"{name}: {which} cannot be exported, since {why}. {what}.")


def _check_anatomy(name: str, anatomy: Anatomy) -> None:
    if anatomy.is_recurrent:
        raise UnsupportedModelError(
            f"{name}: {anatomy.model_name} has recurrent states, which neither transformers nor serving engines roll "
            "back in a draft model when its tokens are rejected. Use generate(assistant=...)."
        )


def _card(
    spec: SelfSpec,
    at: Path,
    model: PreTrainedModel,
    blocks: DraftBlocks,
    draft: PreTrainedModel,
    fingerprint: Fingerprint,
) -> Card:
    notes = []
    alone = blocks.plan.skipped_attention ^ blocks.plan.skipped_mlp
    if alone:
        notes.append(
            f"in layers {sorted(alone)} of the model, one block is left out by a projection of zeros, which engines "
            "still compute: leave out whole layers where that costs too much"
        )
    if blocks.adapter is not None:
        notes.append(f"layer {draft.config.num_hidden_layers - 1} is an adapter (Kangaroo), with an MLP of zeros")
    kinds = getattr(draft.config, "layer_types", None) or []
    if len(set(kinds)) > 1:
        notes.append(
            "kinds of attention are in the config's `layer_types`; an engine that computes them from a layer's number "
            "(llama.cpp for some families) can use this draft only where that gives the same kinds"
        )
    return Card(
        model=model.config.name_or_path or type(model).__name__,
        folder=str(at),
        draft=repr(spec.draft),
        picture=blocks.plan.picture(),
        num_layers=draft.config.num_hidden_layers,
        parameters=draft.num_parameters(),
        fingerprint=fingerprint.name,
        tokens=min(getattr(spec.stop, "max_draft", USUAL_TOKENS), spec.max_draft),
        notes=tuple(notes),
    )
