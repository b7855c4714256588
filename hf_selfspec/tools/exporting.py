"""Drafts for other engines: the part of a model that drafts, as a checkpoint of its own."""

import json
import os
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafts.cascade import Cascade
from ..drafts.free.lookup import Lookup
from ..drafts.layers.early_exit import EarlyExit, ExitChoice
from ..drafts.layers.skip_layers import SkipLayers
from ..drafts.source import DraftSource
from ..errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from ..learned import saving
from ..learned.files import check_folder, folder_written_whole, path_of, reported
from ..learned.knowledge import KnowledgeOfCall
from ..model.anatomy import Anatomy
from ..model.forward_pass import ForwardPass, obeying, partial_forwards
from ..model.internals import ADAPTED
from ..model.module_tools import is_tensor_parallel
from ..model.patching import evaluating
from ..model.plan import LayerPlan
from ..search.skip_search import SkipChoice
from ..validation import StrPath
from .checkpoint import draft_model

# Tokens of a draft in the card's commands if the SelfSpec sets no number, as in the engines' own examples.
USUAL_TOKENS = 5

_NAME = "SelfSpec.export_draft"  # in messages
_README, _CARD = "README.md", Path(__file__).with_name("draft_card.md")
# The tag by which a card written here is recognised.
TAG = "hf_selfspec-draft"
# Files that show that a folder holds a model.
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf")
_WEIGHTS = "model*.safetensors*"

# Tokens of the text on which the logits of the checkpoint are compared with those of the model's blocks.
_TOKENS = 16
# How far apart logits may be, as a share of the largest one: other kernels round differently. The models of the tests
# agree within 1e-5; a wrong or incomplete layer changes logits by a tenth or more.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def export_draft(
    source: DraftSource,
    knowledge: KnowledgeOfCall,
    folder: StrPath,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int,
) -> None:
    """Writes what a source drafts with, see :meth:`SelfSpec.export_draft`; engines are to draft ``tokens`` at once."""
    inner = knowledge.model
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SettingTypeError(f"{_NAME}(tokenizer) must be a tokenizer of transformers or None, got {tokenizer!r}.")
    at = path_of(folder)
    _check_place(folder, at)
    _check_model(inner)
    anatomy = Anatomy.of(inner)
    part = _part(source, anatomy, knowledge)
    if anatomy.is_recurrent:
        raise UnsupportedModelError(
            f"{_NAME}: {anatomy.model_name} has recurrent states, which neither transformers nor serving engines roll "
            "back in a draft model when its tokens are rejected. Use generate(assistant=...)."
        )
    draft = draft_model(inner, anatomy, part)
    _check_agreement(inner, anatomy, part, draft)
    card = _card_of(source, tokens, at, knowledge, part, draft)
    with reported(at), folder_written_whole(at) as inside:
        draft.save_pretrained(inside)
        if tokenizer is not None:
            tokenizer.save_pretrained(inside)
        (inside / _README).write_text(card, encoding="utf-8")
        written = {file.name for file in inside.iterdir()}
    # Loaders would take shards of an earlier draft for parts of this one.
    for file in [file for file in at.glob(_WEIGHTS) if file.name not in written]:
        with reported(file):
            file.unlink()


def _check_agreement(model: PreTrainedModel, anatomy: Anatomy, plan: LayerPlan, draft: PreTrainedModel) -> None:
    """Compares the logits of the draft with those of the model's blocks on a text of a few tokens."""
    vocabulary = model.get_input_embeddings().weight
    ids = torch.arange(1, _TOKENS + 1, device=vocabulary.device)[None] * 7919 % len(vocabulary)  # spread over all
    with torch.no_grad(), evaluating(model):
        expected = partial_logits(model, anatomy, plan, ids).float()
        logits = draft(input_ids=ids, use_cache=False).logits.float()
    apart = (logits - expected).abs().max().item()
    allowed = _TOLERANCE.get(model.dtype, 0.0) * max(1.0, expected.abs().max().item())
    if not apart <= allowed:
        raise UnsupportedModelError(
            f"the checkpoint would not predict what this part of {anatomy.model_name} predicts (logits differ by "
            f"{apart:.2g}, at most {allowed:.2g} is rounding): the model treats positions, residuals or the number of "
            "its layers in a way of its own. Nothing was written. Export another part, or use this one with "
            "generate(assistant=...)."
        )


def partial_logits(model: PreTrainedModel, anatomy: Anatomy, plan: LayerPlan, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[1, s, v]`` of a plan's layers when they run inside the whole model."""
    with partial_forwards(model, anatomy), obeying(ForwardPass(plan)):
        return cast(torch.Tensor, model(input_ids=ids, use_cache=False).logits)


def _part(source: DraftSource, anatomy: Anatomy, knowledge: KnowledgeOfCall) -> LayerPlan:
    """The part of the model that drafts as a source does, beside free drafts."""
    sources = source.sources if isinstance(source, Cascade) else (source,)
    drafting = [each for each in sources if not isinstance(each, Lookup)]
    if len(drafting) > 1:
        raise SettingError(
            f"this cascade has {len(drafting)} sources besides its free drafts, {drafting!r}, and a checkpoint can "
            "hold only one. Export SelfSpec(draft=...) with the one that you mean."
        )
    part = (drafting or sources)[0]
    if isinstance(part, EarlyExit) and part.head is None:
        return part.plan(anatomy) or _chosen(part, anatomy, knowledge, ExitChoice)
    if isinstance(part, SkipLayers):
        return part.plan(anatomy) if part.search is None else _chosen(part, anatomy, knowledge, SkipChoice)
    raise UnsupportedOptionError(
        f"{part!r} cannot be exported: it does not draft with layers of the model alone, but a checkpoint has "
        "nothing else. Export EarlyExit(layer) or SkipLayers(attention=[...], mlp=[...]). (Engines read MTP layers "
        "from the model's own checkpoint, and reduce heads by lists of tokens.)"
    )


def _chosen(source: DraftSource, anatomy: Anatomy, knowledge: KnowledgeOfCall, choice_class: type) -> LayerPlan:
    """The plan of the choice of that class that was used last, else of a set that was loaded and not used yet."""
    used = knowledge.knowledge.choice(knowledge.model, choice_class)
    if used is None and choice_class is SkipChoice:
        saved = knowledge.kept()
        with saving.reading(saved.path):
            choices = (SkipChoice.of_state(state) for state in saved.findings.values() if "set" in state)
            used = next(choices, None)
    if used is None:
        raise SettingError(
            f"{source!r} has chosen no part of {anatomy.model_name} yet, or none pays on this machine, so there is "
            "nothing to export. Generate (more) with this SelfSpec first, use what hf_selfspec.tune returns, or "
            "name the part yourself: EarlyExit(layer) or SkipLayers(attention=[...], mlp=[...])."
        )
    plan: LayerPlan = used.plan
    return plan


def _check_place(folder: StrPath, at: Path) -> None:
    check_folder(f"{_NAME}(folder)", folder)
    card = at / _README
    is_ours = card.is_file() and TAG in card.read_text(encoding="utf-8", errors="replace")
    held = [file.name for pattern in _MODEL_FILES for file in at.glob(pattern)]
    if held and not is_ours:
        raise SettingError(
            f"{_NAME}(folder={os.fspath(folder)!r}): there is {held[0]} of another model. Give a new folder; only "
            "a draft that was exported earlier is replaced."
        )


def _check_model(model: PreTrainedModel) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    devices = {str(tensor.device) for tensor in tensors}
    if any(hasattr(module, ADAPTED) for module in model.modules()):
        why, what = "it has adapters (PEFT)", "Merge them first: model = model.merge_and_unload()"
    elif getattr(model, "hf_quantizer", None) is not None:
        why, what = "it is quantised", "Load it in its own precision, and quantise the draft with the engine's tools"
    elif is_tensor_parallel(model) or any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
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
    raise UnsupportedModelError(f"{_NAME}: {type(model).__name__} cannot be exported, since {why}. {what}.")


def _card_of(
    source: DraftSource, tokens: int, folder: Path, knowledge: KnowledgeOfCall, plan: LayerPlan, draft: PreTrainedModel
) -> str:
    """The card of a draft in a folder, as Markdown.

    The commands are from the engines' own documentation in November 2026: vLLM's "Draft Models"
    (features/speculative_decoding/draft_model), SGLang's "Standalone Speculative Decoding"
    (advanced_features/speculative_decoding), TensorRT-LLM's "Speculative Decoding" (features/speculative-decoding,
    Draft/Target), llama.cpp's docs/speculative.md and tools/server/README.md (b11434).
    """
    picture, layers = plan.picture(), draft.config.num_hidden_layers
    note = ""
    if len(set(getattr(draft.config, "layer_types", None) or [])) > 1:
        note = (
            "\n- kinds of attention are in the config's `layer_types`; an engine that computes them from a layer's "
            "number (llama.cpp for some families) can use this draft only where that gives the same kinds"
        )
    return _CARD.read_text(encoding="utf-8").format(
        tag=TAG,
        model=knowledge.model.config.name_or_path or type(knowledge.model).__name__,
        folder=str(folder),
        what="Some of its layers" if "#" in picture.lstrip("#") else "The first layers and the output head",
        layers=f"{layers} layer{'s' if layers > 1 else ''}",
        parameters=draft.num_parameters(),
        draft=repr(source),
        picture=picture,
        fingerprint=knowledge.fingerprint().name,
        note=note,
        tokens=tokens,
        nodes=tokens + 1,
        vllm=json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": tokens}),
    )
