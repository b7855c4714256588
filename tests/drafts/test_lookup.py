"""Free drafts: where tokens come from, how far they are trusted, and the tree that is made of them."""

import base64
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from types import FrameType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from hf_selfspec.drafts.free import successors, suffix
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.row import LookupRow, Rates
from hf_selfspec.drafts.free.successors import Successors
from hf_selfspec.drafts.free.suffix import SEPARATOR, SuffixIndex, texts_of
from hf_selfspec.drafts.free.tree import TokenTree, grow

# Seconds of rounds with 0, 1, 2, ... drafted tokens.
FREE = (1.0,) * 32
STEEP = tuple(1.0 + drafted for drafted in range(32))
STEPS = (1.0, *[1.4] * 3, *[1.7] * 12, *[2.3] * 16)


def random_text(seed: int, length: int = 300, alphabet: int = 6) -> list[int]:
    """Tokens among which some passages come again."""
    rng = random.Random(seed)
    text = [rng.randrange(alphabet) for _ in range(length // 2)]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += [*text[start : start + rng.randrange(1, 20)], rng.randrange(alphabet)]
    return text[:length]


def taught(seed: int, texts: int = 3, kind: str = "") -> tuple[LookupFindings, LookupRow]:
    """Knowledge of some texts, and a row that has gone on for a while."""
    knowledge = LookupFindings()
    for number in range(texts + 1):
        text = random_text(seed + number)
        row = row_of(text[:100], knowledge, kind)
        play(row, text[100:])
        if number < texts:
            knowledge.add_texts([row.text.tokens])
    return knowledge, row


def row_of(text: list[int], knowledge: LookupFindings | None = None, kind: str = "") -> LookupRow:
    return LookupRow(knowledge or LookupFindings(), kind, text)


def play(row: LookupRow, text: Sequence[int]) -> None:
    """Drafts and verifies until the row has written ``text``."""
    at = 0
    rng = random.Random(0)
    while at < len(text):
        tree = grow(row, STEPS, 1.0, 8)
        count = sum(1 for _ in tree.walk(text[at:]))  # what is accepted and one more
        tokens, shares = zip(*(random_top(rng) for _ in range(len(tree) + 1)), strict=True)
        row.learn(tree, text[at : at + count], np.array(tokens), np.array(shares))
        at += count


def random_top(rng: random.Random) -> tuple[list[int], list[float]]:
    weights = sorted((rng.random() ** 4 for _ in range(6)), reverse=True)
    return rng.sample(range(6), 6), [weight / sum(weights) for weight in weights]


def test_nothing_matches_or_goes_on_across_texts() -> None:
    index = SuffixIndex()
    index.extend([SEPARATOR, 1, 2, 3, SEPARATOR, 4, 5, 6])
    match = index.match([3, 4, 5])
    assert match.length == 2
    knowledge = LookupFindings()
    knowledge.add_texts([[1, 2, 3, 4, 5], [6, 7]])
    assert grow(row_of([1, 2, 3, 4, 5], knowledge), FREE, 1.0, 8).tokens == ()


def test_a_store_keeps_the_latest_texts() -> None:
    nothing, some = LookupFindings(most_stored=0), LookupFindings(most_stored=1_000)
    nothing.add_texts([range(400)])
    assert nothing.store.tokens == []
    some.add_texts([range(10_000 * row, 10_000 * row + 400) for row in range(33)])
    assert [text[-1] for text in texts_of(some.store.tokens)] == [300_399, 310_399, 320_399]
    some.add_texts([[1, 2, 3]])
    assert 500 <= len(some.store.tokens) <= 1_000
    assert texts_of(some.store.tokens)[-1] == [1, 2, 3]


def test_nobody_waits_until_long_texts_are_indexed() -> None:
    known = LookupFindings(most_stored=1_000)
    with ThreadPoolExecutor(1) as pool, known.lock:
        pool.submit(known.add_texts, [range(5_000), range(6_000, 7_000), range(9_000, 9_400)]).result(timeout=60)
    assert texts_of(known.store.tokens)[-1] == [*range(9_000, 9_400)]


def test_texts_are_stored_without_what_is_known_of_them() -> None:
    knowledge, prompt, turn = LookupFindings(), list(range(1_000, 1_100)), list(range(2_000, 2_050))
    answers = [list(range(start, start + 40)) for start in (10, 50, 90)]
    knowledge.add_texts([prompt + answer for answer in answers])
    # The first 96 tokens of the prompt are the same; the last 32 of these come before what is new.
    *others, whole = texts_of(knowledge.store.tokens)
    assert whole == prompt + answers[2]
    assert others == [prompt[64:] + answer for answer in answers[:2]]
    knowledge.add_texts([prompt + answers[2] + turn])
    assert texts_of(knowledge.store.tokens)[-1] == (prompt + answers[2] + turn)[96:]


def test_a_continuation_repeats_where_the_text_ends() -> None:
    tree = grow(row_of([7, 8, 9] * 4), FREE, 1.0, deepest=10, branching=False)
    assert tree.tokens == (7, 8, 9, 7, 8, 9, 7, 8, 9, 7)
    assert tree.parents == tuple(range(10))


def test_successors_of_the_pair_come_before_those_of_the_token() -> None:
    successors = Successors()
    successors.see([(1, 2)], np.array([[5, 6]]), np.array([[0.75, 0.125]]), 3)
    successors.see([(9, 2)], np.array([[7]]), np.array([[0.5]]), 4)
    found = successors.get(1, 2)
    assert (found.is_pair, found.text) == (True, 3)
    assert (list(found.tokens[:3]), list(found.probabilities[:3])) == ([5, 6, -1], [0.75, 0.125, 0.0])
    single = successors.get(3, 2)
    assert (single.is_pair, single.text, single.tokens[0]) == (False, 4, 7)
    assert successors.get(2, 1) is None


def test_the_oldest_pairs_leave() -> None:
    successors = Successors(10)
    for token in range(25):
        successors.see([(token, token + 1)], np.array([[token + 2]]), np.array([[1.0]]))
    assert len(successors) == 10
    assert [token for token in range(25) if successors.get(token, token + 1)] == list(range(15, 25))
    assert successors.get(99, 3) is None
    smaller = Successors(5)
    smaller.restore(successors.state())
    assert [token for token in range(25) if smaller.get(token, token + 1)] == list(range(20, 25))


def check(tree: TokenTree, deepest: int, branching: bool = True) -> None:
    depth, children = [0], set()
    reach = [1.0, *tree.reach]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
        assert 0 <= parent < node
        assert (parent, token) not in children
        assert 0 < reach[node] <= reach[parent]
        assert token >= 0
        children.add((parent, token))
        depth.append(depth[parent] + 1)
    assert max(depth) <= deepest
    assert tree.expected == pytest.approx(sum(reach))
    for node in range(len(tree) + 1):
        assert sum(reach[child] for child, parent in enumerate(tree.parents, 1) if parent == node) <= reach[node] + 1e-9
    assert branching or tree.parents == tuple(range(len(tree)))


@pytest.mark.every_run("[01]-True-steps|[23]-False-(free|steep)")
@pytest.mark.parametrize("costs", [FREE, STEEP, STEPS], ids=["free", "steep", "steps"])
@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_trees_hold_together(seed: int, branching: bool, costs: tuple[float, ...]) -> None:
    _, row = taught(seed)
    for deepest in (0, 1, 3, 12):
        tree = grow(row, costs, 1.0, deepest, branching)
        assert len(tree) < len(costs)
        assert len(tree.reach) == len(tree.tokens) == len(tree.parents)
        check(tree, deepest, branching)
        assert list(tree.reach) == sorted(tree.reach, reverse=True)


def test_nothing_is_drafted_where_nothing_pays() -> None:
    _, row = taught(1)
    assert grow(row, STEEP, 1.0, 8).tokens == ()
    assert grow(row, (1.0,), 1.0, 8).tokens == ()
    assert grow(row_of([]), FREE, 1.0, 8).tokens == ()


@pytest.mark.every_run("(0.0|1.7|3.0)-[01]")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pace", [0.0, 1.0, 1.7, 3.0])
def test_the_size_is_the_best_one(seed: int, pace: float) -> None:
    """Of the nodes in the order of their probabilities, so many as bring most for their time."""
    _, row = taught(seed)
    every = grow(row, FREE, 1.0, 8)
    values = [1 + sum(every.reach[:size]) - max(pace, 1 / STEPS[0]) * STEPS[size] for size in range(len(every) + 1)]
    tree = grow(row, STEPS, pace, 8)
    assert tree.tokens == every.tokens[: values.index(max(values))]


def test_a_round_teaches_what_was_accepted_and_what_the_logits_held() -> None:
    """Of rejected nodes, too, where the text does not have the same pair of tokens."""

    def known_after(
        text: list[int], tree: TokenTree, emitted: list[int], likeliest: list[int]
    ) -> dict[tuple[int, int], int]:
        row = row_of(text, knowledge := LookupFindings())
        row.learn(tree, emitted, np.array(likeliest)[:, None], np.full((len(likeliest), 1), 0.5))
        assert row.text.tokens == text + emitted
        pairs = product(range(10), range(10))
        found = {pair: knowledge.successors.get(*pair) for pair in pairs}
        return {pair: one.tokens[0] for pair, one in found.items() if one is not None and one.is_pair}

    tree = TokenTree((3, 5, 4), (0, 0, 1), (0.5, 0.2, 0.3))
    found = {(1, 2): 3, (2, 3): 9, (2, 5): 8, (3, 4): 7}
    assert known_after([1, 2, 3, 4, 1, 2], tree, [3, 9], [3, 9, 8, 7]) == found
    tree = TokenTree((2, 5), (0, 1), (0.5, 0.2))
    assert known_after([2, 2], tree, [7], [7, 8, 9]) == {(2, 2): 7, (2, 5): 9}


def test_matches_that_fail_are_trusted_less() -> None:
    rng, row = random.Random(3), row_of(random_text(3, alphabet=4))
    before = grow(row, FREE, 1.0, 8, branching=False).expected
    for _ in range(300):
        tree = grow(row, FREE, 1.0, 8)
        row.learn(tree, [rng.randrange(100, 104)], *np.zeros((2, len(tree) + 1, 0)))
        row.text.extend([rng.randrange(4) for _ in range(4)])
    assert grow(row, FREE, 1.0, 8, branching=False).expected < before


def test_a_round_that_drafts_nothing_teaches_rates() -> None:
    knowledge = LookupFindings()
    row = row_of([1, 2, 3, 4, 1, 2, 3], knowledge)
    tree = grow(row, STEEP, 1.0, 8)
    assert len(tree) == 0
    key = tree.offers[0][0][1]
    before = knowledge.rates[""].rates[key]
    row.learn(tree, [4], np.array([[4]]), np.array([[1.0]]))
    assert knowledge.rates[""].rates[key] > before
    assert knowledge.rates["sampled"].rates == Rates().rates  # another kind of call


def test_what_a_match_predicts_counts_once() -> None:
    """For the next token, and not for those of later rounds in which nothing is predicted."""
    knowledge = LookupFindings()
    row, seen = row_of([1, 2, 3, 4, 1, 2, 3], knowledge), list[list[float]]()
    assert row.likelihood() > 0
    for token in (4, 9, 9):
        seen.append(list(knowledge.rates[""].rates))
        row.follow([token])
    assert seen[0] != seen[1] == seen[2] == knowledge.rates[""].rates


def test_what_is_known_lasts() -> None:
    knowledge, row = taught(4, kind="greedy")
    other = LookupFindings()
    other.restore(json.loads(json.dumps(knowledge.state())))
    assert other.state() == knowledge.state()
    trees = []
    for found in (knowledge, other):
        trees.append(grow(row_of(row.text.tokens, found, "greedy"), FREE, 1.0, 8))
    assert trees[0] == trees[1]
    assert len(trees[0]) > 5


def test_a_broken_state_is_refused_and_changes_nothing() -> None:
    knowledge, _ = taught(4)
    before = knowledge.state()
    keys, arrays = len(Rates().rates), load(base64.b64decode(before["arrays"]))
    for broken in (
        {"pairs": [1, 1], "tokens": [[0] * 8] * 2, "probabilities": [[0.0] * 8] * 2},
        {"pairs": [1], "tokens": [[0] * 7], "probabilities": [[0.0] * 8]},
        {"pairs": [1], "tokens": [[0] * 8], "probabilities": [[2.0] * 8]},
        {"store": [0.5]},
        {"store": [[1]]},
        {"store": [-2]},
        {"rates": {"": {"rates": [0.5], "seen": [8.0]}}},
        {"rates": {"": {"rates": [0.5] * keys, "seen": [float("nan")] * keys}}},
    ):
        state = before | broken
        if "rates" not in broken:
            changed = arrays | {name: np.array(values) for name, values in broken.items()}
            state = before | {"arrays": base64.b64encode(save(changed)).decode("ascii")}
        with pytest.raises(ValueError, match=r"successors|store|rates|Rates|tokens"):
            knowledge.restore(state)
        assert knowledge.state() == before


def test_a_step_that_was_interrupted_leaves_indices_that_go_on() -> None:
    """At any line of it: an error of memory, or a user, may end any."""

    def interrupted(step: Callable[[], None], after: int) -> None:
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal after
            after -= frame.f_globals["__name__"] in (suffix.__name__, successors.__name__) and event == "line"
            if not after:
                raise MemoryError
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        with suppress(MemoryError):
            step()
        sys.settrace(before)

    text = random_text(0, 24, alphabet=2)
    for place in range(1, 150):
        index, pairs, shares = SuffixIndex(), Successors(4), np.ones((1, 1), np.float32)

        def see(mark: int, pairs: Successors = pairs, shares: np.ndarray = shares) -> None:
            for token in range(9):
                pairs.see([(token, token + 1)], np.full((1, 1), mark + token, np.int32), shares)

        interrupted(partial(index.extend, text), place)
        interrupted(partial(see, 100), place)
        for _ in range(2):
            index.extend(text)
            see(0)
        for end in range(3, len(index.tokens)):
            tail = index.tokens[:end][-8:]
            match = index.match(tail)
            assert match is not None
            assert index.tokens[match.position - match.length : match.position] == tail[-match.length :]
        known = pairs.get(8, 9)
        assert known is not None
        assert known.tokens[0] == 8
