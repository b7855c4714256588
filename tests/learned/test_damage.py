"""What is damaged or fails: each loader has one error before anything is generated, which names the file; caches begin
anew; learning, timings, statistics and files that fail beside a text do not lose it."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.blocks import published_assistant
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.searches import FILE, SEARCHES, prompt
from helpers.searches import generated as generate
from hf_selfspec import (
    MTP,
    Adapter,
    Cascade,
    ExitHeads,
    LinearProbe,
    Lookup,
    MtpHead,
    ReducedHead,
    SelfSpec,
    load_head,
)
from hf_selfspec.drafts.controlled import ControlledDrafter
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.suffix import SuffixIndex
from hf_selfspec.errors import SettingError
from hf_selfspec.learned import knowledge, saving
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.target import Target
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = pytest.mark.usefixtures("no_grad", "no_warnings_yet")

MODEL = tiny_llama(factor=0.6)
PLAIN = generate(MODEL, prompt(), 46)
SKIPS, OVER = (SelfSpec(Cascade([Lookup(), SEARCHES[name].draft])) for name in ("begun", "over"))
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
BROKEN = RuntimeError("broken")


def told(spec: SelfSpec, tokens: int = 46, **options: Any) -> list[str]:
    """The warnings of a call, whose ids are plain's."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ids = generate(MODEL, prompt(), tokens, assistant=spec, **options)
        knowledge.write_all()
    assert ids.shape[1] == prompt().shape[1] + tokens
    assert options or torch.equal(ids, PLAIN[:, : ids.shape[1]])
    return [str(one.message) for one in found]


# Damage --------------------------------------------------------------------------------------------------------------


def kept(folder: Path) -> None:
    spec = replace(OVER)
    generate(MODEL, prompt(), 24, assistant=spec)
    spec.save_pretrained(folder)


def use_kept(folder: Path) -> torch.Tensor:
    forwards: list[int] = []
    handle = MODEL.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        ids: torch.Tensor = generate(MODEL, prompt(), 12, assistant=SelfSpec.from_pretrained(folder))
        return ids
    except SettingError:
        assert not forwards
        raise
    finally:
        handle.remove()


# What saves something in a folder, and what reads it.
SAVED: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "SelfSpec": (kept, use_kept),
    "adapter": (Adapter(2, 64, 4).save_pretrained, Adapter.from_pretrained),
    "exit heads": (ExitHeads([1, 3], 64, VOCABULARY).save_pretrained, ExitHeads.from_pretrained),
    "probe": (LinearProbe(2, 64).save_pretrained, LinearProbe.from_pretrained),
    "reduced head": (ReducedHead.of(range(9), VOCABULARY).save_pretrained, ReducedHead.from_pretrained),
    "assistant": (
        lambda at: published_assistant(
            at, build("gemma4_text", vocab_size=96), use_ordered_embeddings=True, num_centroids=48
        ),
        MTP,
    ),
    "MTP head": (MtpHead.of(MODEL).save_pretrained, lambda at: load_head(MODEL, at)),
}
OTHER_CONTENT = (b"", b"null", b"{}", b"[1]", b'{"format": NaN}', b"\xff\xfe\x00", b"[" * 100_000, b"\0" * 64)


def damaged(file: Path) -> Iterator[None]:
    """Damages a file in one way after another; only what decides what is loaded."""
    content = file.read_bytes()
    for other in (*OTHER_CONTENT, *(content[: len(content) * part // 9] for part in range(9)), content.rstrip()[:-1]):
        file.write_bytes(other)
        yield
    file.unlink()
    yield
    file.write_bytes(content)
    if file.suffix == ".safetensors":
        for name, value in load_file(file).items():
            wrong = torch.full_like(value, torch.nan) if value.is_floating_point() else value - 1
            save_file(load_file(file) | {name: wrong}, file)
            yield
            file.write_bytes(content)


@pytest.mark.every_run("(?!assistant).*")
@pytest.mark.parametrize("saved", SAVED)
def test_a_damaged_file_is_one_error(saved: str, tmp_path: Path) -> None:
    save, read = SAVED[saved]
    save(tmp_path)
    files = [file for file in tmp_path.iterdir() if file.suffix in (".json", ".safetensors")]
    assert files
    for file in files:
        for _ in damaged(file):
            with pytest.raises(SettingError) as error:
                read(tmp_path)
            assert str(tmp_path) in str(error.value), (file.name, error.value)
        read(tmp_path)


def changed(content: Any) -> Iterator[Any]:
    """Copies of the content, in which another value stands in one place; of lists at the first and the last."""
    yield None
    places: Any = content if isinstance(content, dict) else ()
    if isinstance(content, list) and content:
        places = {0, len(content) - 1}
    for place in places:
        for inner in changed(content[place]):
            (other := copy.copy(content))[place] = inner
            yield other


def test_findings_that_were_changed(tmp_path: Path) -> None:
    """Whatever was changed, one error names the file."""
    kept(tmp_path)
    file = tmp_path / FILE
    content = json.loads(file.read_text())
    for findings in changed(content["findings"]):
        file.write_text(json.dumps(content | {"findings": findings}))
        with pytest.raises(SettingError, match="cut short or changed") as error:
            SelfSpec.from_pretrained(tmp_path)
        assert str(file) in str(error.value)


def test_a_damaged_cache_begins_anew(tmp_path: Path) -> None:
    """With one warning, and the next write takes its place."""
    assert told(replace(OVER, cache_dir=tmp_path), 20) == []
    (file,) = tmp_path.rglob("*.json")
    for content in (*OTHER_CONTENT, file.read_bytes()[:-2], file.read_bytes().replace(b'"arrays"', b'"array"')):
        file.write_bytes(content)
        (words,) = told(replace(OVER, cache_dir=tmp_path), 20)
        assert words.startswith(f"what was learned before is lost, since its file cannot be used: {file}")
        assert told(replace(OVER, cache_dir=tmp_path), 20) == []


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (LookupFindings, "add_texts", OUT),
        (ControlledDrafter, "report", BROKEN),
        (ControlledDrafter, "report", OUT),
        (SkipSearch, "state", BROKEN),
        (saving, "written_whole", ValueError("out of range")),
        (knowledge.Knowledge, "add_call", BROKEN),
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
