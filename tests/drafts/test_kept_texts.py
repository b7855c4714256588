"""What free drafts keep of texts: from call to call, on disk, among threads, and how it is forgotten."""

import copy
import gc
import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from filelock import FileLock
from transformers import LlamaForCausalLM

from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from hf_selfspec import Cascade, EarlyExit, FixedLength, GenerationStats, Lookup, SelfSpec
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.successors import Successors
from hf_selfspec.drafts.free.suffix import SEPARATOR, texts_of
from hf_selfspec.errors import SettingError
from hf_selfspec.learned import findings as files_shared
from hf_selfspec.learned import knowledge as all_findings
from hf_selfspec.learned.files import written_whole

pytestmark = pytest.mark.machine("verification_is_free")

NEW_TOKENS = 24
PROMPT, OTHER, THIRD = (ragged_batch((length,), seed=seed) for length, seed in ((12, 11), (10, 12), (11, 13)))
BATCH = ragged_batch((4, 9, 6))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(2, factor=0.5)


_TEXTS = WeakKeyDictionary[Any, dict[str, torch.Tensor]]()


def plain(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Made once for each model and prompt."""
    name, known = str(inputs), _TEXTS.setdefault(model, {})
    if name not in known:
        known[name] = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return known[name]


def call(model: Any, spec: SelfSpec, inputs: dict[str, torch.Tensor] = PROMPT) -> GenerationStats:
    """One call, and what it has found on disk, as it is ten seconds later."""
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant=spec)
    assert torch.equal(ids, plain(model, inputs))
    spec._knowledge_of(model).write(0.0)
    return spec.stats


def findings(spec: SelfSpec, model: Any) -> LookupFindings:
    found = spec._knowledge.latest(model, lambda found: isinstance(found, LookupFindings))
    assert isinstance(found, LookupFindings)
    return found


def stored(spec: SelfSpec, model: Any) -> list[int]:
    return findings(spec, model).store.tokens


def known_in(folder: Path) -> list[LookupFindings]:
    """What the files below a folder hold of texts."""
    files = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    states = [one["state"] for file in files for one in file["findings"] if "known" in one["state"]]
    found = [LookupFindings() for _ in states]
    for one, state in zip(found, states, strict=True):
        one.restore(state)
    return found


def kept_texts(folder: Path) -> list[list[int]]:
    return [list(text) for known in known_in(folder) for text in texts_of(known.store.tokens)]


def has_texts(folder: Path) -> bool:
    """Whether any file below holds tokens, or rates that were learned from them."""
    states = [one.state()["known"] for one in known_in(folder)]
    return any(state != LookupFindings().state()["known"] for state in states)


def test_the_same_prompt_again_is_drafted_nearly_as_a_whole(llama: LlamaForCausalLM) -> None:
    spec = SelfSpec.lookup()
    first, second = call(llama, spec), call(llama, spec)
    assert second.accepted > 0.75 * NEW_TOKENS
    assert second.rounds < first.rounds / 2
    sampled = llama.generate(**PROMPT, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=1, assistant=spec)
    assert spec.stats.rounds < first.rounds / 2, "kinds of calls share texts"
    assert torch.equal(sampled, plain(llama, PROMPT))


def test_whole_texts_are_stored_and_no_padding() -> None:
    model, spec = tiny_llama(2, factor=0.5), SelfSpec.lookup()
    end = int(plain(model, BATCH)[1, 25])
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": end}
    expected: list[int] = []
    for _ in range(2):
        ids = model.generate(**BATCH, **options, assistant=spec).tolist()
        for row, mask in zip(ids, BATCH["attention_mask"].tolist(), strict=True):
            said = row[len(mask) :]
            length = said.index(end) + 1 if end in said else len(said)
            expected += [-1, *row[mask.index(1) : len(mask)], *said[:length]]
    assert stored(spec, model) == expected


def test_copies_share_and_new_ones_begin_anew(llama: LlamaForCausalLM) -> None:
    spec = SelfSpec.lookup()
    first = call(llama, spec)
    for shared_one in (copy.copy(spec), copy.deepcopy(spec)):
        assert call(llama, shared_one).rounds < first.rounds / 2
        assert stored(shared_one, llama) is stored(spec, llama)
    for new in (replace(spec, max_draft=24), pickle.loads(pickle.dumps(spec))):
        assert call(llama, new).rounds == first.rounds
    other = tiny_llama(2, factor=0.5, seed=1)
    call(other, spec)
    assert set(stored(spec, other)) != set(stored(spec, llama))


def test_texts_are_saved_found_again_and_forgotten(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    draft, saved, cache = Cascade([Lookup(), EarlyExit(1)]), tmp_path / "saved", tmp_path / "cache"
    spec = SelfSpec(draft, cache_dir=cache)
    first = call(llama, spec)
    spec.save_pretrained(saved)
    with pytest.raises(SettingError, match="was saved for"):
        call(tiny_llama(2, factor=0.5, seed=1), SelfSpec.from_pretrained(saved))
    for again, is_used in (
        (SelfSpec.from_pretrained(saved), False),
        (SelfSpec.from_pretrained(saved), True),
        (SelfSpec(draft, cache_dir=cache), True),
    ):
        assert again.draft == draft
        if is_used:
            assert call(llama, again).rounds < first.rounds / 2
            assert stored(again, llama)[: len(stored(spec, llama))] == stored(spec, llama)
        again.forget()
        again.save_pretrained(tmp_path / "again")
        assert not has_texts(tmp_path / "again")
        assert has_texts(cache) == (again.cache_dir is None)
        assert call(llama, again).rounds > first.rounds / 2


def _text(model: LlamaForCausalLM, inputs: dict[str, torch.Tensor]) -> list[int]:
    return plain(model, inputs)[0].tolist()


def test_processes_put_their_texts_together(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    one, two = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(2))
    # Both begin before there is a file.
    first = call(llama, one)
    call(llama, two, OTHER)
    texts = [_text(llama, PROMPT), _text(llama, OTHER)]
    assert sorted(kept_texts(tmp_path)) == sorted(texts)
    # What is known already is not taken in twice.
    call(llama, one, THIRD)
    assert sorted(kept_texts(tmp_path)) == sorted([*texts, _text(llama, THIRD)])
    for inputs in (PROMPT, OTHER, THIRD):
        assert call(llama, SelfSpec(Lookup(), cache_dir=tmp_path), inputs).rounds < first.rounds / 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forget", "remove", "forget without the model"])
@pytest.mark.parametrize("between", [False, True])
def test_forgotten_texts_are_not_written_anew(llama: LlamaForCausalLM, tmp_path: Path, how: str, between: bool) -> None:
    """Not even where a process that knows nothing makes the file again before they see that it is gone."""
    one, two, three = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(3))
    model = copy.deepcopy(llama)
    first = call(model, one)
    for spec in (two, three):
        call(llama, spec)
    if how == "forget without the model":
        del model
        gc.collect()
    if how == "remove":
        (file,) = tmp_path.rglob("*-lookup.json")
        file.unlink()
    else:
        one.forget()
    if between:
        call(llama, SelfSpec(Lookup(), cache_dir=tmp_path), THIRD)
    call(llama, two, OTHER)
    assert _text(llama, PROMPT) not in kept_texts(tmp_path)
    assert _text(llama, OTHER) not in kept_texts(tmp_path)  # it cannot be told from the older ones
    call(llama, two, OTHER)
    assert _text(llama, OTHER) in kept_texts(tmp_path)
    assert len(findings(two, llama).successors)
    for _ in range(2):
        call(llama, three, OTHER)
    assert call(llama, three, OTHER).rounds < first.rounds / 2
    assert _text(llama, PROMPT) not in kept_texts(tmp_path)


def test_models_alike_forget_together(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """Two objects of one model in one process share a file, of which each has its own knowledge."""
    other = copy.deepcopy(llama)
    spec, forgetful = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(2))
    for model in (llama, other):
        call(model, spec)
    call(llama, forgetful)
    forgetful.forget()
    for model in (llama, other, llama, other):
        call(model, spec, OTHER)
    assert _text(llama, PROMPT) not in kept_texts(tmp_path)
    assert _text(llama, OTHER) in kept_texts(tmp_path)


def test_texts_of_others_do_not_push_out_ones_own(llama: LlamaForCausalLM) -> None:
    """They come in as the oldest, and pairs only where there is room."""
    mine, theirs = LookupFindings(100), LookupFindings(100)
    mine.successors, theirs.successors = Successors(8), Successors(8)
    for knowledge, start in ((mine, 0), (theirs, 500)):
        for text in range(6):
            tokens = list(range(start + 10 * text, start + 10 * text + 10))
            knowledge.add_texts([tokens])
            knowledge.successors.see([(tokens[0], tokens[1])], np.array([[tokens[2]]]), np.array([[0.9]]), text)
    mine.merge(theirs.state())
    kept = [list(text) for text in texts_of(mine.store.tokens)]
    # 100 tokens with what separates texts.
    assert kept == [list(range(start, start + 10)) for start in (530, 540, 550, 0, 10, 20, 30, 40, 50)]
    found = [mine.successors.get(start + 10 * text, start + 10 * text + 1) for start in (0, 500) for text in range(6)]
    assert [one is not None and one.is_pair for one in found] == [True] * 6 + [False] * 4 + [True] * 2
    before = list(mine.store.tokens)
    trimmed = theirs.state()
    trimmed["known"]["store"] = [SEPARATOR, *range(5, 10), SEPARATOR, *range(10, 20)]
    mine.merge(trimmed)
    assert mine.store.tokens == before


# One of each kind, by its place and its value; what else is refused is in test_lookup.py.
DAMAGES: dict[str, tuple[tuple[str, ...], Any]] = {
    "cut short": (("store", "base64"), "AAAA"),
    "objects": (("store", "dtype"), "|O"),
    "token beyond the vocabulary": (("store",), [5, VOCABULARY, 6]),
    "no store": (("store",), None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(llama: LlamaForCausalLM, tmp_path: Path, damage: str) -> None:
    """A saved file is one clear error before anything is generated; a cache begins anew."""

    def generate(spec: SelfSpec) -> torch.Tensor:
        found: torch.Tensor = llama.generate(**PROMPT, max_new_tokens=8, do_sample=False, assistant=spec)
        return found

    def damaged(path: Path) -> str:
        content = json.loads(path.read_text())
        (*outer, last), value = DAMAGES[damage]
        reduce(getitem, outer, content["findings"][0]["state"]["known"])[last] = value
        path.write_text(json.dumps(content))
        return f"{path} is not a saved SelfSpec, or was cut short or changed"

    spec = SelfSpec(Lookup(), cache_dir=tmp_path / "cache")
    ids = generate(spec)
    spec.save_pretrained(tmp_path / "saved")
    (cached,) = tmp_path.rglob("*-lookup.json")
    why = damaged(tmp_path / "saved" / "selfspec.json")
    forwards: list[Any] = []
    hook = llama.register_forward_pre_hook(lambda *args: forwards.append(args))
    with pytest.raises(SettingError) as raised:
        generate(SelfSpec.from_pretrained(tmp_path / "saved"))
    assert why in str(raised.value)
    hook.remove()
    assert not forwards
    why = damaged(cached)
    with pytest.warns(UserWarning, match="findings begin anew") as told:
        assert torch.equal(generate(SelfSpec(Lookup(), cache_dir=tmp_path / "cache")), ids)
    assert why in str(told[0].message)
    assert generate(SelfSpec(Lookup(), cache_dir=tmp_path / "cache")) is not None


def test_threads(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """Two share a SelfSpec, the third only its cache folder, as processes do; one of them forgets now and then."""

    def make() -> SelfSpec:
        return SelfSpec(Cascade([Lookup(200), EarlyExit(1)]), FixedLength(3), cache_dir=tmp_path)

    shared_one, own = make(), make()
    prompts = [ragged_batch((4, 9, 6), seed=seed) for seed in range(3)]
    expected = [llama.generate(**prompt, max_new_tokens=12) for prompt in prompts]

    def task(index: int) -> None:
        spec = own if index == 2 else shared_one
        for turn in range(3):
            which = (index + turn) % len(prompts)
            ids = llama.generate(**prompts[which], max_new_tokens=12, assistant=spec)
            assert torch.equal(ids, expected[which])
            spec._knowledge_of(llama).write(0.0)
            if index == 0 and turn == 1:
                spec.forget()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(task, range(3)))  # raises what one of them raised
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix not in (".json", ".lock")]
    call(llama, make())


@pytest.fixture
def held(llama: LlamaForCausalLM, tmp_path: Path) -> Iterator[tuple[SelfSpec, Any]]:
    """A spec that has written its file once, which another process holds now."""
    spec = SelfSpec(Lookup(), cache_dir=tmp_path)
    call(llama, spec)
    (path,) = tmp_path.rglob("*-lookup.json")
    with FileLock(f"{path}.lock") as lock:
        yield spec, lock


def test_calls_do_not_wait_for_a_file_that_another_process_holds(
    held: tuple[SelfSpec, Any], llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They try again later and later; the end of the process waits."""
    spec, lock = held
    times, tried, patience = [5.0, *(20.0 * step for step in range(1, 33))], list[float](), list[float]()
    locked = files_shared.locked

    def trying(path: Path, seconds: float) -> Any:
        tried.append(now)
        patience.append(seconds)
        return locked(path, seconds)

    monkeypatch.setattr(files_shared, "locked", trying)
    start = files_shared.monotonic()
    for now in times:
        monkeypatch.setattr(files_shared, "monotonic", lambda: start + now)  # noqa: B023  # used within its turn
        llama.generate(**OTHER, max_new_tokens=4, assistant=spec)
    # After the first write at most every 10 s, and then 20, 40, ...
    assert tried == [20.0, 40.0, 80.0, 160.0, 320.0, 640.0]
    assert set(patience) == {0.0}
    assert len(kept_texts(tmp_path)) == 1
    lock.release()
    all_findings._write_rest()
    assert patience[-1] == pytest.approx(files_shared.PATIENCE, abs=1.0)
    assert len(kept_texts(tmp_path)) == 1 + len(times)
    (file,) = spec._knowledge.record(llama).files.values()
    assert file._pause == files_shared.WRITTEN


def test_others_go_on_while_one_waits_to_forget(
    held: tuple[SelfSpec, Any], llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    spec, lock = held
    forgetting = Thread(target=spec.forget)
    forgetting.start()
    for _ in range(2):
        llama.generate(**OTHER, max_new_tokens=4, assistant=spec)
    assert forgetting.is_alive()
    lock.release()
    forgetting.join()
    assert not has_texts(tmp_path)
    assert not stored(spec, llama)


def test_what_cannot_be_forgotten_on_disk_is_told(
    held: tuple[SelfSpec, Any], llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = held
    monkeypatch.setattr(all_findings, "PATIENCE", 0.0)
    with pytest.raises(SettingError, match=r"-lookup\.json cannot be written"):
        spec.forget()
    assert not stored(spec, llama)


def test_files_of_writes_that_were_killed_are_forgotten(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not those that others are writing."""
    spec = SelfSpec(Lookup(), cache_dir=tmp_path)
    call(llama, spec)
    (path,) = tmp_path.rglob("*-lookup.json")
    with monkeypatch.context() as killed:

        def ends(*_: Any) -> None:
            raise KeyboardInterrupt

        killed.setattr(os, "replace", ends)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            call(llama, spec, OTHER)
    left = [file for file in path.parent.iterdir() if file.suffix == ".tmp"]
    assert len(left) == 1
    assert left[0].stat().st_size > 1000
    with written_whole(path.with_name("other.json")) as beside:
        beside.write_text('{"findings": []}')
        spec.forget()
    assert sorted(file.name for file in path.parent.iterdir() if file.suffix != ".lock") == ["other.json"]
    assert not has_texts(tmp_path)
