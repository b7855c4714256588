"""Verification piece by piece: choosing a token, trees, walking a draft, processors, stopping criteria."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from helpers.verification import ALMOST_ONE, fix_uniform, orders
from hf_selfspec import NumericalError, SettingError, SettingTypeError, TopKTree
from hf_selfspec.batch import Draft, Text, Verdict
from hf_selfspec.verify import walk
from hf_selfspec.verify.greedy import choose_greedy
from hf_selfspec.verify.sampling import accept_line, choose_sampled, draw_without_replacement
from hf_selfspec.verify.scoring import Scorer, check_highest
from hf_selfspec.verify.stopping import Stopper
from hf_selfspec.verify.walk import verify

# Choosing one token ------------------------------------------------------------------------------------------------


HALVES, BOTH = [0.5, 0.5, 0.0], [0, 1]


@pytest.mark.parametrize(
    ("uniform", "p", "drafted", "q", "tokens"),
    [
        ([0.0, 0.0], [0.0, 0.0, 1.0], [0, 1], [0.5, 0.4, 0.1], [2]),
        # Fewer tokens have a probability than siblings were asked for: the rest of the list is padding.
        ([ALMOST_ONE, 0.0], [0.2, 0.8], [0, 1], [1.0, 0.0], [1]),
        # p and q are equal but for rounding; even then a token that p rules out must not come through.
        ([ALMOST_ONE], [0.5, 0.5], [1], [0.5000001, 0.5000001], BOTH),
        ([1.0], HALVES, [0], [0.5, 0.5, 0.0], BOTH),
        ([1.0], HALVES, [2], [0.5, 0.5, 1e-9], BOTH),
    ],
)
def test_what_cannot_be_is_never_accepted(
    uniform: list[float],
    p: list[float],
    drafted: list[int],
    q: list[float],
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_uniform(monkeypatch, *uniform)
    token, index = choose_sampled(torch.tensor(p).log(), drafted, torch.tensor(q), len(drafted))
    assert token in tokens
    assert index is None


@pytest.mark.parametrize("token", range(4))
def test_a_named_candidate_that_is_drawn_is_accepted(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.0, 0.9, 0.1, 0.0])
    monkeypatch.setattr(torch, "multinomial", lambda residual, count: torch.tensor([token]))
    fix_uniform(monkeypatch, *[ALMOST_ONE] * 4)
    assert choose_sampled(p.log(), [3, 2], None, 2) == (token, {3: 0, 2: 1}.get(token))
    assert choose_sampled(p.log(), [1, 3, 0], q, 1) == (token, {3: 1, 0: 2}.get(token))


def test_candidates_of_a_draft() -> None:
    """Children beyond the drawn nodes are named, also where a node has both, and lines have their own."""
    q = torch.rand(1, 2, 5)
    draft = Draft(torch.tensor([[3, 4, 1, 2, 0]]), [3], [[0, 1, 0, 1, 2]], q, num_drawn=2)
    children = [draft.children(0, node) for node in range(6)]
    assert children == [[1, 3], [2, 4], [5], [], [], []]
    for node, drawn in ((0, 1), (1, 1)):
        found, count = draft.candidates(0, node, children[node])
        assert torch.equal(found, q[0, node])
        assert count == drawn
    assert draft.candidates(0, 2, [5]) == (None, 0)
    assert draft.candidates(0, 3, []) == (None, 0)
    line = Draft(torch.tensor([[3, 4]]), [2], q=q)
    assert line.candidates(0, 1, line.children(0, 1))[1] == 1
    assert Draft(torch.tensor([[3, 4]]), [2]).candidates(0, 0, [1]) == (None, 0)


def test_a_line_never_accepts_a_token_without_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the uniform number is 0."""
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    p, q = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.5]]])
    for token in (0, 1):
        accepted, instead = accept_line(p, q, torch.tensor([[token]]))
        assert (accepted.item(), instead.item()) == (token == 1, 1)


def test_tokens_that_are_drawn_at_all_nodes_at_once() -> None:
    """Each from the distribution of its own node, named children and drawn ones alike."""
    scores = torch.full((2, 3, 5), -math.inf)
    tokens = torch.tensor([[4, 0, 2], [1, 1, 3]])
    scores.scatter_(2, tokens[..., None], 0.5)
    named = Draft(tokens[:, :2], [2, 2])
    chosen = walk._chosen(scores, named, do_sample=True)
    assert chosen is not None
    assert chosen[0].tolist() == tokens.tolist()
    drawn = Draft(tokens[:, :2], [2, 2], q=torch.full((2, 2, 5), 0.2))
    chosen = walk._chosen(scores, drawn, do_sample=True)
    assert chosen is not None
    assert [found.tolist() for found in chosen] == [tokens.tolist(), [[True, True]] * 2, tokens[:, :2].tolist()]


def test_drawing_without_replacement_is_drawing_in_turn() -> None:
    torch.manual_seed(0)
    q, draws = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]), 20000
    drawn = draw_without_replacement(q.expand(draws, 5), 3)
    expected = list(orders(q, 3))
    observed = [int((drawn == torch.tensor(order)).all(1).sum()) for order, _ in expected]
    assert sum(observed) == draws
    assert chisquare(observed, [draws * probability for _, probability in expected], sum_check=False).pvalue > 1e-4


def test_drawing_more_than_there_is_pads_with_impossible_tokens() -> None:
    drawn = draw_without_replacement(torch.tensor([[0.0, 0.7, 0.3, 0.0]]), 4)[0].tolist()
    assert sorted(drawn[:2]) == [1, 2]
    assert sorted(drawn[2:]) == [0, 3]


def test_greedy_token_confirms_a_drafted_one_or_none() -> None:
    scores = torch.tensor([0.1, 3.0, 2.0])
    assert choose_greedy(scores, [2, 1], None, 0) == (1, 1)
    assert choose_greedy(scores, [2, 0], None, 0) == (1, None)
    assert choose_greedy(scores, [], None, 0) == (1, None)


# Trees -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "width"), [(0.01, 10), (0.5, 10), (0.51, 5), (0.8, 5), (0.81, 3), (0.95, 3), (0.96, 1), (1.0, 1)]
)
def test_tree_is_narrower_the_surer_the_draft(confidence: float, width: int) -> None:
    assert TopKTree().width(torch.tensor([[confidence]]), torch.ones(1)) == width
    assert TopKTree().width(torch.tensor([[1.0], [confidence]]), torch.ones(2)) == width


@pytest.mark.parametrize(
    ("widths", "error", "message"),
    [
        ([(1.0, 3)], SettingError, "must be a tuple of (confidence, k) pairs"),
        (((1.0, 3, 2),), SettingError, "must be a tuple of (confidence, k) pairs"),
        ((), SettingError, "rise from above 0 to 1, got []"),
        (((0.8, 3), (0.5, 2), (1.0, 1)), SettingError, "rise from above 0 to 1, got [0.8, 0.5, 1.0]"),
        (((0.5, 3), (1.5, 1)), SettingError, "rise from above 0 to 1"),
        (((1.0, 0),), SettingError, "k must be at least 1, got 0"),
        (((1.0, True),), SettingTypeError, "k must be a whole number of at least 1, got "),
    ],
)
def test_tree_refuses_widths(widths: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        TopKTree(widths)


def tree_draft() -> Draft:
    """A line of three nodes; 4 and 5 stand beside the first, 6 beside the third. Row 1 stopped after one token."""
    parents = [[0, 1, 2, 0, 0, 2], [0, -1, -1, 0, 0, -1]]
    return Draft(torch.tensor([[1, 2, 3, 4, 5, 6]] * 2), lengths=[3, 1], parents=parents)


def test_structure_of_drafts() -> None:
    """Of trees that differ by row, of a line, and of nothing."""
    draft = tree_draft()
    assert (draft.size, draft.is_tree) == (6, True)
    assert [draft.children(0, node) for node in range(7)] == [[1, 4, 5], [2], [3, 6], [], [], [], []]
    assert [draft.children(1, node) for node in range(7)] == [[1, 4, 5], [], [], [], [], [], []]
    line = Draft(torch.tensor([[7, 8]]), lengths=[2])
    assert not line.is_tree
    assert [line.children(0, node) for node in range(3)] == [[1], [2], []]
    nothing = Draft(torch.empty(1, 0), lengths=[0])
    assert (nothing.size, nothing.is_tree, nothing.children(0, 0)) == (0, False, [])


# Walking a draft ---------------------------------------------------------------------------------------------------

VOCABULARY = 10


def text_of(*rows: list[int], width: int = 3) -> Text:
    """A batch whose rows go on after a prompt of ``width`` columns; rows may differ in length."""
    ids = torch.zeros(len(rows), max(map(len, rows)) + 8, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return Text(ids, [len(tokens) for tokens in rows], [0] * len(rows), width)


def logits_for(*rows: list[int]) -> torch.Tensor:
    """``[b, nodes, v]`` logits whose largest is at the given token of each node."""
    return torch.nn.functional.one_hot(torch.tensor(rows), VOCABULARY).float()


def walked(
    draft: Draft,
    logits: torch.Tensor,
    *criteria: StoppingCriteria,
    done: list[bool] | None = None,
    recorded: list[list[torch.Tensor]] | None = None,
) -> list[Verdict]:
    """Greedy verdicts after prompts of three tokens, without processors."""
    rows = len(draft.lengths)
    scorer = Scorer(LogitsProcessorList(), rows, do_sample=False)
    stopper = Stopper(StoppingCriteriaList(criteria))
    return verify(text_of(*[[0, 0, 0]] * rows), draft, logits, scorer, stopper, done or [False] * rows, recorded)


def test_walk_goes_down_a_line_or_to_siblings_and_adds_the_full_models_token() -> None:
    first, second = walked(Draft(torch.tensor([[1, 2], [1, 2]]), lengths=[2, 2]), logits_for([1, 2, 9], [1, 7, 9]))
    assert (first.tokens, first.nodes, first.sources, first.stopped) == ([1, 2, 9], [1, 2, -1], [0, 1, 2], False)
    assert (second.tokens, second.nodes, second.sources) == ([1, 7], [1, -1], [0, 1])
    first, second = walked(tree_draft(), logits_for([1, 2, 6, 9, 9, 9, 8], [5, 9, 9, 9, 9, 8, 9]))
    assert (first.tokens, first.nodes, first.sources) == ([1, 2, 6, 8], [1, 2, 6, -1], [0, 1, 2, 6])
    assert (second.tokens, second.nodes, second.sources) == ([5, 8], [5, -1], [0, 5])
    second = walked(tree_draft(), logits_for([9] * 7, [1, 2, 3, 9, 9, 9, 9]))[1]
    assert (second.tokens, second.nodes) == ([1, 2], [1, -1])  # not past this row's draft


def test_walk_stops_inside_an_accepted_block() -> None:
    for criterion in (EosTokenCriteria(2), MaxLengthCriteria(5)):
        (verdict,) = walked(Draft(torch.tensor([[1, 2, 3]]), lengths=[3]), logits_for([1, 2, 3, 4]), criterion)
        assert (verdict.tokens, verdict.nodes, verdict.stopped) == ([1, 2], [1, 2], True)
    first, second = walked(Draft(torch.tensor([[1], [1]]), [0, 1]), logits_for([5, 9], [1, 9]), done=[True, False])
    assert (first.tokens, first.nodes, first.sources, first.stopped) == ([], [], [], False)  # it had ended before
    assert second.tokens == [1, 9]


def test_walk_records_scores_where_they_are_wanted() -> None:
    draft, logits = Draft(torch.tensor([[1, 2]]), lengths=[2]), logits_for([1, 3, 9])
    watching, earlier = Watching(9), torch.zeros(VOCABULARY)
    assert walked(draft, logits)[0].scores == []
    (verdict,) = walked(draft, logits, watching, recorded=[[earlier]])
    assert verdict.tokens == [1, 3]
    assert torch.equal(torch.stack(verdict.scores), logits[0, :2])
    # A criterion is shown the scores of all tokens so far, the last one's included.
    assert [len(scores) for _, scores in watching.seen] == [2, 3]
    assert torch.equal(watching.seen[-1][1][-1][0], logits[0, 1])


class Recording(LogitsProcessor):
    """Keeps the prefixes it is called with."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prefixes.append(input_ids[-1].tolist())
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_walk_gives_processors_each_positions_prefix(do_sample: bool) -> None:
    processor, text = Recording(), text_of([0, 5], [0, 6, 7])
    draft = Draft(torch.tensor([[1, 2], [3, 4]]), lengths=[2, 2])
    scorer = Scorer(LogitsProcessorList([processor]), 2, do_sample)
    logits, stopper = 1e4 * logits_for([1, 2, 9], [3, 8, 9]), Stopper(StoppingCriteriaList())
    verify(text, draft, logits, scorer, stopper, [False, False], None)
    assert processor.prefixes == [[0, 5], [0, 5, 1], [0, 5, 1, 2], [0, 6, 7], [0, 6, 7, 3]]


# Processors --------------------------------------------------------------------------------------------------------


def name_of(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


PREFIX_FREE = [
    lp.TemperatureLogitsWarper(0.7),
    lp.TopKLogitsWarper(3),
    lp.TopPLogitsWarper(0.6),
    lp.MinPLogitsWarper(0.3),
    lp.TypicalLogitsWarper(0.6),
    lp.EpsilonLogitsWarper(0.1),
    lp.EtaLogitsWarper(0.3),
    lp.SuppressTokensLogitsProcessor([2, 4]),
    lp.LogitNormalization(),
    lp.InfNanRemoveLogitsProcessor(),
]


def test_scores_of_many_positions_are_those_of_each() -> None:
    logits = 3 * torch.randn(2, 4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    for processor in PREFIX_FREE:
        scorer = Scorer(LogitsProcessorList([processor]), 2, do_sample=True)
        assert scorer.prefix_free
        scores = scorer.everywhere(logits)
        for row, position in product(range(2), range(4)):
            alone = processor(torch.zeros(1, 5, dtype=torch.long), logits[row, position][None].clone())[0]
            torch.testing.assert_close(scores[row, position], alone)


class SubclassedTemperature(lp.TemperatureLogitsWarper):
    """Might look at the prefix: only the exact classes are known not to."""


@pytest.mark.parametrize(
    "processor",
    [lp.RepetitionPenaltyLogitsProcessor(1.2), SubclassedTemperature(0.7), Recording()],
    ids=name_of,
)
def test_other_processors_need_the_prefix(processor: LogitsProcessor) -> None:
    assert not Scorer(LogitsProcessorList([lp.TopKLogitsWarper(3), processor]), 1, do_sample=True).prefix_free


def by_place(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's own processor that treats rows by their place in the batch."""
    return scores + torch.arange(len(scores))[:, None]


def by_length(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's own processor that looks at how long the text is."""
    return scores * input_ids.shape[1]


@pytest.mark.parametrize("rows", [[[0, 5], [0, 6, 7]], [[0, 5], [6, 7]]], ids=["ragged", "even"])
@pytest.mark.parametrize("processor", [lp.RepetitionPenaltyLogitsProcessor(2.0), by_place, by_length], ids=name_of)
def test_scores_ahead_are_those_of_each_row(rows: list[list[int]], processor: LogitsProcessor) -> None:
    scorer, text = Scorer(LogitsProcessorList([processor]), 2, do_sample=True), text_of(*rows)
    text.write_draft(torch.tensor([1, 2]), 0)
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    expected = [scorer.row(row, torch.tensor([[*rows[row], row + 1]]), logits[row]) for row in range(2)]
    torch.testing.assert_close(scorer.ahead(text, 1, logits, [True, True]), torch.stack(expected))


def test_scores_ahead_are_those_of_the_wanted_rows() -> None:
    penalty = lp.RepetitionPenaltyLogitsProcessor(2.0)
    scorer, text = Scorer(LogitsProcessorList([penalty]), 3, do_sample=True), text_of([0, 5], [0, 6, 7], [0, 8])
    text.write_draft(torch.tensor([1, 2, 3]), 0)
    logits = torch.ones(3, VOCABULARY)
    scores = scorer.ahead(text, 1, logits, [True, True, False])
    assert [(row < 1).nonzero().flatten().tolist() for row in scores] == [[0, 1, 5], [0, 2, 6, 7], []]
    assert torch.equal(logits, torch.ones(3, VOCABULARY))


def test_a_processor_that_writes_into_its_scores_leaves_the_logits_alone() -> None:
    def in_place(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.mul_(2.0)

    scorer, text, logits = Scorer(LogitsProcessorList([in_place]), 2, True), text_of([0], [0]), torch.ones(2, 3)
    assert scorer.row(0, text.prefix(0), logits[0]).tolist() == [2.0] * 3
    assert scorer.ahead(text, 0, logits, [True, False]).tolist() == [[2.0] * 3, [1.0] * 3]
    assert logits.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_logits_that_cannot_be_chosen_from(bad: list[float]) -> None:
    check_highest(torch.tensor([[0.0, -math.inf]]).amax(-1).tolist(), "Tiny")  # ruled out tokens are fine
    with pytest.raises(NumericalError, match="Tiny returned NaN or infinite logits"):
        check_highest(torch.tensor([[0.0, 1.0], bad]).amax(-1).tolist(), "Tiny")


# Stopping criteria -------------------------------------------------------------------------------------------------


class Watching(StoppingCriteria):
    """Stops at a token, and keeps what it was shown."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[list[int], tuple[torch.Tensor, ...] | None]] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: object
    ) -> torch.Tensor:
        self.seen.append((input_ids[-1].tolist(), scores))
        return input_ids[:, -1] == self.token


class SecondRow(StoppingCriteria):
    """Knows rows by their place in the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([False, True])


def stopper_of(*criteria: StoppingCriteria) -> Stopper:
    return Stopper(StoppingCriteriaList(criteria))


def stops(stopper: Stopper) -> list[list[bool]]:
    """For each row whether it stops with its last token, with the first scratch token and with the second."""
    text = text_of([0, 5], [0, 6, 7])
    text.write_draft(torch.tensor([1, 2]), 0)
    text.write_draft(torch.tensor([3, 4]), 1)
    tokens = [[5, 1, 3], [7, 2, 4]]
    return [[stopper(text, row, ahead, tokens[row][ahead], None) for ahead in range(3)] for row in range(2)]


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ([], [[False, False, False], [False, False, False]]),
        ([MaxLengthCriteria(4)], [[False, False, True], [False, True, True]]),
        ([MaxLengthCriteria(5), MaxLengthCriteria(4)], [[False, False, True], [False, True, True]]),
        ([EosTokenCriteria([1, 4])], [[False, True, False], [False, False, True]]),
        ([Watching(2)], [[False, False, False], [False, True, False]]),
        ([SecondRow()], [[False, False, False], [True, True, True]]),
        ([MaxLengthCriteria(5), EosTokenCriteria([1]), Watching(3)], [[False, True, True], [False, False, True]]),
    ],
    ids=["none", "max_length", "two lengths", "end-of-text tokens", "user's own", "by place", "all"],
)
def test_rows_stop_by_any_criterion(criteria: list[StoppingCriteria], expected: list[list[bool]]) -> None:
    assert stops(stopper_of(*criteria)) == expected


def test_a_users_criterion_sees_the_rows_prefix_and_scores() -> None:
    watching, text = Watching(9), text_of([0, 5], [0, 6, 7])
    text.put_one(1, 0, 3)
    stopper_of(watching)(text, 1, 1, 3, None)
    stopper_of(watching)(text, 1, 1, 3, [torch.arange(VOCABULARY)])
    (ids, nothing), (_, scores) = watching.seen
    assert ids == [0, 6, 7, 3]
    assert nothing is None
    assert len(scores) == 1
    assert torch.equal(scores[0][1], torch.arange(VOCABULARY))


def test_what_a_stopper_knows_beforehand() -> None:
    text = text_of([0, 5], [0, 6, 7])
    bounded = stopper_of(MaxLengthCriteria(8), EosTokenCriteria([1, 4]))
    assert [bounded.max_new(text, row) for row in range(2)] == [6, 5]
    assert (bounded.max_length, bounded.eos_tokens, bounded.has_eos) == (8, {1, 4}, True)
    unbounded = stopper_of(Watching(1))
    assert unbounded.max_new(text, 0) > 1_000_000
    assert (unbounded.max_length, unbounded.eos_tokens, unbounded.has_eos) == (None, set(), False)
