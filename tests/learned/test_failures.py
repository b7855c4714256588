"""What fails beside a text does not lose it: learning, timings, statistics, files."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.findings import LAYERS, SEARCHES, generate, prompt
from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import AdaptiveThreshold, Cascade, EarlyExit, Lookup, SelfSpec
from hf_selfspec.drafts import controlled
from hf_selfspec.drafts.controlled import ControlledDrafter
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.suffix import SuffixIndex
from hf_selfspec.drafts.layers.searching import SearchingDraft
from hf_selfspec.drafts.stop.adaptive import _Adapting
from hf_selfspec.generate.decoder import Decoder
from hf_selfspec.learned import saving
from hf_selfspec.learned.knowledge import Knowledge
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.fingerprint import Fingerprint
from hf_selfspec.model.target import Target
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = pytest.mark.usefixtures("no_grad", "no_warnings_yet")

TOKENS = 46
SKIPS = replace(SEARCHES["begun"], draft=Cascade([Lookup(), SEARCHES["begun"].draft]))
ADAPTS = SelfSpec(EarlyExit(3), AdaptiveThreshold())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(LAYERS, factor=0.6)


class Failing:
    """A method that fails, once ``fails`` allows it; then it works again."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
        self.calls, self.error, original = 0, error, getattr(owner, name)
        self.fails: Callable[[], bool] = lambda: True

        def method(*args: Any, **kwargs: Any) -> Any:
            if self.fails():
                self.calls += 1
                raise self.error
            return original(*args, **kwargs)

        patch.setattr(owner, name, method)


def told(model: PreTrainedModel, spec: SelfSpec, inputs: Any = None, **options: Any) -> list[str]:
    """The warnings of a call, whose ids are plain's."""
    inputs = prompt() if inputs is None else inputs
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ids = generate(model, inputs, TOKENS, assistant=spec, **options)
    if not options:
        assert ids.tolist() == plain(model, inputs)
    assert ids.shape[1] == len(prompt()[0]) + TOKENS
    return [str(one.message) for one in found]


def plain(model: PreTrainedModel, inputs: Any, texts: dict[str, Any] = {}) -> Any:  # noqa: B006  # made once
    name = f"{id(model)} {inputs}"
    if name not in texts:
        texts[name] = generate(model, inputs, TOKENS).tolist()
    return texts[name]


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
BROKEN = RuntimeError("broken")
AFTER: dict[str, tuple[SelfSpec, Any, str, Exception]] = {
    "texts": (SKIPS, LookupFindings, "add_texts", OUT),
    "report": (SKIPS, ControlledDrafter, "report", BROKEN),
    "state": (SKIPS, SkipSearch, "state", BROKEN),
    "state of texts": (SKIPS, LookupFindings, "state", OUT),
    "file": (SKIPS, saving, "write_json", ValueError("out of range")),
    "statistics": (SKIPS, Knowledge, "add_call", BROKEN),
}


@pytest.mark.every_run("texts|state of texts|file|statistics")
@pytest.mark.parametrize("place", AFTER)
def test_what_fails_after_the_last_token(
    place: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, owner, name, error = AFTER[place]
    failing = Failing(monkeypatch, owner, name, error)
    spec = replace(spec, cache_dir=tmp_path)
    (told_once,) = told(model, spec)
    assert str(error) in told_once
    failing.fails = lambda: False
    assert told(model, spec) == []


@pytest.mark.parametrize("place", [(ControlledDrafter, "update"), (Fingerprint, "of_decoder")], ids=lambda x: x[1])
def test_what_fails_once_the_text_is_whole(
    place: tuple[Any, str], model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round's results, and the fingerprint that files are for."""
    failing, last, spec = Failing(monkeypatch, *place, BROKEN), list[Decoder](), replace(SKIPS, cache_dir=tmp_path)
    run = Decoder.run
    monkeypatch.setattr(Decoder, "run", lambda decoder: [last.append(decoder), run(decoder)][1])
    failing.fails = lambda: bool(last) and last[-1].output.is_finished
    (told_once,) = told(model, spec)
    assert "broken" in told_once
    assert failing.calls


WITHIN: dict[str, tuple[SelfSpec, Any, str, dict[str, Any]]] = {
    "trial": (SKIPS, SkipSearch, "register", {}),
    "forward of a trial": (SKIPS, SearchingDraft, "_matchness", {}),
    "sampled": (SKIPS, SkipSearch, "propose", {"do_sample": True}),
    "read along": (SKIPS, controlled, "Tops", {}),
    "text": (SKIPS, SuffixIndex, "extend", {}),
    "draft": (SKIPS, ControlledDrafter, "propose", {}),
    "rule": (ADAPTS, _Adapting, "update", {}),
}


@pytest.mark.every_run("trial|text")
@pytest.mark.parametrize("place", WITHIN)
def test_memory_that_runs_out_in_a_round_ends_learning(
    place: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafts, since the drafter may know half of a round; the next call learns again."""
    spec, owner, name, options = WITHIN[place]
    failing, spec = Failing(monkeypatch, owner, name, OUT), replace(spec)
    rounds: list[int] = []
    update, end_round = ControlledDrafter.update, Target.end_round
    monkeypatch.setattr(Target, "end_round", lambda target: [rounds.append(failing.calls), end_round(target)][1])
    updates: list[int] = []
    monkeypatch.setattr(ControlledDrafter, "update", lambda *args: [updates.append(failing.calls), update(*args)][1])
    failing.fails = lambda: len(rounds) > 1 and not failing.calls
    (told_once,) = told(model, spec, **options)
    assert "went on without drafts and learning: OutOfMemoryError('CUDA out of memory" in told_once
    assert failing.calls == 1
    assert spec.stats is not None
    ended = rounds.index(1)
    assert len(rounds) > ended + 4
    assert {drafted for drafted, _ in spec.stats.round_sizes[ended + 1 :]} == {0}
    assert sum(updates) == 0  # none after it
    assert told(model, spec, **options) == []
    assert spec.stats.drafted


def test_memory_of_the_host_and_other_errors(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, SkipSearch, "register", BROKEN)
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, prompt(), TOKENS, assistant=replace(SKIPS))
    for failing.error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        (told_once,) = told(model, replace(SKIPS))
        assert type(failing.error).__name__ in told_once


def test_memory_that_runs_out_in_one_of_several_processes_is_an_error(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for its next forward, or take another one for it."""
    failing = Failing(monkeypatch, SkipSearch, "register", OUT)
    monkeypatch.setattr("hf_selfspec.generate.decoder.is_tensor_parallel", lambda _: True)
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, prompt(), TOKENS, assistant=replace(SKIPS))
    failing.fails = lambda: False
    Failing(monkeypatch, ControlledDrafter, "report", OUT)  # once no forward follows
    (told_once,) = told(model, replace(SKIPS))
    assert "CUDA out of memory" in told_once


@pytest.fixture(params=["llama", "gemma2", "qwen3_next", "falcon_h1"])
def hooked(request: pytest.FixtureRequest) -> Iterator[tuple[PreTrainedModel, list[bool]]]:
    """A model, the third layer of which finds no memory while the list says so."""
    model, full = build(request.param), [False]

    def exhausted(*_: Any) -> None:
        if full[-1]:
            full.append(False)
            raise OUT

    hook = Anatomy.of(model).layers[2].register_forward_pre_hook(exhausted)
    yield model, full
    hook.remove()


@pytest.mark.every_run("falcon_h1-3")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_forward_that_ends_half_way_leaves_the_text_as_it_was(
    hooked: tuple[PreTrainedModel, list[bool]], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values, and recurrent states, of some layers are those of a look that was not finished."""
    model, full = hooked
    original = SearchingDraft._matchness

    def look(*args: Any, **kwargs: Any) -> Any:
        full.append(len(full) < 2)
        return original(*args, **kwargs)

    monkeypatch.setattr(SearchingDraft, "_matchness", look)
    inputs = ragged_batch((4, 9, 6)[:rows], seed=11)
    spec = replace(SKIPS)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    with pytest.warns(UserWarning, match="went on without drafts"):
        ids = model.generate(**inputs, **options, assistant=spec)
    assert torch.equal(ids, plain)
    assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
