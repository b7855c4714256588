"""Free drafts are lossless where tokens are drawn: named tokens, and drawn ones with named siblings beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper

from helpers.sampling import (
    OPTIONS,
    SIGNIFICANCE,
    Choice,
    accepts_everything,
    check_exact,
    draws_from_p_after_a_rejection,
    exact_joint,
    p_value,
    sample,
)
from helpers.sampling import llama as tiny_vocabulary
from hf_selfspec import Cascade, EarlyExit, FixedLength, Lookup, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.batch import Draft, Text
from hf_selfspec.draft.controlled import ControlledDrafter
from hf_selfspec.verify import walk
from hf_selfspec.verify.sampling import choose_sampled

pytestmark = pytest.mark.usefixtures("verification_is_free")

# Few nodes, so that not every token of the tiny vocabulary is named.
SPECS: dict[str, Callable[[], SelfSpec]] = {
    "named": lambda: SelfSpec(Lookup(max_nodes=3)),
    "drawn and named": lambda: SelfSpec(Cascade([Lookup(max_nodes=4), EarlyExit(1)]), FixedLength(2)),
    "skipped layers and named": lambda: SelfSpec(Cascade([Lookup(max_nodes=3), SkipLayers((1, 2), (2,))])),
    "drawn tree and named": lambda: SelfSpec(
        Cascade([Lookup(max_nodes=6), EarlyExit(1)]), FixedLength(2), TopKTree(((1.0, 2),))
    ),
}


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each place of the drafts with several candidates how many were drawn, and how many named."""
    seen: list[tuple[int, int]] = []

    def watch(kind: type[ControlledDrafter]) -> None:
        original = kind.propose

        def watched(self: Any, text: Text, max_new: list[int]) -> Draft:
            draft = original(self, text, max_new)
            for row in range(0, text.batch_size, 10):
                for node in range(draft.size + 1):
                    children = draft.children(row, node)
                    if len(children) > 1:
                        _, drawn = draft.candidates(row, node, children)
                        seen.append((drawn, len(children) - drawn))
            return draft

        monkeypatch.setattr(kind, "propose", watched)

    watch(ControlledDrafter)
    return seen


@pytest.mark.every_run("named-.*")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("named", "top_k"),
        ("named", "temperature"),
        ("drawn and named", "top_p"),
        ("drawn and named", "temperature"),
    ],
)
def test_joint_distribution_is_that_of_the_full_model(name: str, options: str, mixed: list[tuple[int, int]]) -> None:
    """Several calls, which draft with what those before have shown."""
    given, processors = OPTIONS[options]
    check_exact(sample(SPECS[name](), rows=400, calls=3, **given), exact_joint(tiny_vocabulary(), processors))
    assert_mixed(name, mixed)


@pytest.mark.every_run("drawn tree and named")
@pytest.mark.parametrize("name", ["skipped layers and named", "drawn tree and named"])
def test_joint_distribution_of_other_mixtures(name: str, mixed: list[tuple[int, int]]) -> None:
    check_exact(sample(SPECS[name](), rows=400, calls=3), exact_joint(tiny_vocabulary(), []))
    assert_mixed(name, mixed)


@pytest.mark.every_run("named")
@pytest.mark.parametrize("name", ["named", "drawn and named"])
def test_joint_distribution_of_calls_with_one_row(name: str) -> None:
    sampled = sample(SPECS[name](), rows=1, calls=120, top_k=2)
    check_exact(sampled, exact_joint(tiny_vocabulary(), [TopKLogitsWarper(2)]))


def assert_mixed(name: str, mixed: list[tuple[int, int]]) -> None:
    """Places with a drawn token and a named one, or with several named ones, are frequent."""
    drawn = {"named": 0, "drawn tree and named": 2}.get(name, 1)
    assert sum(one == drawn and named >= 1 for one, named in mixed) > 30


# The test itself -----------------------------------------------------------------------------------------------------


def asks_with_the_same_p(scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int) -> Choice:
    for index, token in enumerate(drafted):
        if choose_sampled(scores, [token], q, int(index < num_drawn))[1] is not None:
            return token, index
    return choose_sampled(scores, [], None, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "biased"),
    [
        ("named", accepts_everything),
        ("named", draws_from_p_after_a_rejection),
        ("named", asks_with_the_same_p),
        ("drawn and named", accepts_everything),
        ("drawn and named", asks_with_the_same_p),
    ],
)
def test_a_biased_rule_is_detected(name: str, biased: Callable[..., Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "choose_sampled", biased)
    sequences, _ = sample(SPECS[name](), rows=500, calls=4)
    assert p_value(sequences, exact_joint(tiny_vocabulary(), [])) < SIGNIFICANCE / 100
