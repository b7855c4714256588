"""Calls that search while they generate: their tokens, what their trials see, what drafts meanwhile and afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as few_tokens
from helpers.searches import FILE, Clock, an_end, generated, lines_of, prefilled, prompt, search_of
from hf_selfspec import Cascade, FixedLength, Lookup, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.batch import Text
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.drafts.layers.skip_layers import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search.skip_search import OnTheFlySearch, SkipSpace

pytestmark = pytest.mark.usefixtures("no_grad")


def test_statistics_of_a_search() -> None:
    model = tiny_llama()
    spec = SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(8, max_steps=12, target_matchness=1.0, budget=1.0))
    phases = []
    for tokens in (9, 14, 28):
        generated(model, prompt(), tokens, assistant=spec)
        search, lines = search_of(spec, model), lines_of(spec)
        phases.append(spec.stats.phase)
        assert spec.stats.matchness == search.history
        assert spec.stats.plan == search.best.picture()
        assert bool(search.history) == (search.search_seconds > 0)
        last = f", last of {len(search.history)} trials {search.history[-1]:.2f}" if search.history else ""
        assert lines["search"] == f"{search.phase}{last}"
    assert phases == ["optimization"] * 2 + ["acceleration"]
    assert len(search.history) == 12
    for name, skipped in (
        ("attention blocks", search.best.skipped_attention),
        ("MLP blocks", search.best.skipped_mlp),
    ):
        assert lines[name] == "".join("□" if layer in skipped else "■" for layer in range(6))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_matchness_is_the_share_of_the_text_that_the_set_predicts(
    monkeypatch: pytest.MonkeyPatch, do_sample: bool
) -> None:
    """Of the last tokens that the model has generated, in the text's place, of rows that have not ended."""
    rows, window, first = 2, 12, 14
    model, original = tiny_llama(8, factor=1.0), SearchingDraft.matchness
    tried: list[tuple[LayerPlan, list[torch.Tensor]]] = []

    def watched(self: SearchingDraft, text: Text, plan: LayerPlan, size: int) -> float:
        tried.append((plan, [text.ids[row : row + 1, : text.lengths[row]].clone() for row in self.target.rows]))
        assert size == min(window, *text.last_slots())
        return original(self, text, plan, size)

    monkeypatch.setattr(SearchingDraft, "matchness", watched)
    search = OnTheFlySearch(context_window=window, budget=1.0, target_matchness=1.0)
    spec = SelfSpec(SkipLayers(search=search, ratio=0.2), FixedLength(1))
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    torch.manual_seed(0)
    prompts = generated(model, prompt(rows, 2), first - 2, **options)  # of which sets predict some, but it is not new
    if not do_sample:
        end, ends = an_end(generated(model, prompts, 30)[:, first:])
        assert min(ends) < 10
        options = {"eos_token_id": end}
    torch.manual_seed(0)
    generated(model, prompts, 30, assistant=spec, **options)
    assert len({plan for plan, _ in tried}) > 5
    assert {len(texts) for _, texts in tried} == {2 if do_sample else 1}
    matched = []
    for plan, texts in tried:
        agreed = list[bool]()
        for ids in texts:
            s = ids.shape[1]
            target, _ = prefilled(model, ids, (s,))
            with target.prepared():
                logits = target.step(ids[:, s - 1 - window : -1], [s - 1 - window], ForwardPass(plan)).logits
            agreed += (logits.argmax(-1) == ids[:, s - window :])[0, -min(window, s - first) :].tolist()
        matched.append(sum(agreed) / len(agreed))
    assert search_of(spec, model).history == pytest.approx(matched)
    assert len(set(matched)) > 1


def test_trials_that_overflow_never_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose logits are no numbers is never right, and the search goes on."""
    original = Target.step

    def overflowing(
        target: Target, tokens: Any, cursors: Any, run: Any = None, nodes: Any = None, *first: Any, **counts: Any
    ) -> Any:
        step = original(target, tokens, cursors, run, nodes, *first, **counts)
        if nodes is not None and nodes.hidden and step.logits is not None:
            step.logits = step.logits * float("nan")
        return step

    monkeypatch.setattr(Target, "step", overflowing)
    model, spec = tiny_llama(), SelfSpec.swift(search=OnTheFlySearch(context_window=8, max_steps=5, budget=1.0))
    generated(model, prompt(), 24, assistant=spec, do_sample=True, top_k=5)
    search = search_of(spec, model)
    assert search.is_over
    assert all(value <= 0.2 for value in search.history)


@pytest.mark.usefixtures("no_warnings_yet")
def test_models_that_cannot_look_beside_their_text() -> None:
    model, spec = build("bloom"), SelfSpec.swift(search=OnTheFlySearch(context_window=4, budget=1.0))
    with pytest.warns(UserWarning, match="so there is no search for blocks to skip"):
        generated(model, prompt(), 20, assistant=spec)
    assert spec.choice(model) is None


def test_no_call_spends_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the first; a forward over ``n`` tokens takes ``1 + 0.1 n`` seconds here."""
    model = tiny_llama(8)
    clock = Clock().of(model, monkeypatch)
    spec = SelfSpec.swift(search=OnTheFlySearch(8, target_matchness=1.0, budget=0.1))
    shares = []
    for _ in range(3):
        begun = clock.now
        generated(model, prompt(), 64, assistant=spec)
        shares.append(spec.stats.search_seconds / (clock.now - begun))
    assert shares[0] > 0.0
    assert max(shares) <= 0.1
    assert len(search_of(spec, model).history) >= 6


def test_rounds_of_an_earlier_set_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts pay is measured anew for each set."""
    model, anew = tiny_llama(8), list[str]()
    monkeypatch.setattr(Controller, "begin_anew", lambda self, name: anew.append(name))
    spec = SelfSpec.swift(search=OnTheFlySearch(8, target_matchness=1.0, budget=1.0))
    generated(model, prompt(), 40, assistant=spec)
    changes = len(search_of(spec, model).best_sets) - 1
    assert len(anew) == changes > 0


def test_two_searches_in_one_cascade_learn_apart(tmp_path: Path) -> None:
    """Each finds and keeps a set of its own size, in a file, too."""
    sources = [SkipLayers(search=OnTheFlySearch(8, 6, budget=1.0), ratio=ratio) for ratio in (0.2, 0.6)]
    model, spec = tiny_llama(8), SelfSpec(Cascade([Lookup(), *sources]))
    for tokens in (40, 10):
        generated(model, prompt(), tokens, assistant=spec)
        spec.save_pretrained(tmp_path)
        kept = json.loads((tmp_path / FILE).read_text())["findings"].values()
        plans = [LayerPlan.of_picture(state["set"]) for state in kept if "set" in state]
        assert [len(SkipSpace.of(Anatomy.of(model)).places(plan)) for plan in plans] == [2, 7]
        assert {state["phase"] for state in kept if "set" in state} == {"acceleration"}
        spec = SelfSpec.from_pretrained(tmp_path)


@pytest.mark.machine("any_draft_pays")
@pytest.mark.parametrize(("rows", "length"), [(1, 12), (2, 9)])
def test_wide_trees_up_to_the_end(rows: int, length: int) -> None:
    """More nodes in a verification than slots were set aside for."""
    model = tiny_llama(6, factor=0.6)
    search = OnTheFlySearch(8, bayes_interval=4, budget=1.0)
    spec = SelfSpec(SkipLayers(search=search), FixedLength(length), TopKTree(((1.0, 12),)))
    for width, tokens in ((6, 50), (480, 32)):
        ids = prompt(rows, width)
        assert torch.equal(generated(model, ids, tokens, assistant=spec), generated(model, ids, tokens))


@pytest.mark.machine("any_draft_pays")
@pytest.mark.parametrize("tree", [None, TopKTree(((0.6, 2), (1.0, 1)))], ids=["line", "tree"])
def test_samples_are_exact_while_sets_change(tree: TopKTree | None) -> None:
    """Each call goes on with the search of those before."""
    search = OnTheFlySearch(1, target_matchness=1.0, budget=1.0, seed=2)
    spec = SelfSpec(SkipLayers(search=search, ratio=0.8), FixedLength(3), tree)
    check_exact(sample(spec, rows=200, calls=8), exact_joint(few_tokens(), []))
    found = search_of(spec, few_tokens())
    assert found.phase == "optimization"
    assert len(found.best_sets) > 1, "the set that drafts has to change while this goes on"
