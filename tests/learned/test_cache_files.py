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
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from transformers import PreTrainedModel

from helpers.models import ragged_batch, tiny_llama
from helpers.processes import python
from helpers.searches import LAYERS, SEARCHES, assert_lossless, begins_with, prompt
from helpers.searches import generated as generate
from hf_selfspec import Cascade, EarlyExit, Lookup, SelfSpec, SettingError, errors
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.suffix import SEPARATOR
from hf_selfspec.learned import knowledge

pytestmark = [pytest.mark.usefixtures("no_grad", "no_warnings_yet"), pytest.mark.machine("verification_is_free")]

FIRST, SECOND, THIRD = (prompt(length=12, seed=seed) for seed in (5, 6, 7))


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(4, factor=0.6)


def call(model: PreTrainedModel, spec: SelfSpec, ids: torch.Tensor = FIRST, writes: bool = True) -> int:
    """The rounds of one call; what it has found is on disk, as at the end of a process."""
    generate(model, ids, 24, assistant=spec)
    if writes:
        knowledge.write_all()
    assert spec.stats is not None
    return spec.stats.rounds


def tokens_in(folder: Path) -> list[int]:
    """The texts that the files below a folder hold."""
    tokens = list[int]()
    for file in folder.rglob("*.json"):
        for name, state in json.loads(file.read_text())["findings"].items():
            if name == "all: lookup":
                (kept := LookupFindings()).restore(state)
                tokens += kept.store.tokens
                assert len(kept.store.tokens) or not len(kept.successors), "of texts that were dropped"
    return tokens


def texts_in(folder: Path) -> list[int]:
    """Which of the prompts are among them."""
    text = " ".join(map(str, tokens_in(folder)))
    return [place for place, ids in enumerate((FIRST, SECOND, THIRD)) if " ".join(map(str, ids[0].tolist())) in text]


@pytest.mark.parametrize("way", ["cache_dir", "save_pretrained", "pickle"])
def test_what_is_kept_is_used(way: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    draft, folder = Cascade([Lookup(), SEARCHES["over"].draft]), tmp_path if way == "cache_dir" else None
    spec = SelfSpec(draft, cache_dir=folder)
    first = call(llama, spec)
    if folder is None:
        spec.save_pretrained(tmp_path)
    again = SelfSpec.from_pretrained(tmp_path) if folder is None else SelfSpec(draft, cache_dir=str(folder))
    if way == "pickle":
        again = pickle.loads(pickle.dumps(again))
    assert begins_with(llama, again) == (spec.choice(llama), "acceleration")
    assert call(llama, again) < first / 2
    assert_lossless(llama, again)
    assert texts_in(tmp_path) == [0]
    again.forget()
    assert call(llama, again) > first / 2
    assert again.choice(llama) == spec.choice(llama), "sets are no texts"


def test_a_file_is_for_a_model_settings_and_a_task(llama: PreTrainedModel, tmp_path: Path) -> None:
    for model, changes in (
        (llama, {}),
        (tiny_llama(4, seed=1, factor=0.6), {}),
        (llama, {"task": "code"}),
        (llama, {"max_draft": 9}),
    ):
        before, *after = (
            call(each, SelfSpec(Lookup(), cache_dir=tmp_path, **changes)) for each in (model, copy.deepcopy(model))
        )
        assert after[0] < before
    assert len(list(tmp_path.rglob("*.json"))) == 4
    assert len(list(tmp_path.rglob("code-*.json"))) == 1


def test_the_last_writer_wins(llama: PreTrainedModel, tmp_path: Path) -> None:
    one, two = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(2))
    for spec, ids, kept in ((one, FIRST, [0]), (two, SECOND, [0, 1]), (one, THIRD, [0, 2]), (two, SECOND, [0, 1])):
        call(llama, spec, ids)
        assert texts_in(tmp_path) == kept
    call(llama, one, SECOND, writes=False)
    assert texts_in(tmp_path) == [0, 1], "a call writes only what has become due"


@pytest.mark.parametrize("how", ["forget", "remove", "forget without the model"])
def test_forgotten_texts_are_not_written_anew(how: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    """Not even where a process that knows nothing makes the file again before the others see that it is gone."""
    one, two = (SelfSpec(Lookup(), cache_dir=tmp_path) for _ in range(2))
    model = copy.deepcopy(llama)
    call(model, one)
    call(llama, two)
    if how == "forget without the model":
        del model
        gc.collect()
    for between in (False, True):
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
    first = call(llama, spec)
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
    assert call(llama, spec) > first / 2


def test_a_file_that_cannot_be_written_is_written_later(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is told; a file that another process holds is left to later, and no call waits for it."""
    spec, folder = SelfSpec(Lookup(), cache_dir=tmp_path / "cache"), tmp_path / "cache"
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
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


def test_copies_share_and_new_ones_begin_anew(llama: PreTrainedModel) -> None:
    spec, other = SelfSpec.lookup(), tiny_llama(4, factor=0.6, seed=1)
    first = call(llama, spec)
    for shared_one in (copy.copy(spec), copy.deepcopy(spec)):
        assert call(llama, shared_one) < first / 2
    for new in (replace(spec, max_draft=24), pickle.loads(pickle.dumps(spec))):
        assert call(llama, new) == first
    assert call(other, spec) == call(other, SelfSpec.lookup()), "models share nothing"


def test_whole_texts_are_stored_and_no_padding(llama: PreTrainedModel, tmp_path: Path) -> None:
    """What sampled calls know, too."""
    spec, batch = SelfSpec.lookup(), ragged_batch((4, 9, 6))
    end, expected = int(generate(llama, batch, 24)[1, 25]), list[int]()
    for sampling in ({}, {"do_sample": True, "top_k": 1}):
        ids = llama.generate(**batch, max_new_tokens=24, pad_token_id=0, eos_token_id=end, assistant=spec, **sampling)
        for row, mask in zip(ids.tolist(), batch["attention_mask"].tolist(), strict=True):
            said = row[len(mask) :]
            length = said.index(end) + 1 if end in said else len(said)
            expected += [SEPARATOR, *row[mask.index(1) : len(mask)], *said[:length]]
    spec.save_pretrained(tmp_path)
    assert tokens_in(tmp_path) == expected


SERVICE = """
import os, sys, torch
from pathlib import Path
from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import SelfSpec, attach
torch.set_num_threads(1)
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


def test_models_are_let_go_and_what_was_learned_of_them_is_written(tmp_path: Path) -> None:
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


def test_what_is_kept_of_warnings_is_bounded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(5000):
            errors.warn_once(f"warning {number}")
    assert len(errors.issued) <= 1024
    errors.warn_once("warning 4999")  # would be an error
