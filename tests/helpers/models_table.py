"""The table of models in examples/MODELS.md, from configs: ``python tests/helpers/models_table.py`` writes it."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from helpers import multimodal
from helpers.architectures import ARCHITECTURES, config_of
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.graphs.graph_runner import why_no_graphs
from hf_selfspec.modules.shipped import ships_layers

PATH = Path(__file__).parents[2] / "examples" / "MODELS.md"
SOUND = ("qwen2_audio", "voxtral", "granite_speech")
_TITLES = ("model type", "takes", "drafts", "rows", "graphs", "exact", "states", "MTP", "export")
_HEAD = """# Models

What works with which type of model, from the configs of the tests, each of which is a **tiny random model** of that
type. `hf-selfspec inspect --model MODEL` prints the same for your model.

- *drafts*: trees, or lines where a model cannot take a tree's mask.
- *rows*: the rows of a batch advance at their own pace, or plain `generate` serves batches.
- *graphs*: nothing in the config rules out captured forwards on a GPU. A capture finds out what the forward does, and
  those of OPT, BioGPT, XGLM and DBRX cannot be captured.
- *exact*: `SelfSpec(exact=True)` is possible in bfloat16 with attention by `sdpa`, where the kernels of the machine
  allow it, which the first call tries out.
- *states*: recurrent states, which are rolled back when a draft is rejected. transformers' own assisted generation
  raises an error for these models.
- *MTP*: the config counts MTP layers, or their names are known. `load_mtp` looks for DeepSeek-V3's names in other
  checkpoints, and `fit_mtp` makes such a layer for any model of text.
- *export*: an early exit can be written as a checkpoint for other engines.

Free drafts, early exits and skipped layers draft with all of them: {text} entries are text models, {images} take
images (Llama 4 not with transformers 5.24.0, where its own forward fails) and {sound} take sound.

"""


def _row(name: str, takes: str, model: PreTrainedModel) -> list[str]:
    anatomy = Anatomy.of(model)
    has_sdpa = model.config._attn_implementation == "sdpa"
    abilities = (
        not why_no_graphs(model, anatomy),
        anatomy.tree and not anatomy.is_recurrent and has_sdpa,
        anatomy.is_recurrent,
        ships_layers(model),
        takes == "text" and not (anatomy.is_recurrent or anatomy.kv_sources),
    )
    shapes = ("trees" if anatomy.tree else "lines", "own pace" if anatomy.ragged else "one")
    return [f"`{name}`", takes, *shapes, *("yes" if has else "" for has in abilities)]


def models() -> Iterator[tuple[str, str, PreTrainedModel]]:
    """Names, what they take, and models whose weights are neither drawn nor kept."""
    with warnings.catch_warnings(), torch.device("meta"), no_init_weights():
        warnings.simplefilter("ignore")
        for name in sorted(ARCHITECTURES):
            yield name, "text", AutoModelForCausalLM.from_config(config_of(name))
        for name in sorted(multimodal.MODELS):
            yield name, "text, sound" if name in SOUND else "text, images", multimodal.undamped(name)


def table() -> str:
    """The whole document."""
    rows = [_row(*each) for each in models()]
    head = _HEAD.format(text=len(ARCHITECTURES), images=len(multimodal.MODELS) - len(SOUND), sound=len(SOUND))
    lines = [_TITLES, ["---"] * len(_TITLES), *rows]
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PATH.write_text(table(), encoding="utf-8")
