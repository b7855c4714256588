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

from helpers.architectures import build
from helpers.models import ragged_batch
from helpers.processes import library
from hf_selfspec import SelfSpec

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": lambda: {"assistant_early_exit": 2},
    "use_mtp": lambda: {"use_mtp": True},
    "SelfSpec()": lambda: {"assistant": SelfSpec()},
}
RAISES, SERVED = "raises", "the model's tokens"
ROWS = ragged_batch((8, 12, 10))
ROW = {name: values[1:2] for name, values in ROWS.items()}
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
# transformers' early exit passes on a config and options together.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `generation_config` together")


def outcomes(model: PreTrainedModel, inputs: Any, more: Callable[[], dict[str, Any]] = dict) -> list[str]:
    """What comes of each way with these inputs and further arguments."""
    expected, found = model.generate(**inputs, **GREEDY, **more()), []
    for way in WAYS.values():
        try:  # with a copy, since a model is left with the layers of its exit where transformers' early exit fails
            ids = copy.deepcopy(model).generate(**inputs, **GREEDY, **more(), **way())
            found.append(SERVED if ids.equal(expected) else "other tokens")
        except (ValueError, AssertionError, RuntimeError):
            found.append(RAISES)
    return found


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "bamba", "mamba2"])
def test_recurrent_states_are_served_here_alone(name: str) -> None:
    assert outcomes(build(name), ROW) == [RAISES, RAISES, RAISES, SERVED]


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


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="the README's table is of 5.24")
@pytest.mark.machine("verification_is_free")
def test_the_table_of_the_readme(tmp_path: Path) -> None:
    model, xgrammar = with_mtp(tmp_path), library("xgrammar")
    tokens = xgrammar.TokenizerInfo([chr(33 + token) for token in range(model.config.vocab_size)], stop_token_ids=[1])
    grammar = xgrammar.GrammarCompiler(tokens).compile_regex("(a|b)(ab|ba){40}")

    def from_earlier(way: dict[str, Any]) -> str:
        watched, seen, forwards = copy.deepcopy(model), list[Any](), list[int]()
        watched.model.layers[0].register_forward_pre_hook(lambda *given: seen.append(given))
        for _ in range(2):
            watched.generate(**ROW, **GREEDY, **way)
            forwards.append(len(seen))
        return "drafted from" if forwards[1] < 2 * forwards[0] else "not used"

    rows = {
        "one prompt": outcomes(model, ROW),
        "several prompts, of different lengths": outcomes(model, ROWS),
        "recurrent states (Qwen3.5)": outcomes(build("qwen3_5_text"), ROW),
        "a grammar of xgrammar": outcomes(
            model, ROW, lambda: {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(grammar)]}
        ),
        "the text of an earlier call": [from_earlier(way()) for way in WAYS.values()],
    }
    table = [["", *(f"`{name}`" for name in WAYS)], ["---"] * 5, *([name, *cells] for name, cells in rows.items())]
    made = "".join(f"| {' | '.join(row)} |\n" for row in table).replace("|  |", "| |")
    assert made in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"), made
