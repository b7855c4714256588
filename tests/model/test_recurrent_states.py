"""Recurrent states: the log, the recurrences, generation, chats and what is refused."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from helpers.architectures import STATEFUL, build
from helpers.calls import PAST, assert_mixed, check_lossless
from helpers.models import BATCH, ROW, ragged_batch
from helpers.sampling import check_exact, exact_joint, peak, sample
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    SelfSpec,
    TopKTree,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.recurrence import BLOCK, GatedDelta
from hf_selfspec.model.cache.speculative_cache import cache_for
from hf_selfspec.model.cache.timeline import StateLog, StateUpdate, Timeline
from hf_selfspec.model.graphs.captures import BufferPool
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.target import Target

# One type of each kind of state, and of each that is put together in its own way.
FAMILIES = ("qwen3_next", "kimi_linear", "bamba", "mamba", "zamba", "lfm2")
SPEC = SelfSpec(EarlyExit(2), FixedLength(3))


_model = lru_cache(maxsize=2)(build)


def add_up(state: torch.Tensor, entries: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A state of decimal digits: each token shifts them and writes its own."""
    for token in range(entries[0].shape[2]):
        state = (state * 10 + entries[0][:, :, token]) % 10**9
    return state


@pytest.mark.parametrize("pool", [None, BufferPool()])
@pytest.mark.parametrize("history", [0, 4])
def test_log(history: int, pool: BufferPool | None) -> None:
    """A state at any slot is that of the text before it, after drafts and text that runs again; logs do not grow."""
    numbers, text = Random(history), [1, 2]
    of = SimpleNamespace(advance=add_up, shapes=lambda state, count: [(1, 1, count)])
    timeline = Timeline(SimpleNamespace(pool=pool, owner=""), history=history)
    timeline.restart(2)
    log = StateLog(of, timeline, "log", torch.tensor([[12]]))

    def feed(start: int, tokens: list[int]) -> None:
        timeline.reach(start, start + len(tokens), [log])
        update = StateUpdate(start)
        log.before(update)
        log.add(update, (torch.tensor(tokens)[None, None],))

    for _ in range(40):
        root, (floor,) = len(text), log.bases
        # A draft, a token at a time, in place of which the text comes then.
        for depth in range(2):
            feed(root + depth, [8])
        # Text before the root runs again, as part of a model would: entries of the whole model stay.
        start = max(root - numbers.randrange(4), floor)
        new = [numbers.randrange(1, 8) for _ in range(5)]
        feed(start, [9] * (root - start) + new)
        text += new[: numbers.randint(1, 5)]
        timeline.commit(len(text), [log])
        (floor,) = log.bases
        assert min(history, len(text) - 2) <= len(text) - floor <= 2 * history + (5 if pool is None else 64)
        for slot in range(max(len(text) - 4, floor), len(text) + 1):
            assert log.state_at(slot).item() == int("".join(map(str, text[:slot][-9:])))
    with pytest.raises(AssertionError, match="a gap"):
        log.state_at(len(text) + 1)
    with pytest.raises(AssertionError, match="a gap"):
        timeline.reach(len(text) + 1, len(text) + 2, [log])


@pytest.mark.every_run("kimi_linear")
@pytest.mark.parametrize("name", FAMILIES)
def test_tree(name: str) -> None:
    spec = SelfSpec(EarlyExit(1), FixedLength(3), TopKTree(((0.9999, 3), (1.0, 1))))
    [stats] = check_lossless(_model(name), spec, prompts=[ROW])
    assert 0 < stats.acceptance_rate < 1
    assert max(size for size, _ in stats.round_sizes) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_left_to_plain_generate(name: str) -> None:
    [stats] = check_lossless(_model(name), SPEC, 8, [BATCH])
    assert "rows at different lengths" in stats.left_to_generate


@pytest.mark.every_run("zamba2")
@pytest.mark.parametrize("name", ["zamba2", "nemotron_h"])
def test_last_piece_of_one_token_is_not_clamped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain generate updates the state by its one-token rule there, which knows no limit of the time step."""
    model = _model(name)
    limited = [layer for layer in model.modules() if hasattr(layer, "time_step_limit")]
    assert limited
    for layer in limited:
        monkeypatch.setattr(layer, "time_step_limit", (0.5, float("inf")))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": 3}
    prompt = ragged_batch((10,))
    assert torch.equal(model.generate(**prompt, **options, assistant=SPEC), model.generate(**prompt, **options))


@pytest.mark.every_run("mamba|zamba")
@pytest.mark.parametrize("name", ["kimi_linear", "mamba", "zamba", "lfm2"])
@pytest.mark.parametrize("size", [3, BLOCK + 3])
def test_prompt_in_chunks(size: int, name: str) -> None:
    options: dict[str, Any] = {**ragged_batch((3 * size,)), "max_new_tokens": 24, "do_sample": False}
    expected = _model(name).generate(**options)
    assert torch.equal(_model(name).generate(**options, prefill_chunk_size=size, assistant=SPEC), expected)
    assert_mixed(SPEC)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_second_look(name: str) -> None:
    """A window of text that runs again beside itself gives what it gave, and the text goes on."""
    model = _model(name)
    ids = ragged_batch((14,), seed=3)["input_ids"]
    target = Target(model, anatomy := Anatomy.of(model), cache_for(model, anatomy, 1, 64))
    target.cache.look_back(4)
    with target.prepared():
        target.prefill(ids[:, :6], [0], [6])
        for root in (6, 8):
            target.step(ids[:, root : root + 4], [root])
            target.commit([root + 2])
        found = target.step(ids[:, 7:10], [10], nodes=TreeLayout.replay(3)).logits
        after = target.step(ids[:, 10:11], [10]).logits
    torch.testing.assert_close(torch.cat([found, after], 1), model(ids[:, :11]).logits[:, 7:], rtol=1e-4, atol=1e-5)


def test_sampling() -> None:
    model = build("mamba", factor=1.0, vocab_size=5)
    peak(model.get_output_embeddings(), 2.0)
    check_exact(sample(SelfSpec(EarlyExit(1), FixedLength(3)), model, rows=1, calls=500), exact_joint(model, []))


def turn(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    options |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    return model.generate(ids, max_new_tokens=11, do_sample=False, **options)


@pytest.mark.every_run("kimi_linear|jamba")
@pytest.mark.parametrize("name", [name for name in STATEFUL if name not in ("mamba", "mamba2", "falcon_mamba")])
def test_chat_goes_on(name: str) -> None:
    """A cache of either goes on in ours, over more tokens than one block has; plain's own goes wrong for Mamba-1."""
    model, more = _model(name), torch.arange(10, 12 + BLOCK)[None]
    plain, ours = (turn(model, ROW["input_ids"], assistant=given) for given in (None, SPEC))
    assert torch.equal(ours.sequences, plain.sequences)
    text = torch.cat([plain.sequences, more], 1)
    expected = turn(model, text).sequences
    for cache in (ours.past_key_values, plain.past_key_values):
        assert torch.equal(turn(model, text, **{PAST: cache}, assistant=SPEC).sequences, expected)
        assert cache.get_seq_length() == expected.shape[1] - 1  # of the whole text now


def modeling(name: str) -> Any:
    return importlib.import_module(type(_model(name)).__module__)


def test_functions_are_put_back() -> None:
    """After a call, and after an error."""
    module, options = modeling("qwen3_next"), {"max_new_tokens": 4, "assistant": SPEC}
    before = vars(module).copy()
    _model("qwen3_next").generate(**ROW, **options)
    with pytest.raises(ZeroDivisionError):
        _model("qwen3_next").generate(**ROW, **options, logits_processor=[lambda *_: 1 / 0])
    assert vars(module) == before


def test_states_without_a_count_of_tokens() -> None:
    model = _model("mamba")
    cache, options = DynamicCache(config=model.config), {"max_new_tokens": 4, "assistant": SPEC}
    states = {"cache" if PAST == "cache" else "cache_params": cache}
    model.generate(**ROW, **options, **states)
    assert all(layer.has_previous_state[0] for layer in cache.layers)
    with pytest.raises(UnsupportedOptionError, match="does not know how many tokens it holds"):
        model.generate(**ROW, **options, **states)


def test_unknown_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling("qwen3_next"), GatedDelta.kernel, lambda query, key, scale: None)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3Next.* stateful.*with their parameters \(torch_chunk"):
        _model("qwen3_next").generate(**ROW, max_new_tokens=4, assistant=SPEC)


def test_cache_that_the_config_leaves_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded on the right, prompts are left to transformers' loop, which takes the cache under the model's own name."""
    model = _model("mamba")
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    for inputs in (ROW, {name: values.flip(1) for name, values in BATCH.items()}):
        check_lossless(model, SPEC, 6, [inputs])


def test_plain_generate_in_another_thread() -> None:
    model = _model("qwen3_next")
    expected = model.generate(**ROW, max_new_tokens=12, do_sample=False)
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(model.generate, **ROW, max_new_tokens=12, do_sample=False, assistant=assistant)
            for assistant in (SPEC, None, SPEC) * 2
        ]
    assert all(torch.equal(call.result(), expected) for call in calls)


@pytest.mark.attached
def test_recurrence_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that replaces a layer's whole forward calls none of the functions."""
    model = build("qwen3_next")
    mixer = Anatomy.of(model).attention[0]
    assert mixer is not None

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cache = kwargs.get("cache", kwargs.get("cache_params"))
        cache.update_conv_state(hidden_states.transpose(1, 2), 0, conv_kernel_size=4)
        cache.update_recurrent_state(hidden_states, 0)
        return hidden_states

    mixer.forward = forward
    plain = model.generate(**ROW, max_new_tokens=8)
    with pytest.warns(UserWarning, match="a kernel of its own"):
        assert torch.equal(model.generate(**ROW, max_new_tokens=8, assistant=replace(SPEC, trust=True)), plain)


@pytest.mark.parametrize("name", ["deepseek_v4", "recurrent_gemma", "xlstm", "zaya"])
def test_states_of_unknown_kinds(name: str) -> None:
    common = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    own: dict[str, dict[str, Any]] = {
        "deepseek_v4": heads | {"n_routed_experts": 2, "num_experts_per_tok": 1, "o_groups": 2, "index_n_heads": 2},
        "recurrent_gemma": heads | {"lru_width": 32},
        "xlstm": {"num_heads": 4},
        "zaya": heads | {"num_experts": 2, "router_hidden_size": 8},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **common, **own[name])).eval()
    kinds = {"deepseek_v4": "heavily_compressed_attention", "zaya": "hybrid"}.get(name, "")
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} is stateful \(.*{kinds}.*chunk_scan"):
        model.generate(**ROW, max_new_tokens=4, eos_token_id=None, pad_token_id=0, assistant=SPEC)
