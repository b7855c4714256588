"""The README's table beside transformers' own options: what these refuse or do not have, and that ours does it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.architectures import STATEFUL, build
from helpers.models import ragged_batch
from helpers.processes import library
from hf_selfspec import SelfSpec

LOOKUP, EXIT, MTP = {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}, {"use_mtp": True}
ROWS = ragged_batch((8, 12, 10))
ROW = {name: values[1:2] for name, values in ROWS.items()}
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
CASES = {
    **dict.fromkeys(STATEFUL, (ROW, [LOOKUP, EXIT, MTP], "not supported with stateful models")),
    "llama": (ROWS, [LOOKUP, EXIT], "only supported for batch_size = 1"),
}
# transformers' early exit passes on a config and options together.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `generation_config` together")


@pytest.mark.every_run("(qwen3_5_text|falcon_h1|bamba|mamba2|llama)")
@pytest.mark.parametrize("name", CASES)
def test_what_others_refuse(name: str) -> None:
    """Recurrent states, and several prompts."""
    model, (inputs, refused, words) = build(name), CASES[name]
    for options in refused:
        with pytest.raises(ValueError, match=words):
            model.generate(**inputs, **GREEDY, **options)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant=SelfSpec()), expected)


def with_mtp(folder: Path) -> PreTrainedModel:
    """A tiny model with a layer of which transformers' own option makes drafts: a copy of its last one."""
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_layer_types": ["dense", *["sparse"] * 3]}
    of_mtp = {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"], "sliding_window": 64}
    model = build("qwen3_moe", num_hidden_layers=4, model_type="mellum", num_nextn_predict_layers=1, **kinds, **of_mtp)
    model.save_pretrained(folder)
    tensors, last, width = load_file(folder / "model.safetensors"), "model.layers.3.", model.config.hidden_size
    tensors |= {"mtp.layers.0." + key.removeprefix(last): tensors[key].clone() for key in tensors if last in key}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    tensors |= {f"mtp.{norm}.weight": torch.ones(width) for norm in norms}
    tensors["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(3)) / 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def grammar(vocabulary: int) -> Any:
    xgrammar = library("xgrammar")
    tokens = xgrammar.TokenizerInfo([chr(33 + token) for token in range(vocabulary)], stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(tokens).compile_regex("(a|b)(ab|ba){40}")
    return [xgrammar.contrib.hf.LogitsProcessor(compiled)]


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="the README's table is of 5.24")
@pytest.mark.machine("verification_is_free")
def test_the_table_of_the_readme(tmp_path: Path) -> None:
    mtp, recurrent, readme = with_mtp(tmp_path), build("qwen3_5_text"), Path(__file__).parents[2] / "README.md"
    vocabulary = mtp.config.vocab_size
    ways: dict[str, dict[str, Any]] = {"prompt_lookup_num_tokens": LOOKUP, "assistant_early_exit": EXIT, "use_mtp": MTP}
    ways["SelfSpec()"] = {"assistant": SelfSpec()}

    def served(model: PreTrainedModel, inputs: Any, way: dict[str, Any], more: Callable[[], dict[str, Any]]) -> str:
        # A copy, since a model is left with the layers of its exit where transformers' early exit fails.
        model = copy.deepcopy(model)
        expected = model.generate(**inputs, **GREEDY, **more())
        try:
            ids = model.generate(**inputs, **GREEDY, **more(), **way)
        except (ValueError, AssertionError, RuntimeError):
            return "raises"
        return "the model's tokens" if ids.equal(expected) else "other tokens"

    def from_earlier(way: dict[str, Any]) -> str:
        model, seen, forwards = copy.deepcopy(mtp), list[Any](), list[int]()
        model.model.layers[0].register_forward_pre_hook(lambda *given: seen.append(given))
        for _ in range(2):
            model.generate(**ROW, **GREEDY, **way)
            forwards.append(len(seen))
        return "drafted from" if forwards[1] < 2 * forwards[0] else "not used"

    rows = {
        "one prompt": [served(mtp, ROW, way, dict) for way in ways.values()],
        "several prompts, of different lengths": [served(mtp, ROWS, way, dict) for way in ways.values()],
        "recurrent states (Qwen3.5)": [served(recurrent, ROW, way, dict) for way in ways.values()],
        "a grammar of xgrammar": [
            served(mtp, ROW, way, lambda: {"logits_processor": grammar(vocabulary)}) for way in ways.values()
        ],
        "the text of an earlier call": [from_earlier(way) for way in ways.values()],
    }
    table = [["", *(f"`{name}`" for name in ways)], ["---"] * 5, *([name, *cells] for name, cells in rows.items())]
    made = "".join(f"| {' | '.join(row)} |\n" for row in table)
    assert made.replace("|  |", "| |") in readme.read_text(encoding="utf-8"), made
