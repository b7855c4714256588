"""Caches that a call hands back: layer by layer those of plain generate, and each goes on in the other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StaticCache, StoppingCriteria

from helpers import architectures, multimodal
from helpers.calls import PAST, Counting
from helpers.models import ragged_batch
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, attach

Prompt = dict[str, torch.Tensor]
# One of each kind of layer, and of each way to be given a prompt.
KINDS = {
    "dynamic": "llama",
    "window": "gemma3_text",
    "chunks": "llama4_text",
    "indexed": "glm_moe_dsa",
    "shared keys": "gemma3n_text",
    "shared keys of the last columns": "gemma4_text",
    "states": "qwen3_next",
    "states and windows": "lfm3",
    "segments": "gpt2",
    "image": "llava",
    "image, positions": "qwen2_5_vl",
    "image, window": "gemma3",
    "image, states": "qwen3_5",
    "image, convolutions": "lfm2_vl",
}
STATES = [kind for kind in KINDS if "states" in kind or "convolutions" in kind]  # of which plain serves batches
NEW = {"first": 1, "second": 2, "later": 9}
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}
SPECS: dict[str, Callable[[], SelfSpec]] = {
    "exit": lambda: SelfSpec(EarlyExit(2), FixedLength(3)),
    "lookup": SelfSpec.lookup,
}


@cache
def model_of(kind: str) -> PreTrainedModel:
    return (multimodal if KINDS[kind] in multimodal.MODELS else architectures).build(KINDS[kind])


def prompt_of(kind: str, lengths: tuple[int, ...]) -> Prompt:
    if KINDS[kind] in multimodal.MODELS:
        return multimodal.prompt_of(KINDS[kind], tuple(length - 4 for length in lengths))
    prompt = ragged_batch(lengths, seed=11)
    if kind == "segments":
        prompt["token_type_ids"] = torch.arange(prompt["input_ids"].shape[1]).expand_as(prompt["input_ids"]) % 3 + 40
    return prompt


def generate(kind: str, prompt: Prompt, assistant: SelfSpec | None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what some models cannot do is said once
        return model_of(kind).generate(**prompt, **OPTIONS | options, assistant=assistant)


def following(prompt: Prompt, begun: Any, goes_on: torch.Tensor | None = None) -> Prompt:
    """Three more tokens behind a text, of which the columns ``goes_on`` ``[b, n]`` that were generated count."""
    b, width = prompt["input_ids"].shape
    new = torch.ones(b, begun.sequences.shape[1] - width, dtype=torch.long) if goes_on is None else goes_on.long()
    more = torch.randint(3, 90, (b, 3), generator=torch.Generator().manual_seed(1))
    longer = {"attention_mask": torch.cat([prompt["attention_mask"], new, torch.ones_like(more)], 1)}
    if (types := prompt.get("token_type_ids")) is not None:
        longer["token_type_ids"] = torch.cat([types, torch.zeros_like(new), torch.zeros_like(more)], 1)
    return {"input_ids": torch.cat([begun.sequences, more], 1), **longer}


def contents(past: Any) -> dict[str, Any]:
    """The kind of a cache and of its layers, and what they hold."""
    found: dict[str, Any] = {"cache": type(past)}
    for number, layer in enumerate(past.layers):
        found[f"layer {number}"] = type(layer)
        for name, value in vars(layer).items():
            for part, state in value.items() if isinstance(value, dict) else [(0, value)]:
                if name != "dtype":  # of hybrids: that of what comes first
                    found[f"{name} {part} of layer {number}"] = state
    return found


# What is kept of each token, by name, as [b, s, ...].
BY_TOKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "keys": lambda states: states.transpose(1, 2),
    "values": lambda states: states.transpose(1, 2),
    "indexer_keys": lambda states: states,
    "indexer_position_ids": lambda positions: positions.movedim(0, -1),
}


def assert_alike(ours: Any, plain: Any, valid: torch.Tensor) -> None:
    """The caches are the same but for columns of padding; ``valid`` ``[b, n]`` are others."""
    mine, theirs = contents(ours), contents(plain)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        found = mine[name]
        if not isinstance(expected, torch.Tensor):
            assert found == expected, name
            continue
        assert found.shape == expected.shape, name
        if (by_token := BY_TOKEN.get(name.split()[0])) is not None:  # windows have the last ones
            found, expected = by_token(found), by_token(expected)
            counts = valid[:, -expected.shape[1] :].bool()
            found, expected = found[counts], expected[counts]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=name)


def assert_goes_on(kind: str, draft: str, ours: Any, plain: Any, longer: Prompt) -> None:
    """Either cache, with either way to decode, has plain's text."""
    expected = generate(kind, longer, None, max_new_tokens=5, **{PAST: copy.deepcopy(plain)}).sequences
    for past, assistant in ((ours, None), (ours, SPECS[draft]()), (plain, SPECS[draft]())):
        found = generate(kind, longer, assistant, max_new_tokens=5, **{PAST: copy.deepcopy(past)}).sequences
        assert torch.equal(found, expected), (past is ours, assistant)


@pytest.mark.every_run("ragged-first-(window|indexed)|ragged-later-window|row-first-states.*|row-later-image, states")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", NEW)
@pytest.mark.parametrize("rows", ["row", "ragged"])
def test_every_kind_of_cache(rows: str, end: str, kind: str) -> None:
    if rows == "ragged" and kind in STATES:
        pytest.skip("plain generate serves these")
    prompt, draft = prompt_of(kind, (12,) if rows == "row" else (7, 12, 9)), "lookup" if end == "second" else "exit"
    plain, ours = (generate(kind, prompt, given, max_new_tokens=NEW[end]) for given in (None, SPECS[draft]()))
    assert torch.equal(ours.sequences, plain.sequences)
    longer = following(prompt, plain)
    assert_alike(ours.past_key_values, plain.past_key_values, longer["attention_mask"][:, :-4])
    assert_goes_on(kind, draft, ours.past_key_values, plain.past_key_values, longer)


class Ends(StoppingCriteria):
    """Ends rows; without an end-of-text token plain generate goes on with them."""

    is_stateless = True

    def __init__(self, are_over: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.are_over = are_over

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.are_over(input_ids).expand(len(input_ids))


def apart(free: torch.Tensor) -> int:
    """A token that rows do not have at the same time."""
    places = {int(token): (free == token).int().argmax(1) for token in free.unique()}
    return next(token for token, at in places.items() if at.min() < at.max())


# Options of each call, and those that follow from the tokens that rows have without an end.
ENDS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[torch.Tensor], dict[str, Any]]]] = {
    "with its first token": (dict, lambda free: {"eos_token_id": int(free[0, 0])}),
    "before others": (dict, lambda free: {"eos_token_id": int(free[1, 3])}),
    "in step": (lambda: {"logits_processor": [Counting()]}, lambda free: {"eos_token_id": apart(free)}),
    "and goes on": (dict, lambda free: {
        "stopping_criteria": [Ends(lambda ids: torch.isin(ids[:, -1], free[[0, 1, 2], [3, 5, 8]]))]
    }),
}  # fmt: skip


@pytest.mark.every_run("in step-dynamic|before others-window")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "segments" and kind not in STATES])
@pytest.mark.parametrize("end", ENDS)
def test_a_row_that_ends_before_others(end: str, kind: str) -> None:
    """Its padding is masked afterwards."""
    prompt, (always, at) = prompt_of(kind, (7, 12, 9)), ENDS[end]
    width = prompt["input_ids"].shape[1]
    options = at(generate(kind, prompt, None, max_new_tokens=12, **always()).sequences[:, width:])
    ends = torch.tensor(options.get("eos_token_id", -1))

    def call(assistant: SelfSpec | None) -> Any:
        return generate(kind, prompt, assistant, max_new_tokens=12, **options, **always())

    plain, ours = call(None), call(SPECS["exit"]())
    assert torch.equal(ours.sequences, plain.sequences)
    is_end = (plain.sequences[:, width:] == ends).long()
    was_over = is_end.cumsum(1) - is_end > 0
    assert was_over.any() == ("eos_token_id" in options)
    longer = following(prompt, plain, ~was_over)
    assert_alike(ours.past_key_values, plain.past_key_values, longer["attention_mask"][:, :-4])
    assert_goes_on(kind, "exit", ours.past_key_values, plain.past_key_values, longer)


@pytest.mark.every_run("(window|image, states)-first|(dynamic|states)-later")
@pytest.mark.parametrize("end", ["first", "later"])
@pytest.mark.parametrize("kind", ["dynamic", "window", "indexed", "states", "image, states"])
def test_static_caches(kind: str, end: str) -> None:
    """Of plain's kind and size, with room behind a text that ended early, and also where our loop does not serve."""
    prompt = prompt_of(kind, (12,) if kind in STATES else (7, 12, 9))
    length = prompt["input_ids"].shape[1] + NEW[end]
    ends = [Ends(lambda ids: torch.tensor(ids.shape[1] >= length))]
    options = {"stopping_criteria": ends, "cache_implementation": "static", "max_new_tokens": 40}
    plain, ours = (generate(kind, prompt, given, **options) for given in (None, SPECS["exit"]()))
    assert torch.equal(ours.sequences, plain.sequences)
    assert type(ours.past_key_values) is StaticCache
    longer, caches = following(prompt, plain), [ours.past_key_values, plain.past_key_values]
    mine, theirs = ({name: getattr(state, "shape", state) for name, state in contents(it).items()} for it in caches)
    assert mine == theirs
    found, expected = (generate(kind, longer, None, max_new_tokens=8, **{PAST: past}).sequences for past in caches)
    assert torch.equal(found, expected)
    flipped = {name: value.flip(1) if value.dim() == 2 else value for name, value in prompt.items()}
    if "image" not in kind:
        assert type(generate(kind, flipped, SPECS["exit"](), **options).past_key_values) is StaticCache


def fails(calls: int) -> Ends:
    """Raises an error once, after so many calls."""
    numbers = count()

    def are_over(ids: torch.Tensor) -> torch.Tensor:
        if next(numbers) == calls:
            raise RuntimeError("stopped")
        return torch.tensor(False)

    return Ends(are_over)


@pytest.mark.every_run("dynamic|window-prompt-attached")
@pytest.mark.parametrize("is_attached", [False, True], ids=["passed", "attached"])
@pytest.mark.parametrize("tokens", [0, 5], ids=["prompt", "later"])
@pytest.mark.parametrize("kind", ["dynamic", "window", "states"])
def test_an_error_empties_a_cache(kind: str, tokens: int, is_attached: bool, no_warnings_yet: None) -> None:
    """What was moved in is lost; then no other way to decode may go on with the cache."""
    prompt, model, spec = prompt_of(kind, (12,)), model_of(kind), SPECS["exit"]()
    begun = generate(kind, prompt, None, max_new_tokens=9)
    past, before, longer = begun.past_key_values, copy.deepcopy(begun.past_key_values), following(prompt, begun)
    options = {PAST: past, "stopping_criteria": [fails(tokens)], "max_new_tokens": 9}
    with (
        attach(model, spec) if is_attached else nullcontext(),
        pytest.warns(UserWarning, match="given is empty now"),
        pytest.raises(RuntimeError, match="stopped"),
    ):
        model.generate(**longer, **OPTIONS | options, assistant=None if is_attached else spec)
    assert past.get_seq_length() == 0
    assert all(getattr(layer, "keys", None) is None for layer in past.layers)
    expected, found = (
        generate(kind, longer, None, max_new_tokens=5, **{PAST: given}).sequences for given in (before, past)
    )
    assert torch.equal(found, expected)
