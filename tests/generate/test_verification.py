"""Verification piece by piece: choosing a token, widths of trees, processors."""

import inspect
import math
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from helpers.models import character_tokenizer
from helpers.verification import ALMOST_ONE, fix_uniform, orders
from hf_selfspec import NumericalError, TopKTree
from hf_selfspec.batch import Draft, Text, Verdict
from hf_selfspec.drafts.scoring import Scorer, check_highest
from hf_selfspec.generate.acceptance import accept_line, choose_sampled
from hf_selfspec.generate.stopping import Stopper
from hf_selfspec.model.logits import draw_without_replacement

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


def test_a_line_never_accepts_a_token_without_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the uniform number is 0."""
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    p, q = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.5]]])
    for token in (0, 1):
        accepted, instead = accept_line(p, q, torch.tensor([[token]]))
        assert (accepted.item(), instead.item()) == (token == 1, 1)


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


@pytest.mark.parametrize(("confidence", "width"), [(0.5, 10), (0.51, 5), (0.8, 5), (0.81, 3), (0.96, 1)])
def test_tree_is_narrower_the_surer_the_draft(confidence: float, width: int) -> None:
    assert TopKTree().width(torch.tensor([confidence])) == width
    assert TopKTree().width(torch.tensor([1.0, confidence])) == width


def test_probabilities_that_are_no_numbers_get_one_candidate() -> None:
    """Those of a user's drafter; the full model rejects what is wrong."""
    assert TopKTree().width(torch.full((2,), math.nan)) == 1


VOCABULARY = 10


def text_of(*rows: list[int], width: int = 3) -> Text:
    """A batch whose rows go on after a prompt of ``width`` columns; rows may differ in length."""
    ids = torch.zeros(len(rows), max(map(len, rows)) + 8, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return Text(ids, [len(tokens) for tokens in rows], [0] * len(rows), width)


PENALTY = lp.RepetitionPenaltyLogitsProcessor
HAS_LENGTHS = "Tensor" in str(inspect.signature(PENALTY.__init__))  # since transformers 5.24


# Of prompts of three columns; the last is longer than the text, of which all is ignored.
IGNORED = (None, 0, 3, 4, 9)


@pytest.mark.parametrize("is_tree", [False, True], ids=["line", "tree"])
@pytest.mark.parametrize("lengths", [(3, 3, 3), (3, 6, 4)], ids=["even", "ragged"])
@pytest.mark.parametrize("ignored", IGNORED if not HAS_LENGTHS else (*IGNORED, torch.tensor([0, 4, 2])))
def test_a_repetition_penalty_of_all_nodes_is_that_of_each(
    ignored: Any, lengths: tuple[int, ...], is_tree: bool
) -> None:
    """Bit for bit, between other processors; some ids have no logits."""
    generator = torch.Generator().manual_seed(1)
    last = [lp.TemperatureLogitsWarper(0.7), PENALTY(1.3, ignored), lp.TopKLogitsWarper(4), PENALTY(0.9)]
    scorer = Scorer(LogitsProcessorList(last), 3, do_sample=True)
    rows = [torch.randint(VOCABULARY + 2 * HAS_LENGTHS, (length,), generator=generator).tolist() for length in lengths]
    text, tokens = text_of(*rows), torch.randint(VOCABULARY, (3, 4), generator=generator)
    parents = [[0, 1, 0, 3], [0, 0, 2, 2], [0, 1, 2, 1]]
    for listed in (None, tokens.tolist()):
        draft = Draft(tokens, [4] * 3, parents if is_tree else None, listed=listed)
        logits = torch.randn(3, 5, VOCABULARY, generator=generator)
        scores = scorer.of_nodes(text, draft, logits)
        for row, node in product(range(3), range(5)):
            path, at = list[int](), node
            while at > 0:
                path.insert(0, int(tokens[row, at - 1]))
                at = parents[row][at - 1] if is_tree else at - 1
            expected = scorer.row(row, torch.tensor([[*rows[row], *path]]), logits[row, node])
            assert torch.equal(scores[row, node], expected), (row, node)


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


@pytest.mark.parametrize("strings", [["aba"], ["aaaa", "bb"]])
def test_stop_strings_are_looked_for_once_in_all_rows(strings: list[str]) -> None:
    """Each row ends where plain generate ends it, whatever its length and place, also where the text is short."""
    tokenizer, generator = character_tokenizer(), torch.Generator().manual_seed(0)
    a, b = (tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in "ab")
    criteria, ended = [StopStringCriteria(tokenizer, [string]) for string in strings], 0
    for _ in range(30):
        lengths = torch.randint(1, 6, (4,), generator=generator).tolist()
        tokens = [torch.randint(2, (count + 5,), generator=generator) * (b - a) + a for count in lengths]
        pairs = list(zip(tokens, lengths, strict=True))
        new = [row[count:].tolist()[: 5 - row_number] for row_number, (row, count) in enumerate(pairs)]
        text = text_of(*[row[:count].tolist() for row, count in pairs], width=1)
        verdicts = [Verdict(row.copy(), [-1] * len(row), False, [0] * len(row)) for row in new]
        called = Mock(side_effect=StopStringCriteria.__call__)
        with patch.object(StopStringCriteria, "__call__", lambda *given, called=called: called(*given)):
            Stopper(StoppingCriteriaList(criteria)).end(text, verdicts)
        assert called.call_count == len(criteria)
        for row, count, following, verdict in zip(tokens, lengths, new, verdicts, strict=True):
            prefixes = [row[None, : count + ahead] for ahead in range(1, len(following) + 1)]
            ends = [any(bool(criterion(prefix, None)) for criterion in criteria) for prefix in prefixes]
            kept = ends.index(True) + 1 if True in ends else len(following)
            assert verdict == Verdict(following[:kept], [-1] * kept, True in ends, [0] * kept)
            ended += verdict.stopped
    assert ended > 30
