"""Tuning in advance: what is found, and what is refused."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerFast

from helpers.architectures import build
from helpers.models import tiny_llama
from hf_selfspec import AdaptiveThreshold, ConfidenceThreshold, FixedLength, OfflineSearch, SelfSpec, TopKTree, tune
from hf_selfspec.drafts import SkipLayers
from hf_selfspec.errors import SelfSpecError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search import bayes
from hf_selfspec.search.skip_search import OnTheFlySearch, SkipSpace
from hf_selfspec.tools import tuning

TEXTS = ["def add(a, b):", "Once upon a time", "1 + 1 ="]

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(8, factor=0.6)


class Timings:
    """Times that follow from the set, in the place of measured ones; the machine takes longer and longer."""

    def __init__(self, model: PreTrainedModel, known: set[int], least: float) -> None:
        self.anatomy = Anatomy.of(model)
        self.space = SkipSpace.of(self.anatomy)
        self.known, self.least = known, least
        self.now, self.drift = 0.0, 1.0
        self.specs: list[SelfSpec] = []

    def share(self, plan: LayerPlan) -> float:
        """Shorter the more blocks are skipped that may be, longer for each that may not; plain ``generate`` takes 1."""
        skipped = self.space.places(plan)
        return 1 - (1 - self.least) * len(skipped & self.known) / len(self.known) + 0.1 * len(skipped - self.known)

    def places(self, spec: SelfSpec) -> frozenset[int]:
        """The blocks that a ``SelfSpec`` skips."""
        return self.space.places(spec.draft.plan(self.anatomy))

    def generate(self, *_: Any, assistant: Any, **options: Any) -> None:
        self.drift *= 1.007
        if assistant:
            self.specs.append(assistant)
        self.now += self.drift * (self.share(assistant.draft.plan(self.anatomy)) if assistant else 1.0)


@pytest.fixture
def timed(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timings]:
    """Puts made-up timings in the place of measured ones."""

    def begin(model: PreTrainedModel = llama, known: Any = (0, 3, 4), least: float = 0.5) -> Timings:
        times = Timings(model, set(known), least)
        monkeypatch.setattr(GenerationMixin, "generate", times.generate)
        monkeypatch.setattr(tuning, "perf_counter", lambda: times.now)
        return times

    return begin


@pytest.mark.filterwarnings("ignore:tune. no set of blocks")
def test_tuning_with_real_timings(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    spec = tune(llama, tokenizer, TEXTS[:1], search=OfflineSearch(3), max_new_tokens=3, tree=TopKTree())
    assert isinstance(spec.draft, SkipLayers)
    assert spec.draft.attention or spec.draft.mlp
    assert (spec.stop, spec.tree) == (AdaptiveThreshold(ConfidenceThreshold()), TopKTree())
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(llama.generate(ids, assistant=spec, **options), llama.generate(ids, **options))


def test_a_known_best_set_of_another_size_is_found(llama: Any, tokenizer: Any, timed: Callable[..., Timings]) -> None:
    """Random sets have 2 to 7 of the 12 blocks; Bayesian optimisation goes on to the best one, of 9, also since what is
    timed late, on a machine that slows down, counts as what was timed early. Where no set is faster, a warning says
    so."""
    times = timed(known=(0, 1, 2, 4, 5, 6, 8, 9, 11))
    spec = tune(llama, tokenizer, TEXTS, search=OfflineSearch(40), stop=FixedLength(3))
    assert times.places(spec) == times.known
    assert {spec.stop for spec in times.specs} == {FixedLength(3)}
    assert len({times.places(spec) for spec in times.specs}) == 40
    timed(least=1.5)
    with pytest.warns(UserWarning, match=r"no set of blocks to skip made LlamaForCausalLM faster.*0\.\d\dx") as told:
        tune(llama, tokenizer, TEXTS, search=OfflineSearch(4))
    assert told[0].filename == __file__


def test_whole_layers_are_proposed_by_what_others_took(tokenizer: Any, timed: Callable[..., Timings]) -> None:
    """Where a layer is skipped as a whole or not at all, as in Mamba."""
    timed(model := build("mamba2"), (0, 1))
    with patch.object(bayes, "suggest", wraps=bayes.suggest) as suggest:
        tune(model, tokenizer, TEXTS, search=OfflineSearch(12))
    assert suggest.call_count


def test_bad_options(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    for options, words in (
        ({"texts": []}, r"tune\(texts\) must be a list of strings, at least one"),
        ({"search": OnTheFlySearch()}, r"tune\(search\) must be OfflineSearch\(...\) or None"),
        ({"max_new_tokens": 0}, r"tune\(max_new_tokens\) must be at least 1"),
        ({"stop": 3}, r"SelfSpec\(stop\)"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            tune(llama, tokenizer, **{"texts": TEXTS} | options)
