"""Free drafts: where tokens come from, how far they are trusted, and the tree that is made of them."""

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby, product
from types import FrameType
from typing import Any

import numpy as np
import pytest

from hf_selfspec.drafts.free import successors, suffix
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.row import LookupRow, Rates
from hf_selfspec.drafts.free.successors import Successors
from hf_selfspec.drafts.free.suffix import SEPARATOR, SuffixIndex
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


def row_of(text: list[int], knowledge: LookupFindings | None = None) -> LookupRow:
    return LookupRow(knowledge or LookupFindings(), "greedy", text)


def taught(seed: int) -> tuple[LookupFindings, LookupRow]:
    """Knowledge of three texts, and a row that has gone on for a while."""
    knowledge, rng = LookupFindings(), random.Random(seed)
    for number in range(4):
        text = random_text(seed + number)
        row = row_of(text[:100], knowledge)
        while (at := len(row.text.tokens)) < len(text):
            tree = grow(row, STEPS, 1.0, 8)
            count = sum(1 for _ in tree.walk(text[at:]))  # what is accepted and one more
            weights = -np.sort(-np.array([[rng.random() ** 4 for _ in range(6)] for _ in range(len(tree) + 1)]))
            tokens = np.array([rng.sample(range(6), 6) for _ in weights])
            row.learn(tree, text[at : at + count], tokens, weights / weights.sum(1, keepdims=True))
        if number < 3:
            knowledge.add_texts([row.text.tokens])
    return knowledge, row


def stored(knowledge: LookupFindings) -> list[list[int]]:
    """The texts between separators, the oldest first, which may lack its beginning."""
    groups = groupby(knowledge.store.tokens, lambda token: token == SEPARATOR)
    return [list(text) for is_end, text in groups if not is_end]


def test_nothing_matches_or_goes_on_across_texts() -> None:
    index = SuffixIndex()
    index.extend([SEPARATOR, 1, 2, 3, SEPARATOR, 4, 5, 6])
    assert index.match([3, 4, 5]).length == 2
    knowledge = LookupFindings()
    knowledge.add_texts([[1, 2, 3, 4, 5], [6, 7]])
    assert grow(row_of([1, 2, 3, 4, 5], knowledge), FREE, 1.0, 8).tokens == ()


def test_a_store_keeps_the_latest_texts() -> None:
    """Nobody waits until long ones are indexed."""
    nothing, some = LookupFindings(most_stored=0), LookupFindings(most_stored=1_000)
    nothing.add_texts([range(400)])
    assert nothing.store.tokens == []
    some.add_texts([range(10_000 * row, 10_000 * row + 400) for row in range(33)])
    assert [text[-1] for text in stored(some)] == [300_399, 310_399, 320_399]
    some.add_texts([[1, 2, 3]])
    assert 500 <= len(some.store.tokens) <= 1_000
    assert stored(some)[-1] == [1, 2, 3]
    with ThreadPoolExecutor(1) as pool, some.lock:
        pool.submit(some.add_texts, [range(5_000), range(6_000, 7_000), range(9_000, 9_400)]).result(timeout=60)
    assert stored(some)[-1] == [*range(9_000, 9_400)]


def test_texts_are_stored_without_what_is_known_of_them() -> None:
    knowledge, prompt, turn = LookupFindings(), list(range(1_000, 1_100)), list(range(2_000, 2_050))
    answers = [list(range(start, start + 40)) for start in (10, 50, 90)]
    knowledge.add_texts([prompt + answer for answer in answers])
    # The first 96 tokens of the prompt are the same; the last 32 of these come before what is new.
    assert stored(knowledge) == [*(prompt[64:] + answer for answer in answers[:2]), prompt + answers[2]]
    knowledge.add_texts([prompt + answers[2] + turn])
    assert stored(knowledge)[-1] == (prompt + answers[2] + turn)[96:]


def test_a_continuation_repeats_where_the_text_ends() -> None:
    tree = grow(row_of([7, 8, 9] * 4), FREE, 1.0, deepest=10, branching=False)
    assert (tree.tokens, tree.parents) == ((7, 8, 9, 7, 8, 9, 7, 8, 9, 7), tuple(range(10)))


def test_long_matches_are_followed_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this text as in earlier ones, and into what is drafted itself."""
    text, looks, match, knowledge = list(range(60)), list[int](), SuffixIndex.match, LookupFindings()
    monkeypatch.setattr(SuffixIndex, "match", lambda *given: looks.append(0) or match(*given))
    knowledge.add_texts([text])
    rows = row_of([*text, *text[:20]]), row_of(text[:20], knowledge), row_of([7, 8] * 9)
    for row, expected in zip(rows, (text[20:], text[20:], [7, 8] * 20), strict=True):
        looks.clear()
        assert list(grow(row, FREE, 1.0, 31).tokens) == expected[:31]
        assert len(looks) == 2  # after one place, in this text and in others


def test_successors_of_the_pair_come_before_those_of_the_token() -> None:
    """The oldest pairs leave."""
    pairs = Successors(10)
    pairs.see([(1, 2)], np.array([[5, 6]]), np.array([[0.75, 0.125]]), 3)
    pairs.see([(9, 2)], np.array([[7]]), np.array([[0.5]]), 4)
    pair, single = pairs.get(1, 2), pairs.get(3, 2)
    assert (pair.is_pair, pair.text, pair.tokens[:3], pair.probabilities[:3]) == (True, 3, [5, 6, -1], [0.75, 0.125, 0])
    assert (single.is_pair, single.text, single.tokens[0]) == (False, 4, 7)
    assert pairs.get(2, 1) is None
    for token in range(25):
        pairs.see([(token, token + 1)], np.array([[token + 2]]), np.array([[1.0]]))
    smaller = Successors(5)
    smaller.restore(pairs.state())
    for kept, first in ((pairs, 15), (smaller, 20)):
        assert [token for token in range(25) if kept.get(token, token + 1)] == list(range(first, 25))
        assert kept.get(99, 3) is None


@pytest.mark.every_run("[01]-True-steps|[23]-False-(free|steep)")
@pytest.mark.parametrize("costs", [FREE, STEEP, STEPS], ids=["free", "steep", "steps"])
@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_trees_hold_together(seed: int, branching: bool, costs: tuple[float, ...]) -> None:
    _, row = taught(seed)
    for deepest in (0, 1, 3, 12):
        tree = grow(row, costs, 1.0, deepest, branching)
        assert len(tree.reach) == len(tree.tokens) == len(tree.parents) == len(tree) < len(costs)
        assert list(tree.reach) == sorted(tree.reach, reverse=True)
        assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
        assert min(tree.tokens, default=0) >= 0
        assert tree.depth <= deepest
        assert branching or tree.parents == tuple(range(len(tree)))
        reach = [1.0, *tree.reach]
        assert tree.expected == pytest.approx(sum(reach))
        for node in range(len(tree) + 1):
            below = [child for child, parent in enumerate(tree.parents, 1) if parent == node]
            assert all(child > node for child in below)
            assert sum(reach[child] for child in below) <= reach[node] + 1e-9


def test_nothing_is_drafted_where_nothing_pays() -> None:
    _, row = taught(1)
    for place, costs in ((row, STEEP), (row, (1.0,)), (row_of([]), FREE)):
        assert grow(place, costs, 1.0, 8).tokens == ()


@pytest.mark.every_run("(0.0|1.7|3.0)-[01]")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pace", [0.0, 1.0, 1.7, 3.0])
def test_the_size_is_the_best_one(seed: int, pace: float) -> None:
    """Of the nodes in the order of their probabilities, so many as bring most for their time."""
    _, row = taught(seed)
    every = grow(row, FREE, 1.0, 8)
    values = [1 + sum(every.reach[:size]) - max(pace, 1 / STEPS[0]) * STEPS[size] for size in range(len(every) + 1)]
    assert grow(row, STEPS, pace, 8).tokens == every.tokens[: values.index(max(values))]


def test_a_round_teaches_what_the_logits_held() -> None:
    """Of rejected nodes, too, where the text does not have the same pair of tokens."""
    tree, pair_again = TokenTree((3, 5, 4), (0, 0, 1), (0.5, 0.2, 0.3)), TokenTree((2, 5), (0, 1), (0.5, 0.2))
    for text, drafted, emitted, likeliest, learned in (
        ([1, 2, 3, 4, 1, 2], tree, [3, 9], [3, 9, 8, 7], {(1, 2): 3, (2, 3): 9, (2, 5): 8, (3, 4): 7}),
        ([2, 2], pair_again, [7], [7, 8, 9], {(2, 2): 7, (2, 5): 9}),
    ):
        row = row_of(text, knowledge := LookupFindings())
        row.learn(drafted, emitted, np.array(likeliest)[:, None], np.full((len(likeliest), 1), 0.5))
        assert row.text.tokens == text + emitted
        known = {pair: knowledge.successors.get(*pair) for pair in product(range(10), range(10))}
        assert {pair: each.tokens[0] for pair, each in known.items() if each is not None and each.is_pair} == learned


def test_rounds_without_a_draft_teach_rates() -> None:
    """What a match predicts counts for the next token alone, and for this kind of call."""
    knowledge, text = LookupFindings(), [1, 2, 3, 4, 1, 2, 3]
    row, rates = row_of(text, knowledge), knowledge.rates["greedy"]
    tree = grow(row, STEEP, 1.0, 8)
    assert len(tree) == 0
    key = tree.offers[0][0][1]
    seen = [rates.rates[key]]
    for token in (4, 9):
        row.learn(tree, [token], np.array([[token]]), np.array([[1.0]]))
        seen.append(rates.rates[key])
    assert seen[0] < seen[1] > seen[2]
    assert knowledge.rates["sampled"].rates == Rates().rates
    again = Rates.of(state := rates.state())
    again.see([(9, key, 1.0)], 9)
    assert again.rates != rates.rates == state["rates"], "what is restored leaves its state as it was"
    row = row_of(text, knowledge)
    assert row.likelihood() > 0
    followed = list[list[float]]()
    for token in (4, 9, 9):
        followed.append(list(rates.rates))
        row.follow([token])
    assert followed[0] != followed[1] == followed[2] == rates.rates


def test_what_is_known_lasts() -> None:
    knowledge, row = taught(4)
    other = LookupFindings()
    other.restore(json.loads(json.dumps(knowledge.state())))
    assert other.state() == knowledge.state()
    trees = [grow(row_of(row.text.tokens, each), FREE, 1.0, 8) for each in (knowledge, other)]
    assert trees[0] == trees[1]
    assert len(trees[0]) > 5


@contextmanager
def interrupted(lines: int) -> Iterator[None]:
    """Ends what runs within with an error after so many lines of the indices."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines -= frame.f_globals["__name__"] in (suffix.__name__, successors.__name__) and event == "line"
        if not lines:
            raise MemoryError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    with suppress(MemoryError):
        yield
    sys.settrace(before)


def test_a_step_that_was_interrupted_leaves_indices_that_go_on() -> None:
    """At any line of it: an error of memory, or a user, may end any."""
    text, ones = random_text(0, 24, alphabet=2), np.ones((1, 1), np.float32)

    def see(pairs: Successors, mark: int) -> None:
        for token in range(9):
            pairs.see([(token, token + 1)], np.full((1, 1), mark + token, np.int32), ones)

    for place in range(1, 150):
        index, pairs = SuffixIndex(), Successors(4)
        with interrupted(place):
            index.extend(text)
        with interrupted(place):
            see(pairs, 100)
        for _ in range(2):
            index.extend(text)
            see(pairs, 0)
        for end in range(3, len(index.tokens)):
            tail = index.tokens[:end][-8:]
            match = index.match(tail)
            assert index.tokens[match.position - match.length : match.position] == tail[-match.length :]
        assert pairs.get(8, 9).tokens[0] == 8
