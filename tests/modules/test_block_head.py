"""Block heads as others publish them: logits by hand and by transformers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.cache_utils import DFlashCache

from helpers.architectures import build
from helpers.blocks import CONFIGS, DAMAGED, Seen, block_of, context_of, logits_by_hand, published
from helpers.calls import unchanged
from helpers.models import BATCH, ROW, VOCABULARY, tiny_llama
from helpers.watched import watched
from hf_selfspec import Block, FixedLength, SelfSpec, SettingError
from hf_selfspec.batch import Draft, Text

# The logits [n, r] of slots in which [n] tokens were drafted after a text [s].
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_logits(model: PreTrainedModel, folder: Path, inputs: Any, predict: Predict, tokens: torch.Tensor) -> None:
    """All slots of all blocks of a call have these logits, whatever was accepted before: from none to all of a block,
    whose first tokens are then replaced by the right ones."""
    plain, blocks = model.generate(**inputs, max_new_tokens=16), list[int]()

    def check(text: Text, draft: Draft) -> None:
        for row, length in enumerate(draft.lengths):
            if not length:
                continue
            before = text.ids[row, int(inputs["attention_mask"][row].argmax()) : text.lengths[row]]
            expected = predict(before, draft.tokens[row, :length])
            drafted_logits = torch.stack([step[row] for step in shown.__dict__["steps"][:length]])
            torch.testing.assert_close(drafted_logits[:, tokens], expected, atol=1e-5, rtol=1e-5)
            right = plain[row, text.lengths[row] :][: (7 * len(blocks) + row) % (length + 1)]
            draft.tokens[row, : len(right)] = right
            blocks.append(length)

    model(inputs["input_ids"], output_hidden_states=True)  # whose hooks transformers keeps
    shown = watched(Seen(folder), check)
    spec = SelfSpec(shown, FixedLength(8))
    with unchanged(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, assistant=spec), plain)
    assert spec.stats is not None
    assert max(blocks) == shown.module.num_tokens
    assert 0.2 < spec.stats.acceptance_rate < 0.8
    assert 3 < spec.stats.draft_steps <= spec.stats.rounds  # one forward a block


@pytest.mark.every_run(".*-batch|dspark gated-one row")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_what_the_definition_predicts(name: str, inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    settings, tensors = published(tmp_path, model, **CONFIGS[name])
    size = settings["draft_vocab_size"]
    tokens = torch.arange(size) + tensors.get("d2t", torch.zeros(size, dtype=torch.long))
    check_logits(
        model, tmp_path, inputs, lambda text, drafted: logits_by_hand(model, settings, tensors, text, drafted), tokens
    )


@pytest.mark.every_run(".*-batch")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]], ids=str)
def test_logits_are_those_of_transformers(kinds: list[str], inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=6, layer_types=kinds, block_size=5, mask_token_id=3, target_layer_ids=[1, 3, 5],
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    theirs.save_pretrained(tmp_path)

    @torch.no_grad()
    def predict(text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(text) - 1)
        block = torch.tensor([[int(text[-1]), *[3] * 4]])
        entered, places = context_of(model, text, [2, 4, 6])[None], torch.arange(len(text) + 4)[None]
        # The cache has another name in transformers 5.17.
        states = theirs(model.model.embed_tokens(block), entered, None, places, cache)
        expected: torch.Tensor = model.lm_head(states.last_hidden_state[0, 1 : 1 + len(drafted)])
        return expected

    check_logits(model, tmp_path, inputs, predict, torch.arange(VOCABULARY))


def changed_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


_LAYER = "transformer_layer_config"
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"speculators_model_type": "dflash2"}, "not served: dflash2"),
    "EAGLE-3": ({"speculators_model_type": "eagle3"}, r"MTP\.from_eagle3: .* not served: 2 layers"),
    "other layers": ({_LAYER: {"model_type": "gemma2"}}, "not served: layers of gemma2"),
    "another width of states": ({"target_hidden_size": 32}, "not served: target_hidden_size"),
    "another Markov head": (
        {"speculators_model_type": "dspark", "markov_head_type": "lstm"},
        "not served: a Markov head of type lstm",
    ),
    "rotary positions by length": (
        {_LAYER: {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
        "not served: rotary positions of type dynamic",
    ),
    "no mask token": ({"mask_token_id": None}, "has no mask_token_id"),
    "no layers": ({"aux_hidden_state_layer_ids": None}, "holds no block head, or one whose"),
    "no block": ({"block_size": 1}, "block_size must be"),
    "other widths": ({"block_size": 5, _LAYER: {"intermediate_size": 32}}, "size mismatch"),
}


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    for change, message in VARIANTS.values():
        settings, _ = published(tmp_path, model)
        layer = settings[_LAYER] | change.get(_LAYER, {})
        (tmp_path / "config.json").write_text(json.dumps(settings | change | {_LAYER: layer}))
        with pytest.raises(SettingError, match=message):
            Block(tmp_path)
    for changed, message in DAMAGED.values():
        published(tmp_path, model)
        changed_weights(tmp_path, changed)
        with pytest.raises(SettingError, match=message):
            Block(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(SettingError, match="cut short"):
        Block(tmp_path)
    (tmp_path / "config.json").write_text('{"dflash_config": {}, "model_type": "qwen3"}')
    with pytest.raises(SettingError, match="of which `speculators convert` makes"):
        Block(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingError, match="holds no part"):
        Block(tmp_path)


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    published(tmp_path, tiny_llama(), layers=(1, 3, 5))
    source = Block(tmp_path)
    published(tmp_path, tiny_llama(), layers=(-1, 3, 5))
    for message, draft, model in (
        ("a vocabulary of 97", source, tiny_llama(vocabulary=90)),
        (r"before layers \[1, 3, 5\], and the model has 5", source, tiny_llama(5)),
        ("width 64, and the model has 32", source, build("llama", num_hidden_layers=8)),
        (r"before layers \[-1, 3, 5\], and the model has 6", Block(tmp_path), tiny_llama()),
    ):
        with unchanged(model), pytest.raises(SettingError, match=message):
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, assistant=SelfSpec(draft))


def test_a_mask_token_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Before it is looked up, which on a GPU would be the end of the process."""
    model = tiny_llama()
    for token in (-1, VOCABULARY):
        source = Block(block_of(model, mask_token_id=token))
        with pytest.raises(SettingError, match=f"mask_token_id {token}, and a vocabulary of {VOCABULARY}"):
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, assistant=SelfSpec(source))
