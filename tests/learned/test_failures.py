"""What fails beside a text does not lose it: learning, timings, statistics, files."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.models import ragged_batch, tiny_llama
from helpers.searches import LAYERS, SEARCHES, prompt
from helpers.searches import generated as generate
from hf_selfspec import Cascade, Lookup, SelfSpec
from hf_selfspec.drafts.controlled import ControlledDrafter
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.suffix import SuffixIndex
from hf_selfspec.learned import saving
from hf_selfspec.learned.knowledge import Knowledge
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.target import Target
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = [pytest.mark.usefixtures("no_grad", "no_warnings_yet")]

SKIPS = replace(SEARCHES["begun"], draft=Cascade([Lookup(), SEARCHES["begun"].draft]))
MODEL = tiny_llama(LAYERS, factor=0.6)
PLAIN = generate(MODEL, prompt(), 46).tolist()
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
BROKEN = RuntimeError("broken")


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


def told(spec: SelfSpec, **options: Any) -> list[str]:
    """The warnings of a call, whose ids are plain's."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ids = generate(MODEL, prompt(), 46, assistant=spec, **options).tolist()
    assert len(ids[0]) == len(PLAIN[0]) if options else ids == PLAIN
    return [str(one.message) for one in found]


AFTER: dict[str, tuple[Any, str, Exception]] = {
    "texts": (LookupFindings, "add_texts", OUT),
    "report": (ControlledDrafter, "report", BROKEN),
    "state": (SkipSearch, "state", BROKEN),
    "file": (saving, "written_whole", ValueError("out of range")),
    "statistics": (Knowledge, "add_call", BROKEN),
}


@pytest.mark.parametrize("place", AFTER)
def test_what_fails_after_the_last_token(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, error = AFTER[place]
    failing, spec = Failing(monkeypatch, owner, name, error), replace(SKIPS, cache_dir=tmp_path)
    (told_once,) = told(spec)
    assert str(error) in told_once
    failing.fails = lambda: False
    assert told(spec) == []


WITHIN: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "trial": (SkipSearch, "register", {}),
    "sampled": (SkipSearch, "propose", {"do_sample": True}),
    "text": (SuffixIndex, "extend", {}),
    "draft": (ControlledDrafter, "propose", {}),
}


@pytest.mark.parametrize("place", WITHIN)
def test_memory_that_runs_out_in_a_round_ends_learning(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And drafts, since the drafter may know half of a round; the next call learns again."""
    owner, name, options = WITHIN[place]
    failing, spec, rounds = Failing(monkeypatch, owner, name, OUT), replace(SKIPS), list[int]()
    end_round = Target.end_round
    monkeypatch.setattr(Target, "end_round", lambda target: [rounds.append(failing.calls), end_round(target)][1])
    failing.fails = lambda: len(rounds) > 1 and not failing.calls
    (told_once,) = told(spec, **options)
    assert "went on without drafts and learning: OutOfMemoryError('CUDA out of memory" in told_once
    assert failing.calls == 1
    assert spec.stats is not None
    ended = rounds.index(1)
    assert len(rounds) > ended + 4
    assert {drafted for drafted, _ in spec.stats.round_sizes[ended + 1 :]} == {0}
    assert told(spec, **options) == []
    assert spec.stats.drafted


def test_memory_of_the_host_and_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several processes share a model, the others would wait for the next forward, or take another for it."""
    failing = Failing(monkeypatch, SkipSearch, "register", BROKEN)
    with pytest.raises(RuntimeError, match="broken"):
        told(replace(SKIPS))
    for failing.error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        (told_once,) = told(replace(SKIPS))
        assert type(failing.error).__name__ in told_once
    failing.error = OUT
    monkeypatch.setattr("hf_selfspec.generate.decoder.is_tensor_parallel", lambda _: True)
    with pytest.raises(torch.OutOfMemoryError):
        told(replace(SKIPS))
    failing.fails = lambda: False
    Failing(monkeypatch, ControlledDrafter, "report", OUT)  # once no forward follows
    (told_once,) = told(replace(SKIPS))
    assert "CUDA out of memory" in told_once


@pytest.mark.every_run("falcon_h1-1")
@pytest.mark.parametrize(
    ("name", "rows"), [("llama", 1), ("llama", 3), ("gemma2", 1), ("gemma2", 3), ("qwen3_next", 1), ("falcon_h1", 1)]
)
def test_a_forward_that_ends_half_way_leaves_the_text_as_it_was(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values, and recurrent states, of some layers are those of a look that was not finished."""
    model: PreTrainedModel = build(name)
    full, propose = [False], SkipSearch.propose

    def exhausted(*_: Any) -> None:
        if full[-1]:
            full.append(False)
            raise OUT

    def look(*args: Any, **kwargs: Any) -> Any:
        full.append(len(full) < 2)
        return propose(*args, **kwargs)

    hook = Anatomy.of(model).layers[2].register_forward_pre_hook(exhausted)
    monkeypatch.setattr(SkipSearch, "propose", look)
    inputs, spec = ragged_batch((4, 9, 6)[:rows], seed=11), replace(SKIPS)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    with pytest.warns(UserWarning, match="went on without drafts"):
        ids = model.generate(**inputs, **options, assistant=spec)
    assert torch.equal(ids, plain)
    assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
    hook.remove()
