"""Mixtures of experts: few tokens gather weights, as in transformers' own decoding; more tokens do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from helpers.architectures import build
from helpers.captured import same_ids
from helpers.models import ragged_batch
from hf_selfspec import EarlyExit, FixedLength, SelfSpec
from hf_selfspec.model.graphs.model_graphs import graphs_of
from hf_selfspec.model.kernels import experts

EXPERTS, CHOSEN = 16, 2
Calls = list[tuple[str, int]]  # functions, and for how many tokens each was called


@pytest.fixture(scope="module")
def moe() -> PreTrainedModel:
    return build("qwen3_moe", factor=0.5, num_experts=EXPERTS, num_local_experts=EXPERTS, num_hidden_layers=2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found: Calls = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, states: torch.Tensor, *given: Any) -> Any:
            found.append((name, len(states)))
            return original(module, states, *given)

        return call

    known = ExpertsInterface._global_mapping
    for name in ("grouped_mm", "batched_mm"):
        monkeypatch.setitem(known, name, counted(name, known[name]))
    return found


def tokens_of(calls: Calls, name: str) -> set[int]:
    return {tokens for function, tokens in calls if function == name}


@pytest.mark.parametrize(
    ("drafted", "lengths", "has_kernel", "verified_by"),
    [(3, (9,), False, "batched_mm"), (10, (9, 5, 7), False, "grouped_mm"), (3, (9,), True, "grouped_mm")],
)
def test_off_a_cpu_weights_are_gathered_for_few_tokens(
    drafted: int,
    lengths: tuple[int, ...],
    has_kernel: bool,
    verified_by: str,
    moe: PreTrainedModel,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a device has a kernel for groups, for one token alone."""
    monkeypatch.setattr(experts, "GROUPED_ALWAYS", ())
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda weight: has_kernel)
    same_ids(moe, SelfSpec(EarlyExit(1), FixedLength(drafted)), len(lengths), new=24)
    assert set() < tokens_of(calls, "batched_mm") <= {*range(2 if has_kernel else EXPERTS // CHOSEN)}  # draft steps
    assert len(lengths) * (drafted + 1) in tokens_of(calls, verified_by)
    assert len(lengths) * max(lengths) in tokens_of(calls, "grouped_mm")  # the prefill


def test_exact_results_are_those_of_transformers_own_decoding(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way is faster: the other one may round differently."""
    monkeypatch.setattr(experts, "GROUPED_ALWAYS", ())
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda weight: True)
    model = build("qwen3_moe", factor=0.5, num_experts=EXPERTS, num_local_experts=EXPERTS).to(torch.bfloat16)
    spec = SelfSpec(EarlyExit(2), FixedLength(3), exact=True)
    model.generate(**ragged_batch((9,)), max_new_tokens=20, assistant=spec)
    assert {name for name, tokens in calls if tokens < EXPERTS // CHOSEN} == {"batched_mm"}
    assert spec.stats is not None
    assert spec.stats.drafted


def test_the_model_is_left_as_it_was(moe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error, and while another thread goes on."""
    monkeypatch.setattr(experts, "GROUPED_ALWAYS", ())
    spec, seen = SelfSpec(EarlyExit(1), FixedLength(3)), list[str | None]()

    def failing(*_: Any) -> None:
        seen.append(moe.config._experts_implementation)
        if len(seen) == 12:  # of 2 layers in the prefill, and 1 in each forward after it
            raise RuntimeError("broken")

    hooks = [layer.register_forward_pre_hook(failing) for layer in moe.model.layers]
    with experts.experts_by_size(moe):
        with pytest.raises(RuntimeError, match="broken"):
            moe.generate(**ragged_batch((9,)), max_new_tokens=40, assistant=spec)
        assert moe.config._experts_implementation == seen[-1]
    assert moe.config._experts_implementation == "grouped_mm" != seen[-1]
    for hook in hooks:
        hook.remove()


@pytest.mark.machine("graphs_are_taken")
def test_graphs_gather_weights_for_few_tokens(moe: PreTrainedModel, calls: Calls) -> None:
    """Other forwards have none, and the graphs of few tokens stay."""
    spec = SelfSpec(EarlyExit(1), FixedLength(10))
    for _ in range(2):
        same_ids(moe, spec, new=24)
    known = graphs_of(moe)
    assert known.count
    assert not known.refused
    assert tokens_of(calls, "batched_mm") == {1}
    assert ("grouped_mm", 11) in calls


def test_a_cpu_groups_always_and_the_choice_of_a_user_stays(
    moe: PreTrainedModel, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SelfSpec(EarlyExit(1), FixedLength(10))
    same_ids(moe, spec, new=24)
    assert {name for name, _ in calls} == {"grouped_mm"}
    calls.clear()
    monkeypatch.setattr(experts, "GROUPED_ALWAYS", ())
    moe.set_experts_implementation("batched_mm")
    try:
        moe.generate(**ragged_batch((9,)), max_new_tokens=20, do_sample=False, assistant=spec)
    finally:
        moe.set_experts_implementation("grouped_mm")
    assert {name for name, _ in calls} == {"batched_mm"}
