"""The file of a model and a task in ``cache_dir``: what is kept is used, the last writer wins, what is forgotten stays
forgotten, and a file is whole or not written."""

import copy
import gc
import json
import os
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import PreTrainedModel

from helpers.models import ragged_batch, tiny_llama
from helpers.processes import python
from helpers.searches import FILE, LAYERS, SEARCHES, assert_lossless, begins_with, prompt
from helpers.searches import generated as generate
from hf_selfspec import Cascade, EarlyExit, GenerationStats, Lookup, SelfSpec, SettingError, errors
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.suffix import SEPARATOR
from hf_selfspec.learned import knowledge

pytestmark = [pytest.mark.usefixtures("no_grad", "no_warnings_yet"), pytest.mark.machine("verification_is_free")]

FIRST, SECOND, THIRD = (prompt(length=12, seed=seed) for seed in (5, 6, 7))


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(4, factor=0.6)


def call(model: PreTrainedModel, spec: SelfSpec, ids: torch.Tensor = FIRST, writes: bool = True) -> GenerationStats:
    """One call, and what it has found on disk, as at the end of a process."""
    generate(model, ids, 24, assistant=spec)
    if writes:
        knowledge.write_all()
    assert spec.stats is not None
    return spec.stats


def texts_in(folder: Path) -> list[int]:
    """Which of the prompts the files below a folder hold."""
    tokens = list[int]()
    for file in folder.rglob("*.json"):
        for name, state in json.loads(file.read_text())["findings"].items():
            if name == "all: lookup":
                (kept := LookupFindings()).restore(state)
                tokens += kept.store.tokens
                assert len(kept.store.tokens) or not len(kept.successors), "of texts that were dropped"
    text = " ".join(map(str, tokens))
    return [place for place, ids in enumerate((FIRST, SECOND, THIRD)) if " ".join(map(str, ids[0].tolist())) in text]


@pytest.mark.parametrize("way", ["cache_dir", "save_pretrained"])
def test_what_is_kept_is_used(way: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    draft, folder = Cascade([Lookup(), SEARCHES["over"].draft]), tmp_path if way == "cache_dir" else None
    spec = SelfSpec(draft, cache_dir=folder)
    first = call(llama, spec)
    if folder is None:
        spec.save_pretrained(tmp_path)
    again = SelfSpec.from_pretrained(tmp_path) if folder is None else SelfSpec(draft, cache_dir=str(folder))
    assert begins_with(llama, again)[0] == spec.choice(llama)
    assert again.stats.phase == "acceleration"
    assert call(llama, again).rounds < first.rounds / 2
    assert_lossless(llama, again)
    assert texts_in(tmp_path) == [0]
    again.forget()
    assert call(llama, again).rounds > first.rounds / 2
    assert again.choice(llama) == spec.choice(llama), "sets are no texts"


def test_a_file_is_for_a_model_settings_and_a_task(llama: PreTrainedModel, tmp_path: Path) -> None:
    def rounds(model: PreTrainedModel, **changes: Any) -> list[int]:
        return [call(model, SelfSpec(Lookup(), cache_dir=tmp_path, **changes)).rounds for _ in range(2)]

    for model, changes in ((llama, {}), (tiny_llama(4, seed=1, factor=0.6), {}), (llama, {"task": "code"})):
        before, after = rounds(model, **changes)
        assert after < before / 2
    before, after = rounds(llama, max_draft=9)
    assert after < before
    assert rounds(copy.deepcopy(llama))[0] < before / 2
    assert len(list(tmp_path.rglob("*.json"))) == 4
    assert len(list(tmp_path.rglob("code-*.json"))) == 1


def test_the_last_writer_wins(llama: PreTrainedModel, tmp_path: Path) -> None:
    one, two = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(2))
    for spec, ids, kept in ((one, FIRST, [0]), (two, SECOND, [0, 1]), (one, THIRD, [0, 2]), (two, SECOND, [0, 1])):
        call(llama, spec, ids)
        assert texts_in(tmp_path) == kept
    call(llama, one, SECOND, writes=False)
    assert texts_in(tmp_path) == [0, 1], "a call writes only what has become due"


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("how", ["forget", "remove", "forget without the model"])
def test_forgotten_texts_are_not_written_anew(how: str, between: bool, llama: PreTrainedModel, tmp_path: Path) -> None:
    """Not even where a process that knows nothing makes the file again before the others see that it is gone."""
    one, two = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(2))
    model = copy.deepcopy(llama)
    call(model, one)
    call(llama, two)
    if how == "forget without the model":
        del model
        gc.collect()
    if how == "remove":
        (file,) = tmp_path.rglob("*.json")
        file.unlink()
    else:
        one.forget()
    assert not list(tmp_path.rglob("*.json"))
    if between:
        call(llama, SelfSpec(Lookup(), cache_dir=tmp_path), THIRD)
    call(llama, two, SECOND)
    assert texts_in(tmp_path) == [], "later texts cannot be told from older ones"
    call(llama, two, SECOND)
    assert texts_in(tmp_path) == [1]


def test_forgetting_takes_all_copies(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, in what was loaded, and what a write that was killed has left; a file that is held is told."""
    spec = SelfSpec(Lookup(), cache_dir=tmp_path / "cache")
    call(llama, spec)
    (path,) = tmp_path.rglob("*.json")
    (path.parent / ".0a1b2c3d.tmp").mkdir()
    (path.parent / ".0a1b2c3d.tmp" / path.name).write_text("texts")
    spec.save_pretrained(tmp_path / "saved")
    for known in (spec, SelfSpec.from_pretrained(tmp_path / "saved")):
        known.forget()
        known.save_pretrained(tmp_path / "again")
        assert texts_in(tmp_path / "again") == []
    assert [file.name for file in path.parent.rglob("*") if file.is_file() and file.suffix != ".lock"] == []
    call(llama, spec)
    monkeypatch.setattr(knowledge, "PATIENCE", 0.0)
    with FileLock(f"{path}.lock"), pytest.raises(SettingError, match=r"\.json cannot be written"):
        spec.forget()
    assert spec._knowledge.latest(llama).store.tokens == []


def train_a_step(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


def test_files_of_one_model_get_nothing_of_another(tmp_path: Path) -> None:
    """A model that has been trained is another one; what was loaded goes on in training."""
    model, spec = tiny_llama(LAYERS), SelfSpec(cache_dir=tmp_path / "cache")
    call(model, spec)
    (file,) = (tmp_path / "cache").rglob("*.json")
    content = file.read_bytes()
    train_a_step(model)
    call(model, spec, SECOND)
    assert [*(tmp_path / "cache").rglob("*.json")] == [file]
    assert file.read_bytes() == content
    spec.save_pretrained(tmp_path / "second", model)
    loaded = SelfSpec.from_pretrained(tmp_path / "second")
    generate(model, FIRST, 12, assistant=loaded)
    train_a_step(model)
    assert_lossless(model, loaded)
    with pytest.raises(SettingError, match="other weights"):
        generate(model, FIRST, 12, assistant=SelfSpec.from_pretrained(tmp_path / "second"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_a_write_that_fails_leaves_the_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any point: in the middle of a file, before it is on the disk, before it takes the old one's place."""
    SelfSpec().save_pretrained(tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def broken(*_: Any) -> None:
        raise error

    for owner, name in ((json, "dump"), (os, "fsync"), (os, "replace")):
        with monkeypatch.context() as disk:
            disk.setattr(owner, name, broken)
            with pytest.raises(SettingError if isinstance(error, OSError) else type(error), match=r"No space left|^$"):
                SelfSpec(EarlyExit(3)).save_pretrained(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [FILE]
        assert (tmp_path / FILE).read_bytes() == before


def test_what_could_not_be_written_is_written_later(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is told; a file that another process holds is left to later, and no call waits for it."""
    spec, folder = SelfSpec(Lookup(), cache_dir=tmp_path / "cache"), tmp_path / "cache"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        with pytest.warns(UserWarning, match="keeping findings in .*No space left"):
            generate(llama, FIRST, 20, assistant=spec)
    assert texts_in(folder) == []
    call(llama, spec)
    assert texts_in(folder) == [0]
    (file,) = folder.rglob("*.json")
    other = SelfSpec(Lookup(), cache_dir=folder)
    with FileLock(f"{file}.lock"):
        generate(llama, SECOND, 20, assistant=other)
    assert texts_in(folder) == [0]
    knowledge.write_all()
    assert texts_in(folder) == [0, 1]
    with pytest.warns(UserWarning, match="keeping findings in .*Not a directory"):
        assert_lossless(llama, SelfSpec(Lookup(), cache_dir=file))


def test_threads(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Two share a SelfSpec, the third only its cache folder, as processes do; one of them forgets now and then."""
    shared_one, own = (SelfSpec(Cascade([Lookup(200), EarlyExit(1)]), cache_dir=tmp_path) for _ in range(2))
    prompts = [ragged_batch((4, 9, 6), seed=seed) for seed in range(3)]
    expected = [generate(llama, ids, 12) for ids in prompts]

    def task(index: int) -> None:
        spec = own if index == 2 else shared_one
        for turn in range(3):
            which = (index + turn) % len(prompts)
            with torch.no_grad():
                assert torch.equal(generate(llama, prompts[which], 12, assistant=spec), expected[which])
            knowledge.write_all()
            if index == 0 and turn == 1:
                spec.forget()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(task, range(3)))  # raises what one of them raised
    assert [file.suffix for file in sorted(tmp_path.rglob("*.*"))] == [".json", ".lock"]
    call(llama, replace(own))


def test_copies_share_and_new_ones_begin_anew(llama: PreTrainedModel) -> None:
    spec = SelfSpec.lookup()
    first = call(llama, spec)
    for shared_one in (copy.copy(spec), copy.deepcopy(spec)):
        assert call(llama, shared_one).rounds < first.rounds / 2
    for new in (replace(spec, max_draft=24), pickle.loads(pickle.dumps(spec))):
        assert call(llama, new).rounds == first.rounds
    call(other := tiny_llama(2, factor=0.5, seed=1), spec)
    assert set(spec._knowledge.latest(other).store.tokens) != set(spec._knowledge.latest(llama).store.tokens)


def test_whole_texts_are_stored_and_no_padding(llama: PreTrainedModel) -> None:
    """What sampled calls know, too."""
    spec, batch = SelfSpec.lookup(), ragged_batch((4, 9, 6))
    end, expected = int(generate(llama, batch, 24)[1, 25]), list[int]()
    for sampling in ({}, {"do_sample": True, "top_k": 1}):
        ids = llama.generate(**batch, max_new_tokens=24, pad_token_id=0, eos_token_id=end, assistant=spec, **sampling)
        for row, mask in zip(ids.tolist(), batch["attention_mask"].tolist(), strict=True):
            said = row[len(mask) :]
            length = said.index(end) + 1 if end in said else len(said)
            expected += [SEPARATOR, *row[mask.index(1) : len(mask)], *said[:length]]
    assert spec._knowledge.latest(llama).store.tokens == expected


SERVICE = """
import os, sys, warnings, torch
from pathlib import Path
from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import SelfSpec, attach
torch.set_num_threads(1)
warnings.simplefilter("ignore")
model, used = tiny_llama(2), []
attach(model, SelfSpec(cache_dir=sys.argv[1]))
for call in range(3000):
    options = {"num_beams": 2 + call % 5} if call % 9 == 8 else {"do_sample": call % 5 == 4}
    lengths = tuple(4 + (call + row) % 9 for row in range(1 + call % 7 // 6))
    model.generate(**ragged_batch(lengths, seed=call), max_new_tokens=2 + call % 3, **options)
    used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
print(used[300], used[-1], *Path(sys.argv[1]).rglob("*.json"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the file system of processes")
def test_the_memory_of_a_service_stays(tmp_path: Path) -> None:
    begun, now, *files = python("-c", SERVICE, tmp_path).stdout.split()
    assert int(now) - int(begun) < 20, "MiB"
    assert len(files) == 1


def test_what_is_kept_of_warnings_is_bounded_and_models_are_let_go(tmp_path: Path) -> None:
    spec, model = SelfSpec(cache_dir=tmp_path), tiny_llama(LAYERS)
    for ids in (FIRST, SECOND, THIRD):
        call(model, spec, ids, writes=False)
    alive = weakref.ref(model)
    del model, spec
    gc.collect()
    assert alive() is None
    assert texts_in(tmp_path) == [0]
    knowledge.write_all()
    assert texts_in(tmp_path) == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(5000):
            errors.warn_once(f"warning {number}")
    assert len(errors.issued) <= 1024
    errors.warn_once("warning 4999")  # would be an error
