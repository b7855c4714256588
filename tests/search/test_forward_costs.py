"""What forwards cost, by timing a few."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.search.beside_text import after_prefill, keys_and_values
from helpers.search.generating import generated, prompt, search_of, use_costs
from helpers.search.searches import space, timings
from hf_selfspec import FixedLength, SelfSpec, Session
from hf_selfspec.batch import Text
from hf_selfspec.draft.looking import LookingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.search.costs import ForwardCosts, Stopwatch
from hf_selfspec.search.on_the_fly import OnTheFlySearch
from hf_selfspec.search.proposers import SkipSpace
from hf_selfspec.verify.scoring import Scorer

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(
    "space", [space(), SkipSpace.of(Anatomy.of(build("gemma3n_text")))], ids=["plain", "shared keys"]
)
def test_costs_of_blocks_follow_from_the_timed_plans(space: SkipSpace) -> None:
    costs = ForwardCosts(2.0, attention=0.5, mlp=1.5, several=3.0, token=0.25, step=0.125, num_layers=space.num_layers)
    found = timings(space, costs).costs()
    for name in ("fixed", "attention", "mlp", "several", "token", "step"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name)), name


@pytest.mark.parametrize(
    ("lengths", "before"),
    [((20,), 0), ((20, 13, 9), 0), ((20, 3, 2), 0), ((20, 15, 14), 12)],
    ids=["one row", "ragged", "short", "behind embeddings"],
)
def test_timings_change_nothing_of_the_text(lengths: tuple[int, ...], before: int) -> None:
    """They are taken at its end, where a row may be shorter than what is timed; slots before it have no ids."""
    target, text = after_prefill(tiny_llama(8), lengths)
    text = Text(text.ids[:, before:], [length - before for length in lengths], [before] * len(lengths), 0)
    stopwatch = Stopwatch(*SkipSpace.of(target.anatomy).timed_plans())
    scorer = Scorer(LogitsProcessorList(), len(lengths), False)
    known = SelfSpec()._known(target.model)
    session = Session(target, scorer, FixedLength(2), None, 25, frozenset(), 25, None, (), known)
    draft = LookingDraft(session, stopwatch.early, "a draft", 25)
    usual = keys_and_values(target, text)
    with target.prepared():
        draft.measure(text, stopwatch, 2)
    for now, then in zip(keys_and_values(target, text), usual, strict=True):
        torch.testing.assert_close(now, then)
    names = {"early", "attention", "full", "few", "many", "draft"}
    assert {name: len(times) for name, times in stopwatch.seconds.items()} == dict.fromkeys(names, 2)
    assert all(time > 0 for times in stopwatch.seconds.values() for time in times)
    assert (draft.steps, draft.limits) == (0, session)


def test_forwards_are_timed_again_when_a_set_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy at first is not held against the drafts for ever."""
    use_costs(monkeypatch, step=50.0)
    search = OnTheFlySearch(context_window=8, max_steps=2, budget=1.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=search)
    generated(model, prompt(), 40, assistant=spec)
    found = search_of(spec, model)
    assert (found.is_over, found.choice.drafts) == (True, False)
    timings = found.timings.texts
    for _ in range(8):
        generated(model, prompt(), 40, assistant=spec)
    assert found.timings.texts > timings
