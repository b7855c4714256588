"""What was learned survives: files are whole or not written, interruptions, the cache folder, models in training."""

import copy
import gc
import json
import os
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.findings import FILE, LAYERS, SEARCHES, assert_lossless, begins_with, endless, fresh, generate, prompt
from helpers.models import ragged_batch, tiny_llama
from helpers.processes import python
from hf_selfspec import (
    Cascade,
    EarlyExit,
    GenerationStats,
    Lookup,
    SelfSpec,
    SettingError,
    errors,
)
from hf_selfspec.learned.findings import locked
from hf_selfspec.learned.knowledge import _write_rest
from hf_selfspec.learned.saving import Key

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(LAYERS, factor=0.6)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")], ids=repr)
def test_a_failed_write_leaves_the_file(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SelfSpec().save_pretrained(tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def broken(content: Any, file: Any, *rest: Any) -> None:
        file.write('{"format": 1, "sett')
        raise error

    monkeypatch.setattr(json, "dump", broken)
    with pytest.raises(SettingError if isinstance(error, OSError) else type(error), match=r"disk full|^$"):
        SelfSpec(EarlyExit(3)).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


# Imports once and is killed many times: each child generates until it is.
KILLED = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from helpers.models import tiny_llama
from helpers.findings import endless, generate, prompt
from pathlib import Path
folder, chance = Path(sys.argv[1]), random.Random(0)
def versions():
    return [os.stat(path).st_mtime_ns for path in folder.rglob("*.json")]
for turn in range(8):
    before = versions()
    child = os.fork()
    if child == 0:
        model, spec = tiny_llama(6, factor=0.6), endless(folder)
        while True:
            generate(model, prompt(), 40, assistant=spec)
    until = time.monotonic() + 20
    while versions() == before and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.15 + 0.2 * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # the answer to the process that runs this
    print(*(path.read_text() for path in folder.rglob("*.json")), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked child; no os.fork here (Windows)")
def test_a_killed_process_leaves_a_whole_cache(tmp_path: Path) -> None:
    told = python("-c", KILLED, tmp_path).stdout
    kept = [json.loads(line)["findings"][0]["state"] for line in told.splitlines() if line.startswith("{")]
    counts = [len(state["tries"]) for state in kept]
    assert len(counts) == 8
    # Each process went on from what the one before had tried.
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] > counts[0] + 3
    model, spec = tiny_llama(6, factor=0.6), endless(tmp_path)
    assert begins_with(model, spec)[0].plan.picture() == kept[-1]["set"]
    assert_lossless(model, spec)
    assert len(spec._knowledge.latest(model).trials) > counts[-1]


def test_an_interruption_keeps_the_trials(llama: PreTrainedModel, tmp_path: Path) -> None:
    spec = fresh(SEARCHES["begun"], cache_dir=tmp_path)
    generate(llama, prompt(), 20, assistant=spec)
    before, stats = spec._knowledge.latest(llama), spec.stats
    plans = [done.plan for done in before.trials]

    def interrupt(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == 24:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        generate(llama, prompt(seed=6), 20, assistant=spec, stopping_criteria=[interrupt])
    after = spec._knowledge.latest(llama)
    assert after is before
    assert [done.plan for done in after.trials][: len(plans)] == plans
    assert len(after.trials) > len(plans)
    assert spec.stats is stats
    (file,) = tmp_path.rglob("*.json")
    (kept,) = json.loads(file.read_text())["findings"]
    assert len(kept["state"]["tries"]) == len(after.trials)
    assert_lossless(llama, spec)


def test_a_second_spec_starts_tuned(llama: PreTrainedModel, tmp_path: Path) -> None:
    first, second = (fresh(SEARCHES["ratio given"], cache_dir=folder) for folder in (tmp_path, str(tmp_path)))
    generate(llama, prompt(), 24, assistant=first)
    assert begins_with(llama, second) == (first.choice(llama), first.stats.phase)
    assert second.stats.plan == first.choice(llama).plan.picture()
    assert_lossless(llama, second)


def test_cache_files_are_for_a_model_settings_and_a_task(llama: PreTrainedModel, tmp_path: Path) -> None:
    def use(model: PreTrainedModel, **changes: Any) -> list[int]:
        """How many sets two new ones begin with, the second after a long call of the first."""
        known = []
        for tokens in (20, 2):
            spec = fresh(SEARCHES["over"], cache_dir=tmp_path, **changes)
            generate(model, prompt(), 2, assistant=spec)
            known.append(len(spec._knowledge.latest(model).trials))
            generate(model, prompt(), tokens, assistant=spec)
        return known

    for model in (llama, tiny_llama(LAYERS, seed=1, factor=0.6)):
        assert use(model) == [0, 3]
    for changes in ({"task": "code"}, {"max_draft": 9}):
        assert use(llama, **changes) == [0, 3]
    assert use(copy.deepcopy(llama)) == [3, 3]
    assert len(list(tmp_path.rglob("*.json"))) == 4
    assert len(list(tmp_path.rglob("code-*.json"))) == 1


def test_kinds_share_a_cache_file(llama: PreTrainedModel, tmp_path: Path) -> None:
    """A process that makes one kind of call leaves what another finds for others, before or meanwhile."""
    specs = [fresh(SEARCHES["over"], cache_dir=tmp_path) for _ in range(3)]
    for tokens in (2, 20):
        for spec, rows in zip(specs, (1, 2, 1), strict=True):
            generate(llama, prompt(rows), tokens, assistant=spec)
    (file,) = tmp_path.rglob("*.json")
    assert sorted(one["several_rows"] for one in json.loads(file.read_text())["findings"]) == [False, True]


@pytest.mark.usefixtures("no_warnings_yet")
def test_cache_files_that_cannot_be_used(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Findings begin anew, those of searches and those of texts, with one warning for each file, and take its place."""
    draft, expected = Cascade((Lookup(), SEARCHES["over"].draft)), generate(llama, prompt(), 20)

    def used() -> list[str]:
        spec = SelfSpec(draft, cache_dir=tmp_path)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.equal(generate(llama, prompt(), 20, assistant=spec), expected)
            _write_rest()
        return [str(one.message) for one in told]

    assert used() == []
    files = sorted(tmp_path.rglob("*.json"))
    assert len(files) == 2
    for file in files:
        file.write_text(file.read_text()[:-2])
    told = used()
    assert sorted(words.partition(" is not a saved")[0] for words in told) == [
        f"findings begin anew, since their file cannot be used: {file}" for file in files
    ]
    assert used() == []


def test_a_file_is_damaged_while_it_is_used(llama: PreTrainedModel, tmp_path: Path) -> None:
    """What this process knows is written to a new file."""
    spec = SelfSpec(Lookup(), cache_dir=tmp_path)
    generate(llama, prompt(), 8, assistant=spec)
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{")
    generate(llama, prompt(), 8, assistant=spec)
    with pytest.warns(UserWarning, match=r"findings begin anew.*cut short or changed"):
        _write_rest()
    assert json.loads(file.read_text())["findings"]


def test_a_call_writes_a_file_once(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    replace, sync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: [written.append("replaced"), replace(*paths)])
    monkeypatch.setattr(os, "fsync", lambda file: [written.append("synced"), sync(file)])
    generate(llama, prompt(), 20, assistant=fresh(SEARCHES["begun"], cache_dir=tmp_path))
    # What a power failure must not leave empty is on the disk before it takes the old one's place.
    assert written == ["synced", "replaced"]


def test_a_cache_that_cannot_be_written(llama: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = fresh(SEARCHES["over"], cache_dir=tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot be written"):
        found = generate(llama, prompt(), 20, assistant=spec)
    assert torch.equal(found, generate(llama, prompt(), 20))
    assert spec.stats.phase == "acceleration"


def test_a_model_with_a_cache_is_let_go(tmp_path: Path) -> None:
    model, spec = tiny_llama(LAYERS), SelfSpec(cache_dir=tmp_path)
    model.generate(**ragged_batch((9,)), max_new_tokens=12, do_sample=False, assistant=spec)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


SERVICE = """
import os, sys, warnings
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
from helpers.models import ragged_batch, tiny_llama
from pathlib import Path
from hf_selfspec import SelfSpec, attach
model, spec = tiny_llama(2), SelfSpec(cache_dir=sys.argv[1])
attach(model, spec)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
with torch.no_grad():
    for call in range(3000):
        if call == 300:
            begun = resident()
        lengths = [4 + (call + row) % 9 for row in range(1 + call % 7 // 6)]
        options = {"num_beams": 2 + call % 5} if call % 9 == 8 else {"do_sample": call % 5 == 4}
        model.generate(**ragged_batch(tuple(lengths), seed=call), max_new_tokens=2 + call % 3, **options)
print(begun, resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the file system of processes")
def test_the_memory_of_a_service_stays(tmp_path: Path) -> None:
    begun, now = map(int, python("-c", SERVICE, tmp_path).stdout.split())
    assert now - begun < 20, "MiB"


def test_what_is_kept_of_calls_and_warnings_is_bounded(no_warnings_yet: None) -> None:
    known, timeline = SelfSpec()._knowledge, [(tokens, 0.1 * tokens) for tokens in range(300)]
    for _ in range(1000):
        known.add_call(GenerationStats(timeline=timeline, from_draft=[[True] * 300]))
    assert sum(len(call.timeline) + sum(map(len, call.from_draft)) for call in known.calls) <= 512 * 64
    assert known.stats is not None
    assert known.stats.timeline == timeline
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(5000):
            errors.warn_once(f"warning {number}")
    assert len(errors.issued) <= 1024
    errors.warn_once("warning 4999")  # would be an error


def train_a_step(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def test_a_file_is_for_the_weights_with_which_it_was_saved(tmp_path: Path) -> None:
    """One beside each checkpoint of a training; what was loaded goes on in training."""
    model, spec = tiny_llama(LAYERS), SelfSpec()
    for step in ("first", "second"):
        train_a_step(model)
        generate(model, prompt(), 12, assistant=spec)
        spec.save_pretrained(tmp_path / step, model)
    with pytest.raises(SettingError, match="other weights"):
        generate(model, prompt(), 12, assistant=SelfSpec.from_pretrained(tmp_path / "first"))
    loaded = SelfSpec.from_pretrained(tmp_path / "second")
    generate(model, prompt(), 12, assistant=loaded)
    train_a_step(model)
    assert_lossless(model, loaded)


def test_cache_files_of_one_model_get_nothing_of_another(tmp_path: Path, no_warnings_yet: None) -> None:
    """A model that has been trained is another one."""
    model, spec = tiny_llama(LAYERS), SelfSpec(cache_dir=tmp_path)
    generate(model, prompt(), 16, assistant=spec)
    spec._knowledge_of(model).write(0.0)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    train_a_step(model)
    generate(model, prompt(seed=6), 16, assistant=spec)
    with pytest.warns(UserWarning, match="have changed since this SelfSpec began.*save_pretrained"):
        _write_rest()
    assert files
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == files


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.parametrize("draft", [Lookup(), SEARCHES["begun"].draft], ids=["texts", "search"])
def test_a_write_that_failed_is_tried_again_at_the_end(
    draft: Any, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SelfSpec(draft, cache_dir=tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        with pytest.warns(UserWarning, match="not kept on disk: .*No space left"):
            generate(llama, prompt(), 20, assistant=spec)
    assert not list(tmp_path.rglob("*.json"))
    _write_rest()
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["findings"]
    assert not spec._knowledge.unwritten


def test_a_call_leaves_a_write_to_another_thread(llama: PreTrainedModel, tmp_path: Path) -> None:
    """And what it has found to the next call, or the end."""
    spec = fresh(SEARCHES["begun"], cache_dir=tmp_path)
    file = spec._knowledge_of(llama)._file(Key((False, False), ""))
    assert file is not None
    with locked(file.path, 0.0):
        generate(llama, prompt(), 20, assistant=spec)
    assert not list(tmp_path.rglob("*.json"))
    assert spec._knowledge.unwritten
    generate(llama, prompt(), 4, assistant=spec)
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert not spec._knowledge.unwritten
