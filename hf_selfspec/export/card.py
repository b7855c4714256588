"""The model card of an exported draft: what it is, and how serving engines load it.

The commands are from the engines' own documentation in November 2026: vLLM's "Draft Models"
(features/speculative_decoding/draft_model), SGLang's "Standalone Speculative Decoding"
(advanced_features/speculative_decoding), TensorRT-LLM's "Speculative Decoding" (features/speculative-decoding,
Draft/Target), llama.cpp's docs/speculative.md and tools/server/README.md (b11434).
"""

import json
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import PreTrainedModel

from ..draft.source import DraftSource
from ..learned.knowledge import KnowledgeOfCall
from ..model.plan import LayerPlan

# The tag by which a card written here is recognised.
TAG = "hf_selfspec-draft"


def card_of(
    source: DraftSource, tokens: int, folder: Path, known: KnowledgeOfCall, plan: LayerPlan, draft: PreTrainedModel
) -> str:
    """The card of a draft in a folder, as Markdown."""
    picture, layers = plan.picture(), draft.config.num_hidden_layers
    is_exit = "#." in picture and "#" not in picture[picture.index("#.") + 1 :]
    environment = Environment(
        loader=PackageLoader("hf_selfspec.export"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["repr"] = repr
    return environment.get_template("card.md.jinja").render(
        tag=TAG,
        model=known.model.config.name_or_path or type(known.model).__name__,
        folder=str(folder),
        what="The first layers and the output head" if is_exit else "Some of its blocks",
        layers=f"{layers} layer{'s' if layers > 1 else ''}",
        parameters=draft.num_parameters(),
        draft=repr(source),
        picture=picture,
        fingerprint=known.fingerprint().name,
        notes=_notes(plan, draft),
        tokens=tokens,
        vllm=json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": tokens}),
    )


def _notes(plan: LayerPlan, draft: PreTrainedModel) -> list[str]:
    notes = []
    if alone := plan.skipped_attention ^ plan.skipped_mlp:
        notes.append(
            f"in layers {sorted(alone)} of the model, one block is left out by a projection of zeros, which engines "
            "still compute: leave out whole layers where that costs too much"
        )
    if len(set(getattr(draft.config, "layer_types", None) or [])) > 1:
        notes.append(
            "kinds of attention are in the config's `layer_types`; an engine that computes them from a layer's number "
            "(llama.cpp for some families) can use this draft only where that gives the same kinds"
        )
    return notes
