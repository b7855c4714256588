"""Tuning in advance: what is found, what it costs to go on after an interruption, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.models import tiny_llama
from hf_selfspec import (
    ConfidenceThreshold,
    CostTree,
    FixedLength,
    OfflineSearch,
    OnTheFlySearch,
    SelfSpec,
    SettingError,
    SettingTypeError,
    SkipLayers,
    tune,
)
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.proposers import SkipSpace
from hf_selfspec.search.tuning import PROGRESS_NAME, _Tuning

TEXTS = ["def add(a, b):", "Once upon a time", "1 + 1 ="]
SPEED = 0.01


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(8, factor=0.6)


class Timings:
    """Times that follow from the set and the stop rule, in the place of measured ones."""

    def __init__(self, model: PreTrainedModel, known: set[int], least: float = 0.5) -> None:
        self.space = SkipSpace.of(Anatomy.of(model))
        self.known = known
        self.least = least
        self.asked: list[LayerPlan] = []
        self.rules: list[Any] = []
        self.interrupt_at = 10**9
        # The machine takes longer and longer, for whatever runs.
        self.drift = 1.0

    def of(self, plan: LayerPlan) -> float:
        """Shorter the more blocks are skipped that may be, longer for each that may not; plain ``generate`` takes 1."""
        skipped = self.space.places(plan)
        good, bad = len(skipped & self.known), len(skipped - self.known)
        return 1.0 - (1.0 - self.least) * good / len(self.known) + 0.1 * bad

    def seconds(self, runner: _Tuning, spec: SelfSpec | None) -> float:
        self.drift *= 1.02
        if spec is None:
            return SPEED * self.drift
        plan = spec.draft.plan(Anatomy.of(runner.model))
        self.asked.append(plan)
        self.rules.append(spec.stop)
        assert len(self.asked) < 200, "this has no end"
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        best = spec.stop == FixedLength(4)
        return SPEED * self.drift * self.of(plan) * (0.9 if best else 1.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timings]:
    """Puts made-up timings in the place of measured ones."""

    def begin(model: PreTrainedModel, known: set[int] | None = None, **settings: Any) -> Timings:
        times = Timings(model, known or {0, 3, 4}, **settings)
        monkeypatch.setattr(_Tuning, "seconds", lambda self, spec, rows=None: times.seconds(self, spec))
        monkeypatch.setattr(_Tuning, "first_sets", lambda self: [])
        return times

    return begin


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0, **options
    )


def assert_lossless(model: PreTrainedModel, spec: SelfSpec) -> None:
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(5))
    assert torch.equal(generate(model, ids, assistant=spec), generate(model, ids))
    assert all("forward" not in module.__dict__ for module in model.modules())


# What is found -------------------------------------------------------------------------------------------------------


def test_tuning_with_real_timings(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tune: no set of blocks", UserWarning)
        spec = tune(
            llama, tokenizer, TEXTS[:1], search=OfflineSearch(3, 1), max_new_tokens=4, tree=CostTree(), folder="~"
        )
    assert isinstance(spec.draft, SkipLayers)
    assert spec.draft.search is None
    assert spec.draft.attention or spec.draft.mlp
    assert spec.stop is not None
    assert spec.tree == CostTree()
    assert_lossless(llama, spec)
    assert SelfSpec.from_pretrained(tmp_path) == spec
    steps = json.loads((tmp_path / PROGRESS_NAME).read_text())["steps"]
    assert len(steps) == 3
    assert len({picture for picture, _ in steps}) == 3
    assert all(speed > 0 for _, speed in steps)


def test_a_known_best_set_of_another_size_is_found(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, fake: Callable[..., Timings]
) -> None:
    """Random sets have 2 to 7 of the 12 blocks; Bayesian optimisation goes on to the best one, of 9."""
    known = {0, 1, 2, 4, 5, 6, 8, 9, 11}
    times = fake(llama, known)
    spec = tune(llama, tokenizer, TEXTS, search=OfflineSearch(40, 8), stop=FixedLength(3))
    assert times.space.places(spec.draft.plan(Anatomy.of(llama))) == known
    assert spec.stop == FixedLength(3)
    sizes = [len(times.space.places(plan)) for plan in times.asked]
    assert max(sizes[:8]) <= 7
    assert len(set(times.asked[:40])) == 40
    assert set(times.rules) == {FixedLength(3)}


def test_the_fastest_rule_is_found(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, fake: Callable[..., Timings]
) -> None:
    times = fake(llama)
    spec = tune(llama, tokenizer, TEXTS, search=OfflineSearch(6, 6))
    assert spec.stop == FixedLength(4)
    assert set(times.rules[:6]) == {ConfidenceThreshold()}
    best = min(times.asked[:6], key=times.of)
    assert spec.draft.plan(Anatomy.of(llama)) == best


def test_nothing_is_faster(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, fake: Callable[..., Timings]
) -> None:
    fake(llama, least=1.5)
    with pytest.warns(UserWarning, match=r"no set of blocks to skip made LlamaForCausalLM faster.*0\.\d\dx") as told:
        spec = tune(llama, tokenizer, TEXTS, search=OfflineSearch(4, 4))
    assert told[0].filename == __file__
    assert isinstance(spec, SelfSpec)


# Interruptions and other searches' files -----------------------------------------------------------------------------


def test_an_interrupted_search_goes_on(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, fake: Callable[..., Timings]
) -> None:
    """What was timed is on disk and not timed again, with more steps too."""
    search = OfflineSearch(12, 6)
    first = fake(llama)
    first.interrupt_at = 8
    with pytest.raises(KeyboardInterrupt):
        tune(llama, tokenizer, TEXTS, search=search, stop=FixedLength(3), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [PROGRESS_NAME]
    kept = [LayerPlan.of_picture(picture) for picture, _ in json.loads((tmp_path / PROGRESS_NAME).read_text())["steps"]]
    assert kept == first.asked[:7]
    second = fake(llama)
    spec = tune(llama, tokenizer, TEXTS, search=search, stop=FixedLength(3), folder=tmp_path)
    # Five steps that were left, and three sets, three times each, at the end.
    assert len(second.asked) == 5 + 3 * 3
    assert not set(second.asked[:5]) & set(kept)
    best = min([*kept, *second.asked[:5]], key=second.of)
    assert second.of(spec.draft.plan(Anatomy.of(llama))) == pytest.approx(second.of(best))
    third = fake(llama)
    tune(llama, tokenizer, TEXTS, search=OfflineSearch(14, 6), stop=FixedLength(3), folder=tmp_path)
    assert len(third.asked) == 2 + 3 * 3
    assert SelfSpec.from_pretrained(tmp_path).stop == FixedLength(3)


def test_steps_are_as_fast_whenever_they_were_timed(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, fake: Callable[..., Timings]
) -> None:
    """A machine that slows down by 2% with each timing does not make later sets look worse."""
    times = fake(llama)
    tune(llama, tokenizer, TEXTS, search=OfflineSearch(10, 10), stop=FixedLength(3), folder=tmp_path)
    steps = json.loads((tmp_path / PROGRESS_NAME).read_text())["steps"]
    ratios = [speed * times.of(LayerPlan.of_picture(picture)) for picture, speed in steps]
    assert max(ratios) / min(ratios) < 1.07


@pytest.mark.parametrize("what", ["texts", "stop", "model"])
def test_another_searchs_steps(
    what: str,
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    fake: Callable[..., Timings],
) -> None:
    fake(llama)
    tune(llama, tokenizer, TEXTS, search=OfflineSearch(3, 3), folder=tmp_path)
    before = (tmp_path / PROGRESS_NAME).read_bytes()
    texts, options, model = TEXTS, {"search": OfflineSearch(3, 3)}, llama
    if what == "texts":
        texts = [*TEXTS, "more"]
    elif what == "stop":
        options["stop"] = FixedLength(2)
    else:
        model = tiny_llama(8, seed=1)
    with pytest.raises(SettingError, match="holds the steps of another search") as error:
        tune(model, tokenizer, texts, folder=tmp_path, **options)
    assert str(tmp_path / PROGRESS_NAME) in str(error.value)
    assert (tmp_path / PROGRESS_NAME).read_bytes() == before


@pytest.mark.parametrize(
    "broken",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content.replace('"steps"', '"sets"'),
        lambda content: json.dumps({**json.loads(content), "steps": [["########", "fast"]]}),
        lambda content: json.dumps({**json.loads(content), "steps": [["##.#", 1.2]]}),
    ],
)
def test_a_broken_steps_file(
    broken: Callable[[str], str],
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    fake: Callable[..., Timings],
) -> None:
    fake(llama)
    tune(llama, tokenizer, TEXTS, search=OfflineSearch(3, 3), folder=tmp_path)
    path = tmp_path / PROGRESS_NAME
    path.write_text(broken(path.read_text()))
    times = fake(llama)
    with pytest.raises(SettingError, match="was cut short or changed") as error:
        tune(llama, tokenizer, TEXTS, search=OfflineSearch(3, 3), folder=tmp_path)
    assert str(path) in str(error.value)
    assert not times.asked


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [[], "one text", ["good", 3]], ids=repr)
def test_bad_texts(texts: Any, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SettingTypeError, match=r"tune\(texts\) must be a list of strings, at least one"):
        tune(llama, tokenizer, texts)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"search": OnTheFlySearch()},
            SettingTypeError,
            r"tune\(search\) must be OfflineSearch\(...\) or None, got On",
        ),
        ({"max_new_tokens": 0}, SettingError, r"tune\(max_new_tokens\) must be at least 1"),
        ({"stop": 3}, SettingTypeError, r"SelfSpec\(stop\)"),
    ],
)
def test_bad_options(
    options: dict[str, Any],
    error: type[Exception],
    words: str,
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    fake: Callable[..., Timings],
) -> None:
    fake(llama)
    with pytest.raises(error, match=words):
        tune(llama, tokenizer, TEXTS, **options)


def test_an_own_rule_cannot_be_saved(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, fake: Callable[..., Timings]
) -> None:
    """Which is said before anything is timed; without a folder it serves."""

    def never(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.bool)

    times = fake(llama)
    with pytest.raises(SettingError, match=r"tune\(stop\) is <function .*never.*cannot be saved"):
        tune(llama, tokenizer, TEXTS, search=OfflineSearch(2, 2), stop=never, folder=tmp_path)
    assert not times.asked
    assert tune(llama, tokenizer, TEXTS, search=OfflineSearch(2, 2), stop=never).stop is never


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_steps": 0}, SettingError, r"OfflineSearch\(max_steps\) must be at least 1"),
        ({"random_steps": 1.5}, SettingTypeError, r"OfflineSearch\(random_steps\)"),
    ],
)
def test_settings_of_the_search(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OfflineSearch(**settings)
