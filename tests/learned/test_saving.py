"""What was learned lasts: folders and cache files, whose findings they hold, what is used, forgotten and refused."""

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
from unittest.mock import DEFAULT, Mock

import peft
import pytest
import torch
from filelock import FileLock
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from helpers.models import ragged_batch, tiny_gpt2, tiny_llama
from helpers.searches import FILE, SEARCHES, assert_lossless, begins_with, prompt
from helpers.searches import generated as generate
from hf_selfspec import Adapter, EarlyExitAdapter, LinearProbe, OnTheFlySearch, SelfSpec, TopKTree, attach, errors
from hf_selfspec.drafts import Cascade, EarlyExit, Lookup, SkipLayers
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.suffix import SEPARATOR
from hf_selfspec.drafts.stop import AdaptiveThreshold, ConfidenceThreshold, FixedLength, ProductThreshold
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.learned import knowledge
from hf_selfspec.learned.files import check_folder
from hf_selfspec.model.fingerprint import Fingerprint, samples
from hf_selfspec.tools.methods import read_spec

pytestmark = [pytest.mark.usefixtures("no_grad", "no_warnings_yet"), pytest.mark.machine("verification_is_free")]

FIRST, SECOND, THIRD = (prompt(length=12, seed=seed) for seed in (5, 6, 7))


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(4, factor=0.6)


# Findings ------------------------------------------------------------------------------------------------------------


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
                assert len(kept.store.tokens) or not len(kept.successors._slots), "of texts that were dropped"
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


def test_kinds_of_calls_are_kept_apart(llama: PreTrainedModel, tmp_path: Path) -> None:
    """One that was not made since stays; one that was not met yet begins with the set of another."""
    spec, kinds, choices = replace(SEARCHES["over"]), ({}, {"do_sample": True}), []
    for options in kinds:
        torch.manual_seed(0)
        generate(llama, prompt(), 24, assistant=spec, **options)
        choices.append(spec.choice(llama))
    assert choices[0] != choices[1]
    spec.save_pretrained(tmp_path)
    for which in (1, 0):
        loaded = SelfSpec.from_pretrained(tmp_path)
        generate(llama, prompt(), 2, assistant=loaded, **kinds[which])
        assert loaded.choice(llama) == choices[which]
        loaded.save_pretrained(tmp_path)  # with what it was not used for
    generate(llama, prompt(2), 2, assistant=loaded)
    assert loaded.stats.plan in {choice.plan.picture() for choice in choices}
    assert loaded.stats.phase == "optimization"


def test_findings_are_of_one_model(llama: PreTrainedModel, tmp_path: Path) -> None:
    """One that has been trained is another; what was loaded goes on in training."""
    spec, small, trained = replace(SEARCHES["over"]), tiny_llama(6), copy.deepcopy(llama)
    for model in (llama, small):
        generate(model, prompt(), 20, assistant=spec)
    with pytest.raises(SettingError, match=r"save_pretrained: this SelfSpec has drafted for 2 models.*`model`"):
        spec.save_pretrained(tmp_path)
    with pytest.raises(SettingTypeError, match="Linear"):
        spec.save_pretrained(tmp_path, torch.nn.Linear(2, 2))
    spec.save_pretrained(tmp_path, llama)
    in_training, cached = SelfSpec.from_pretrained(tmp_path), SelfSpec(Lookup(), cache_dir=tmp_path / "cache")
    for ids in (FIRST, SECOND):
        assert_lossless(trained, in_training)
        call(trained, cached, ids)
        for parameter in trained.parameters():
            parameter.data.mul_(1.01)
    assert texts_in(tmp_path / "cache") == [0]
    for other, words in (
        (trained, "other weights"),
        (small, "4 layers, not of 6"),
        (tiny_llama(4, vocabulary=98), "other names or shapes"),
        (tiny_gpt2(512), "a LlamaForCausalLM, not a GPT2LMHeadModel"),
    ):
        loaded = SelfSpec.from_pretrained(tmp_path)
        with pytest.raises(SettingError, match=words):
            loaded.save_pretrained(tmp_path / "other", other)
        handle = other.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
        with pytest.raises(SettingError, match=words) as error:
            generate(other, prompt(), 5, assistant=loaded)
        assert str(tmp_path / FILE) in str(error.value)
        handle.remove()
    assert not (tmp_path / "other").exists()
    assert_lossless(llama, loaded)
    assert loaded.choice(llama).plan == spec.choice(llama).plan


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

    @torch.no_grad()
    def task(index: int) -> None:
        spec = own if index == 2 else shared_one
        for turn in range(3):
            which = (index + turn) % 3
            assert torch.equal(generate(llama, prompts[which], 12, assistant=spec), expected[which])
            knowledge.write_all()
            if (index, turn) == (0, 1):
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


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the file system of processes")
@pytest.mark.filterwarnings("ignore")
def test_the_memory_of_a_service_stays(tmp_path: Path) -> None:
    model, used = tiny_llama(2), list[int]()
    attach(model, SelfSpec(cache_dir=tmp_path))
    for number in range(3000):
        options = {"num_beams": 2 + number % 5} if number % 9 == 8 else {"do_sample": number % 5 == 4}
        lengths = tuple(4 + (number + row) % 9 for row in range(1 + number % 7 // 6))
        model.generate(**ragged_batch(lengths, seed=number), max_new_tokens=2 + number % 3, **options)
        used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
    assert used[-1] - used[300] < 20, "MiB"
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_models_are_let_go_and_what_was_learned_of_them_is_written(tmp_path: Path) -> None:
    spec, model = SelfSpec(cache_dir=tmp_path), tiny_llama()
    for ids in (FIRST, SECOND, THIRD):
        call(model, spec, ids, writes=False)
    alive = weakref.ref(model)
    del model, spec
    gc.collect()
    assert alive() is None
    assert texts_in(tmp_path) == [0]
    knowledge.write_all()
    assert texts_in(tmp_path) == [0, 1, 2]


def test_a_model_that_is_gone_is_known_when_it_comes_again(tmp_path: Path) -> None:
    """Though nothing was written yet, and its texts can be forgotten."""
    for texts in ((FIRST, SECOND), (THIRD,)):
        spec, model = SelfSpec(Lookup(), cache_dir=tmp_path), tiny_llama(4)
        assert [call(model, spec, ids, writes=False) for ids in texts]
        del model
        gc.collect()
    knowledge.write_all()
    assert texts_in(tmp_path) == [0, 1, 2]
    (file,) = tmp_path.rglob("*.json")
    file.unlink()
    with FileLock(f"{file}.lock"):  # so that nothing is written
        call(tiny_llama(4), spec := SelfSpec(Lookup(), cache_dir=tmp_path), writes=False)
    gc.collect()
    spec.forget()
    knowledge.write_all()
    assert texts_in(tmp_path) == []


def test_what_is_kept_of_warnings_is_bounded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(5000):
            errors.warn_once(f"warning {number}")
    assert len(errors.issued) <= 1024
    errors.warn_once("warning 4999")  # would be an error


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_fingerprints() -> None:
    """A cast is the same model, one other weight is not, and weights that cannot be read do not set models apart."""
    model = tiny_llama(4)
    own = Fingerprint.of_decoder(model)
    assert own.difference(Fingerprint.of_decoder(copy.deepcopy(model).to(torch.bfloat16))) == ""
    other = copy.deepcopy(model)
    other.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1.0
    assert "weights" in own.difference(Fingerprint.of_decoder(other))
    model.model.layers[2].to("meta")  # as offloaded ones are
    unknown = Fingerprint.of_decoder(model)
    assert unknown.weights is None
    assert own.difference(unknown) == unknown.difference(own) == ""
    assert "shapes" in unknown.difference(Fingerprint.of_decoder(tiny_llama(4, vocabulary=98)))
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    models = [peft.get_peft_model(base, settings) for base in [tiny_llama(4), tiny_llama(4)]]  # with other adapters
    adapted = [Fingerprint.of_decoder(model.get_base_model()) for model in models]
    assert "weights" in adapted[0].difference(adapted[1]), "an adapter belongs to the model"


def test_fingerprints_of_weights_in_eight_bits() -> None:
    """Beside others in bfloat16, in all such dtypes of numbers that torch has."""
    dtypes = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.itemsize == 1]
    dtypes = [dtype for dtype in dtypes if dtype.is_floating_point or dtype in (torch.int8, torch.uint8)]
    assert torch.float8_e4m3fn in dtypes
    beside = torch.ones(4, dtype=torch.bfloat16)
    for dtype in dtypes:
        weights = [torch.full((8, 8), number, dtype=torch.uint8).view(dtype) for number in (1, 2)]
        first, second = (samples([weight, beside]) for weight in weights)
        assert not torch.equal(first, second), dtype
    # Whole numbers of this size are not all in single precision.
    assert samples([torch.zeros(1).expand(151936 * 896)]).tolist() == [0.0] * 8


# Settings and places -------------------------------------------------------------------------------------------------

SPECS = (
    SelfSpec(),
    SelfSpec(EarlyExit(3), FixedLength(4), max_draft=7),
    SelfSpec.layerskip(stop=AdaptiveThreshold(ProductThreshold(0.6), 0.7)),
    SelfSpec(SkipLayers((1, 2), ()), tree=TopKTree(((0.6, 3), (1.0, 2)))),
    SelfSpec.swift(0.4, OnTheFlySearch(8, 9, 3, 7, 0.9, 0.2, 5), tree=TopKTree()),
    SelfSpec(SkipLayers((3,), (4,), OnTheFlySearch(8, 9, 3)), tree=TopKTree()),
    SelfSpec(Cascade([Lookup(9), EarlyExit(2)]), AdaptiveThreshold(target=0.3), exact=True, trust=True),
)


def test_settings_come_back(tmp_path: Path) -> None:
    for number, spec in enumerate(SPECS):
        folder = tmp_path / str(number) / "b"
        spec.save_pretrained(folder)
        assert [path.name for path in folder.iterdir()] == [FILE]
        loaded = SelfSpec.from_pretrained(folder)
        assert loaded == spec
        assert repr(loaded) == repr(spec)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    for settings, words in (
        ({"stop": lambda *_: torch.zeros(1, dtype=torch.bool)}, r"SelfSpec\(stop\) is <function "),
        ({"stop": type("FixedLength", (ConfidenceThreshold,), {})()}, r"SelfSpec\(stop\) is "),
        ({"draft": CandidateGenerator()}, r"SelfSpec\(draft\) is .*CandidateGenerator object"),
    ):
        for use in (
            SelfSpec(**settings).save_pretrained,
            lambda at, settings=settings: SelfSpec(**settings, cache_dir=at),
        ):
            with pytest.raises(SettingError, match=f"{words}.*cannot be saved.*set it again after loading"):
                use(tmp_path)
    assert not list(tmp_path.iterdir())


NO_PLACE = "neither the whole path of a folder nor the name of a repository"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cache_dir": "/elsewhere"}, "it sets cache_dir, which a file cannot set. It may set draft, "),
    ({"draft": {"class": "SkipLayers", "search": {"class": "OnTheFlySearch", "folder": "a"}}}, "argument 'folder'"),
    ({"draft": {"class": "FixedLength", "num_tokens": 3}}, r"SelfSpec\(draft\) must be EarlyExit"),
    ({"draft": {"class": "Cascade", "sources": [{"class": "FixedLength", "num_tokens": 3}]}}, "Cascade"),
    ({"stop": {"class": "ConfidenceThreshold", "confidence": {"class": "system"}}}, "stop.confidence has the class"),
    ({"max_draft": 10**6}, "max_draft. must be at most 1024, got 1000000"),
    ({"draft": []}, "draft"),
    *(
        ({"draft": {"class": "DynamicExit", "heads": place}}, NO_PLACE)
        for place in ("../heads", "~/heads", "https://example.com/a", r"\\a\b")
    ),
    ({"draft": {"class": "EarlyExitAdapter", "adapter": None}}, "must be Adapter or the path of a saved one, got None"),
]


def test_settings_that_a_file_cannot_set(tmp_path: Path) -> None:
    usual = {"draft": {"class": "EarlyExit", "layer": 3}, "stop": None, "tree": None, "max_draft": 9}
    for settings, words in WRONG:
        content = {"format": 1, "settings": usual | settings, "fingerprint": None, "findings": {}, "stamp": ""}
        (tmp_path / FILE).write_text(json.dumps(content))
        with pytest.raises(SettingError, match=words) as error:
            SelfSpec.from_pretrained(tmp_path)
        assert str(tmp_path / FILE) in str(error.value)


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder goes on loading elsewhere; ``~`` is the user's home, and no folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Adapter(2, 64, 4).save_pretrained("adapter")
    spec = SelfSpec.kangaroo("adapter")
    spec.save_pretrained("~/spec")
    monkeypatch.chdir("/")
    assert SelfSpec.from_pretrained("~/spec") == read_spec("~/spec") == spec
    assert spec.draft.adapter == str(tmp_path / "here" / "adapter")
    Adapter(2, 64, 4).save_pretrained("~/adapter")
    assert EarlyExitAdapter("~/adapter").adapter == str(tmp_path / "home" / "adapter")
    check_folder("--out", "~/spec")
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"spec", "adapter"}


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/out", "a" * 300):
        for save in (
            SelfSpec().save_pretrained,
            Adapter(2, 64, 4).save_pretrained,
            lambda at: check_folder("--out", at),
        ):
            with pytest.raises(SettingError, match=r"can(not)? be written|File name too long") as error:
                save(tmp_path / place)
            assert str(tmp_path / place) in str(error.value)
    with pytest.raises(SettingError, match="--out is empty"):
        check_folder("--out", "")
    check_folder("--out", tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("place", ["json.dump", "os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_the_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point: in the middle of a file, before it is on the disk, before it takes the old one's place."""
    SelfSpec().save_pretrained(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    for error, told in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), SettingError)):
        monkeypatch.setattr(place, Mock(side_effect=error))
        with pytest.raises(told, match=r"No space left|^$"):
            SelfSpec(EarlyExit(3)).save_pretrained(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {FILE: before}


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_part_whose_saving_was_interrupted(done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that was there, the new one, or an error: never the settings of one with the weights of another."""
    first, second = (LinearProbe(2, 64, about={"recipe": {"number": number}}) for number in (1, 2))
    torch.nn.init.ones_(second.direction.weight)
    first.save_pretrained(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", Mock(side_effect=[*[DEFAULT] * done, KeyboardInterrupt], wraps=os.replace))
        with pytest.raises(KeyboardInterrupt):
            second.save_pretrained(tmp_path)
    if done:
        with pytest.raises(SettingError, match=r"config\.json and model\.safetensors are not of one save"):
            LinearProbe.from_pretrained(tmp_path)
    else:
        loaded = LinearProbe.from_pretrained(tmp_path)
        assert (loaded.about, loaded.digest) == (first.about, first.digest)
    second.save_pretrained(tmp_path)
    assert LinearProbe.from_pretrained(tmp_path).digest == second.digest != first.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
