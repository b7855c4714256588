"""What fails beside a text does not lose it: learning, timings, statistics, files."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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


def told(spec: SelfSpec, **options: Any) -> list[str]:
    """The warnings of a call, whose ids are plain's."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ids = generate(MODEL, prompt(), 46, assistant=spec, **options).tolist()
    assert len(ids[0]) == len(PLAIN[0]) if options else ids == PLAIN
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (LookupFindings, "add_texts", OUT),
        (ControlledDrafter, "report", BROKEN),
        (ControlledDrafter, "report", OUT),
        (SkipSearch, "state", BROKEN),
        (saving, "written_whole", ValueError("out of range")),
        (Knowledge, "add_call", BROKEN),
    ],
)
def test_what_fails_after_the_last_token(
    owner: Any, name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and the next call goes on; also where processes share a model, since no forward follows."""
    spec = replace(SKIPS, cache_dir=tmp_path)
    monkeypatch.setattr("hf_selfspec.generate.decoder.is_tensor_parallel", lambda _: error is OUT)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(side_effect=error))
        (words,) = told(spec)
    assert str(error) in words
    assert told(spec) == []


@pytest.mark.parametrize(
    ("owner", "name", "options"),
    [
        (SkipSearch, "register", {}),
        (SkipSearch, "propose", {"do_sample": True}),
        (SuffixIndex, "extend", {}),
        (ControlledDrafter, "propose", {}),
    ],
)
def test_memory_that_runs_out_in_a_round_ends_learning(
    owner: Any, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafts, since the drafter may know half of a round; the next call learns again."""
    spec, rounds, failed = replace(SKIPS), list[int](), list[int]()
    method, end_round = getattr(owner, name), Target.end_round

    def fails_once(*given: Any, **others: Any) -> Any:
        if len(rounds) > 1 and not failed:
            failed.append(len(rounds))
            raise OUT
        return method(*given, **others)

    monkeypatch.setattr(owner, name, fails_once)
    monkeypatch.setattr(Target, "end_round", lambda target: [rounds.append(1), end_round(target)][1])
    (words,) = told(spec, **options)
    assert "went on without drafts and learning: OutOfMemoryError('CUDA out of memory" in words
    assert spec.stats is not None
    assert len(rounds) > failed[0] + 4
    assert {drafted for drafted, _ in spec.stats.round_sizes[failed[0] + 1 :]} == {0}
    assert told(spec, **options) == []
    assert spec.stats.drafted


def test_memory_of_the_host_and_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several processes share a model, the others would wait for the next forward, or take another for it."""
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr(SkipSearch, "register", Mock(side_effect=error))
        (words,) = told(replace(SKIPS))
        assert type(error).__name__ in words
    for error, is_shared in ((BROKEN, False), (OUT, True)):
        monkeypatch.setattr(SkipSearch, "register", Mock(side_effect=error))
        monkeypatch.setattr("hf_selfspec.generate.decoder.is_tensor_parallel", lambda _, shared=is_shared: shared)
        with pytest.raises(type(error), match=str(error)):
            told(replace(SKIPS))


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
    plain = generate(model, inputs, 40)
    with pytest.warns(UserWarning, match="went on without drafts"):
        assert torch.equal(generate(model, inputs, 40, assistant=spec), plain)
    assert torch.equal(generate(model, inputs, 40, assistant=spec), plain)
    hook.remove()
