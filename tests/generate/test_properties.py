"""Any tree, any text, any mask, any settings: properties that hold whatever hypothesis draws."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, StoppingCriteriaList

from helpers.verification import orders, outcomes
from hf_selfspec.batch import Draft, Text
from hf_selfspec.drafts.free import suffix
from hf_selfspec.drafts.free.suffix import LONGEST_MATCH, SuffixIndex
from hf_selfspec.drafts.scoring import Scorer
from hf_selfspec.generate.acceptance import accept_line, choose_sampled
from hf_selfspec.generate.stopping import Stopper
from hf_selfspec.generate.walk import verify
from hf_selfspec.model.logits import Logits
from hf_selfspec.model.prompt import Prompt


def quick(examples: int) -> Any:
    """The same examples in each run, as long as each takes."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


# Some tokens without a probability.
LOGITS = st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 2.0]), min_size=4, max_size=4).filter(
    lambda logits: max(logits) > -math.inf
)


# Candidates that are named in addition; they may follow from what was drawn, but not from the uniform numbers.
NAMED = {
    "none": lambda drawn: [],
    "the same whatever was drawn": lambda drawn: [2, 0, 3],
    "one": lambda drawn: [next(token for token in (1, 3, 0, 2) if token not in drawn)],
    "by what was drawn": lambda drawn: [(sum(drawn) + token) % 4 for token in range(3)],
    "all": lambda drawn: [3, 0, 1, 2],
}


@quick(20)
@given(p=LOGITS, q=LOGITS, count=st.integers(0, 3), name=st.sampled_from(sorted(NAMED)))
def test_candidates_leave_the_distribution_p(p: list[float], q: list[float], count: int, name: str) -> None:
    """Averaged over all siblings that could have been drawn without replacement, and named ones beside them."""
    target, drawn_from = torch.tensor(p).softmax(-1), torch.tensor(q).softmax(-1)
    marginal = torch.zeros(4)
    with pytest.MonkeyPatch.context() as patch:
        for drawn, probability in orders(drawn_from, min(count, int((drawn_from > 0).sum()))):
            named = [token for token in NAMED[name](drawn) if token not in drawn]
            marginal += probability * outcomes(target, [*drawn, *named], drawn_from, len(drawn), patch)
    torch.testing.assert_close(marginal, target, rtol=0, atol=2e-5)


@quick(60)
@given(p=LOGITS, q=LOGITS, seed=st.integers(0, 99), drawn=st.integers(0, 3), named=st.integers(0, 4))
def test_an_index_is_that_of_the_token(p: list[float], q: list[float], seed: int, drawn: int, named: int) -> None:
    """Drawn siblings come first, named ones behind them."""
    torch.manual_seed(seed)
    drawn_from = torch.tensor(q).softmax(-1)
    order = torch.randperm(4).tolist()
    drafted = [token for token in order if drawn_from[token] > 0][:drawn]
    count = len(drafted)
    drafted += [token for token in order if token not in drafted][:named]
    token, index = choose_sampled(torch.tensor(p), drafted, drawn_from if count else None, count)
    assert p[token] > -math.inf
    assert (token not in drafted[count:]) if index is None else drafted[index] == token


@quick(12)
@given(p=LOGITS, q=LOGITS)
def test_a_line_has_the_distribution_p(p: list[float], q: list[float]) -> None:
    """All rows at once; within 5 standard deviations for each token."""
    torch.manual_seed(0)
    rows = 20_000
    target, drawn_from = torch.tensor(p).softmax(-1), torch.tensor(q).softmax(-1)
    drafted = torch.multinomial(drawn_from, rows, replacement=True)[:, None]
    accepted, instead = accept_line(target.expand(rows, 1, 4), drawn_from.expand(rows, 1, 4), drafted)
    found = torch.where(accepted, drafted, instead).flatten().bincount(minlength=4) / rows
    assert ((found - target).abs() <= 5 * (target * (1 - target) / rows).sqrt() + 1e-9).all()


@st.composite
def trees(draw: Any) -> tuple[list[int], list[int]]:
    """Parents and tokens of up to nine nodes, some of which do not count; siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(1, draw(st.integers(1, 9)) + 1):
        usable = [0, *(n for n in range(1, node) if parents[n - 1] >= 0)]
        parents.append(draw(st.sampled_from([*usable, -1])))
        taken = {token for parent, token in zip(parents, tokens, strict=False) if parent == parents[-1] >= 0}
        tokens.append(draw(st.sampled_from(sorted(set(range(12)) - taken))))
    return parents, tokens


@quick(80)
@given(tree=trees(), seed=st.integers(0, 999))
def test_a_greedy_walk_is_the_longest_path_that_agrees(tree: tuple[list[int], list[int]], seed: int) -> None:
    parents, tokens = tree
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, len(tokens) + 1, 12, generator=generator)
    for node, token in enumerate(tokens, start=1):  # some parents agree with a child
        if torch.rand((), generator=generator) < 0.7 and parents[node - 1] >= 0:
            logits[0, parents[node - 1], token] = 9.0 + node
    text = Text.of(torch.zeros(1, 3, dtype=torch.long), [0], 20)
    draft = Draft(torch.tensor([tokens]), [len(tokens)], [parents])
    stopper = Stopper(StoppingCriteriaList())
    (verdict,) = verify(text, draft, Logits(logits), Scorer(LogitsProcessorList(), 1, False), stopper, [False], None)
    node, expected, path = 0, [], []
    while node >= 0:
        expected.append(int(logits[0, node].argmax()))
        node = next((n for n, t in enumerate(tokens, start=1) if parents[n - 1] == node and t == expected[-1]), -1)
        path.append(node)
    assert (verdict.tokens, verdict.nodes, verdict.sources) == (expected, path, [0, *path[:-1]])


@st.composite
def masks(draw: Any) -> list[list[bool]]:
    """Masks of padding on the left, for one to three rows."""
    width = draw(st.integers(1, 8))
    found = draw(st.lists(st.integers(1, width), min_size=1, max_size=3))
    return [[False] * (width - tokens) + [True] * tokens for tokens in found]


@quick(80)
@given(rows=masks(), seen=st.integers(0, 3), generated=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_prompts_are_laid_out_from_slot_0(rows: list[list[bool]], seen: int, generated: list[int]) -> None:
    """Tokens and positions of columns, by hand."""
    width = len(rows[0])
    seen = min(seen, width - 1)
    ids = torch.arange(10, 10 + len(rows) * width).view(len(rows), width)
    mask = torch.tensor(rows)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask.long(), "position_ids": positions}
    prompt = Prompt.of(ids, given, seen, None)
    generated = generated[: len(rows)]
    slots = prompt.slots(width + max(generated), generated)
    if mask.all():  # as without a mask
        assert (slots, prompt.cursors, prompt.lengths) == (None, [seen] * len(rows), [width - seen] * len(rows))
        return
    assert slots is not None
    assert (prompt.width, prompt.has_positions) == (width, False)
    assert prompt.ends() == [sum(row) for row in rows]
    aligned = prompt.aligned(ids[:, seen:, None].float())[..., 0]
    for index, row in enumerate(rows):
        columns = [column for column in range(width) if row[column]]
        new = [column for column in columns if column >= seen]
        assert (prompt.cursors[index], prompt.lengths[index]) == (len(columns) - len(new), len(new))
        assert prompt.tokens[index, : len(new)].tolist() == ids[index, new].tolist()
        assert aligned[index, : len(new)].tolist() == ids[index, new].tolist()
        expected = [columns.index(column) if row[column] else -1 for column in range(width)]
        expected += [len(columns) + n if n < generated[index] else -1 for n in range(max(generated))]
        assert slots[index].tolist() == expected
        assert prompt.base[index] == len(columns) - width


@quick(150)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    shortest=st.integers(1, 4),
)
@example(tokens=[1, 2, 3, 0, 1, 2, 3, 0], tail=[2, 1, 2, 3], shortest=1)  # two that are as long
def test_a_match_is_one_by_brute_force(tokens: list[int], tail: list[int], shortest: int) -> None:
    """The same tokens lie before it, as many as it tells, and not one more; it is the latest of the longest ones."""
    index = SuffixIndex()
    index.extend(tokens[:17])
    index.extend(tokens[17:])

    def length_at(position: int) -> int:
        pairs = zip(reversed(tokens[:position]), reversed(tail), strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(position, len(tail), LONGEST_MATCH))

    lengths = [length_at(position) for position in range(len(tokens))]
    longest = max(lengths, default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MOST_CANDIDATES", 100)  # more than there are
        found = index.match(tail, shortest)
    if longest < shortest:
        assert found is None
    else:
        latest = max(position for position, length in enumerate(lengths) if length == longest)
        assert (found.length, found.position) == (longest, latest)
