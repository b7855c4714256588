"""Models that take images or sound beside text: plain generate's tokens, whatever drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import AutoConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from helpers.architectures import build as build_text
from helpers.calls import PAST
from helpers.models import BATCH, ragged_batch, tiny_llama
from helpers.multimodal import IMAGE, MODELS, OUTSIDE, QWEN, build, prompt_of, undamped
from hf_selfspec import FixedLength, OnTheFlySearch, SelfSpec, TopKTree
from hf_selfspec.drafts import EarlyExit, EarlyExitAdapter, SkipLayers
from hf_selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.modules.adapter import Adapter

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
SPECS = {
    "exit": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
    "skip": SelfSpec(draft=SkipLayers(attention=[1], mlp=[2]), stop=FixedLength(3)),
    "tree": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=TopKTree(((0.9999, 3), (1.0, 1)))),
}
SPEC = SPECS["exit"]
# Tokens of text in each row: one row, equal lengths, left-padded; and texts without an image.
ROWS = {"one": (6,), "equal": (6, 6, 6), "ragged": (4, 9, 6)}
TEXTS = ragged_batch(ROWS["ragged"], vocabulary=IMAGE)

_model = cache(build)


@pytest.mark.every_run("(gemma4|qwen2_5_vl|voxtral)-ragged|qwen3_5-one")
@pytest.mark.filterwarnings("ignore:.* cannot take (rows|a tree mask):UserWarning")
@pytest.mark.parametrize("rows", [*ROWS, "text", "texts"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_generate(name: str, rows: str) -> None:
    of_text = {"text": {key: value[1:2] for key, value in TEXTS.items()}, "texts": TEXTS}
    prompt = prompt_of(name, ROWS[rows]) if rows in ROWS else of_text[rows]
    expected = _model(name).generate(**prompt, **OPTIONS)
    drafted = accepted = 0
    for spec in SPECS.values():
        assert torch.equal(_model(name).generate(**prompt, **OPTIONS, assistant=spec), expected)
        assert spec.stats is not None
        drafted, accepted = drafted + spec.stats.drafted, accepted + spec.stats.accepted
    assert 0 < accepted < drafted or "cannot take rows at different lengths" in spec.stats.left_to_generate


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "paligemma"])
def test_marks_of_text(name: str) -> None:
    """Processors give them with prompts that have no image; zeros make a prefix of PaliGemma's see all of itself."""
    marks = {"mm_token_type_ids" if name == "qwen2_vl" else "token_type_ids": torch.zeros_like(TEXTS["input_ids"])}
    expected = _model(name).generate(**TEXTS, **marks, **OPTIONS)
    assert torch.equal(expected, _model(name).generate(**TEXTS, **OPTIONS)) == (name != "paligemma")
    assert torch.equal(_model(name).generate(**TEXTS, **marks, **OPTIONS, assistant=SPEC), expected)


@pytest.mark.every_run("qwen2_vl")
@pytest.mark.parametrize("name", QWEN)
def test_images_before_and_after(name: str) -> None:
    """What an image call leaves on the model (``rope_deltas``) disturbs no call of text, and the other way round."""
    model, prompts = _model(name), (TEXTS, prompt_of(name))
    expected = [model.generate(**prompt, **OPTIONS) for prompt in prompts]
    for prompt, plain in list(zip(prompts, expected, strict=True)) * 2:
        for assistant in (SPEC, None):
            assert torch.equal(model.generate(**prompt, **OPTIONS, assistant=assistant), plain)


@pytest.mark.parametrize("added", [0, 3])
def test_positions_in_several_dimensions(added: int) -> None:
    """Usual ones, and a caller's own."""
    model, positions = _model("qwen2_vl"), torch.arange(9)[None, None].repeat(3, 1, 1)
    positions[1, :, 4:] += added
    row = {"input_ids": BATCH["input_ids"][1:2], "position_ids": positions}
    expected = model.generate(**row, **OPTIONS)
    assert torch.equal(expected, model.generate(row["input_ids"], **OPTIONS)) == (not added)
    assert torch.equal(model.generate(**row, **OPTIONS, assistant=SPEC), expected)


DRAFTS: dict[str, Callable[[], SelfSpec]] = {
    "default": SelfSpec,
    "lookup": SelfSpec.lookup,
    "layerskip": SelfSpec.layerskip,
    "swift": lambda: SelfSpec(SkipLayers(search=OnTheFlySearch(8, target_matchness=1.0, budget=1.0))),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(Adapter(exit_layer=2, hidden_size=32, num_heads=4)), FixedLength(6)),
    "prompt lookup": lambda: SelfSpec(PromptLookupCandidateGenerator(max_matching_ngram_size=2, max_length=200)),
}


@pytest.mark.every_run("llava-swift|(qwen2_5_vl|gemma4)-adapter")
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["llava", "gemma3", "gemma4", "qwen2_5_vl"])
def test_all_kinds_of_drafts(name: str, draft: str) -> None:
    """Adapters also see all of a prompt of Gemma 4, which runs later layers for the last column alone where it may."""
    spec, options = DRAFTS[draft](), prompt_of(name, ROWS["ragged"]) | OPTIONS | {"max_new_tokens": 24}
    expected = _model(name).generate(**options)
    for _ in range(2):
        assert torch.equal(_model(name).generate(**options, assistant=spec), expected)


@pytest.mark.every_run("llava-.*lookup|gemma3-lookup")
@pytest.mark.parametrize("draft", ["lookup", "prompt lookup", "default"])
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_vl", "qwen3_5", "idefics3", "voxtral"])
def test_placeholders_that_are_generated_and_drafted(name: str, draft: str) -> None:
    """Without an image to go with, a placeholder is a token like any other."""
    spec, prompt = DRAFTS[draft](), prompt_of(name)
    bias: dict[str, Any] = {"sequence_bias": {(IMAGE,): 2.5}, "max_new_tokens": 40}
    plain = _model(name).generate(**prompt, **OPTIONS | bias)
    assert (plain[:, prompt["input_ids"].shape[1] :] == IMAGE).any()
    assert torch.equal(_model(name).generate(**prompt, **OPTIONS | bias, assistant=spec), plain)
    assert spec.stats is not None
    assert spec.stats.accepted


@pytest.mark.every_run("paligemma-lookup|gemma3-prompt lookup")
@pytest.mark.parametrize("draft", ["lookup", "prompt lookup", "swift"])
@pytest.mark.parametrize("name", ["paligemma", "gemma3"])
def test_placeholders_without_an_embedding_are_not_drafted(name: str, draft: str) -> None:
    model, prompt = build(name, OUTSIDE), prompt_of(name, ROWS["ragged"], placeholder=OUTSIDE)
    prompt["input_ids"][1, -2:] = prompt["input_ids"][1, :2]  # what stands before the placeholders
    spec, expected = DRAFTS[draft](), model.generate(**prompt, **OPTIONS)
    assert torch.equal(model.generate(**prompt, **OPTIONS, assistant=spec), expected)
    model.generate(**prompt, **OPTIONS | {"do_sample": True}, assistant=spec)


def two_turns(name: str, assistant: SelfSpec | None, first: int = 12, later: dict[str, Any] | None = None) -> Any:
    """A second turn of the chat, perhaps with an image, on the cache of the first; its text begins with that."""
    model, prompt = _model(name), prompt_of(name, ROWS["ragged"])
    later = later or {"input_ids": torch.randint(3, IMAGE, (3, 4), generator=torch.Generator().manual_seed(3))}
    options: dict[str, Any] = {"do_sample": False, "assistant": assistant}
    begun = model.generate(**prompt, max_new_tokens=first, **options, return_dict_in_generate=True)
    ids = torch.cat([begun.sequences, later.pop("input_ids")], dim=1)
    ones = torch.ones(3, ids.shape[1] - prompt["attention_mask"].shape[1], dtype=torch.long)
    later["attention_mask"] = torch.cat([prompt["attention_mask"], ones], dim=1)
    if "token_type_ids" in later:
        later["token_type_ids"] = (ids == IMAGE).long()
    return model.generate(ids, **{PAST: begun.past_key_values}, **later, max_new_tokens=20, **options)


def with_options(name: str, assistant: SelfSpec | None, **options: Any) -> torch.Tensor:
    return _model(name).generate(**prompt_of(name, ROWS["ragged"]), **OPTIONS | options, assistant=assistant)


def in_chunks(name: str, assistant: SelfSpec | None) -> torch.Tensor:
    if version.parse(transformers.__version__) < version.parse("5.23"):
        pytest.skip("transformers before 5.23 cannot prefill images in chunks")
    return _model(name).generate(**prompt_of(name, (9,)), **OPTIONS, prefill_chunk_size=5, assistant=assistant)


CALLS: dict[str, Callable[[str, SelfSpec | None], torch.Tensor]] = {
    "chat": two_turns,
    "chat with another image": lambda _, spec: two_turns("gemma3", spec, later=prompt_of("gemma3", (6, 6, 6), seed=8)),
    "short first turn": partial(two_turns, first=3),
    "several answers": partial(with_options, num_return_sequences=3, do_sample=True, top_k=1),
    "chunks": in_chunks,
    "rows end": lambda name, spec: with_options(name, spec, eos_token_id=int(with_options(name, None)[0, -8])),
}


@pytest.mark.every_run("qwen2_5_vl-(chat|chunks|short first turn)|gemma3-several answers|llava-rows end")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_other_calls(name: str, call: str) -> None:
    """The probe of ``layerskip`` feeds tokens again, none of those that stood for an image."""
    spec = SelfSpec.layerskip() if call == "short first turn" else SPEC
    assert torch.equal(CALLS[call](name, spec), CALLS[call](name, None))


def test_a_second_tower_of_as_many_layers() -> None:
    """The decoder's layers are those of the language model."""
    settings = MODELS["llava"][1]
    vision = settings["vision_config"] | {"num_hidden_layers": 4}
    config = AutoConfig.for_model("llava", **settings | {"vision_config": vision, "image_token_index": IMAGE})
    model = transformers.LlavaForConditionalGeneration(config).eval()
    assert list(Anatomy.of(model).layers) == list(model.model.language_model.layers)
    prompt = prompt_of("llava")
    assert torch.equal(model.generate(**prompt, **OPTIONS, assistant=SPEC), model.generate(**prompt, **OPTIONS))


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")
def test_what_is_refused() -> None:
    """States of an encoder, cross attention, and sound for one placeholder, where drafts would stand elsewhere."""
    sound = prompt_of("qwen2_audio", (4, 6))
    is_media = sound["input_ids"] == IMAGE
    kept = ~(is_media & is_media.roll(1, dims=1))
    for name in ("input_ids", "attention_mask"):
        sound[name] = sound[name][kept].view(2, -1)
    encoded, picture = BATCH | {"encoder_hidden_states": torch.zeros(3, 2, 32)}, {"inputs": torch.zeros(1, 3, 8, 8)}
    for model, prompt, error, words in (
        (build_text("gpt2"), encoded, UnsupportedOptionError, r"argument `encoder_hidden_states`.*without `assistant`"),
        (tiny_llama(), picture, UnsupportedOptionError, "`inputs`"),
        (undamped("mllama"), prompt_of("mllama"), UnsupportedModelError, r"Mllama.*`cross_attention_mask`"),
        (_model("qwen2_audio"), sound, UnsupportedOptionError, "a prompt of 7 tokens into 14.*one placeholder"),
    ):
        with pytest.raises(error, match=words):
            model.generate(**prompt, **OPTIONS, assistant=SPEC)
