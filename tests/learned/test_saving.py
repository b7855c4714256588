"""What was learned lasts: folders, whose findings they hold, and what is refused."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import peft
import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from helpers.models import tiny_gpt2, tiny_llama
from helpers.searches import FILE, LAYERS, SEARCHES, assert_lossless, prompt
from helpers.searches import generated as generate
from hf_selfspec import Adapter, EarlyExitAdapter, LinearProbe, OnTheFlySearch, SelfSpec, TopKTree
from hf_selfspec.drafts import Cascade, EarlyExit, Lookup, SkipLayers
from hf_selfspec.drafts.stop import AdaptiveThreshold, ConfidenceThreshold, FixedLength, ProductThreshold
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.learned import knowledge
from hf_selfspec.learned.files import check_folder
from hf_selfspec.model.fingerprint import Fingerprint, samples
from hf_selfspec.tools.methods import read_spec

pytestmark = pytest.mark.usefixtures("no_grad")

SPECS = (
    SelfSpec(),
    SelfSpec(EarlyExit(3), FixedLength(4), max_draft=7),
    SelfSpec.layerskip(stop=AdaptiveThreshold(ProductThreshold(0.6), 0.7)),
    SelfSpec(SkipLayers((1, 2), ()), tree=TopKTree(((0.6, 3), (1.0, 2)))),
    SelfSpec.swift(0.4, OnTheFlySearch(8, 9, 3, 7, 0.9, 0.2, 5), tree=TopKTree()),
    SelfSpec(SkipLayers((3,), (4,), OnTheFlySearch(8, 9, 3)), tree=TopKTree()),
    SelfSpec(Cascade([Lookup(9), EarlyExit(2)]), AdaptiveThreshold(target=0.3), exact=True, trust=True),
)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(LAYERS, factor=0.6)


def test_settings_come_back(tmp_path: Path) -> None:
    for number, spec in enumerate(SPECS):
        folder = tmp_path / str(number) / "b"
        spec.save_pretrained(folder)
        assert [path.name for path in folder.iterdir()] == [FILE]
        loaded = SelfSpec.from_pretrained(folder)
        assert loaded == spec
        assert repr(loaded) == repr(spec)


def test_kinds_of_calls_are_kept_apart(llama: PreTrainedModel, tmp_path: Path) -> None:
    """One that was not made since stays; one that was not met yet begins with the set of another."""
    spec, kinds = replace(SEARCHES["over"]), ({}, {"do_sample": True})
    choices = []
    for options in kinds:
        torch.manual_seed(0)
        generate(llama, prompt(), 24, assistant=spec, **options)
        choices.append(spec.choice(llama))
    assert choices[0] != choices[1]
    spec.save_pretrained(tmp_path)
    for options, choice in zip(reversed(kinds), reversed(choices), strict=True):
        loaded = SelfSpec.from_pretrained(tmp_path)
        generate(llama, prompt(), 2, assistant=loaded, **options)
        assert loaded.choice(llama) == choice
        loaded.save_pretrained(tmp_path)  # with what it was not used for
    generate(llama, prompt(2), 2, assistant=loaded)
    assert loaded.stats.plan in {choice.plan.picture() for choice in choices}
    assert loaded.stats.phase == "optimization"


def test_findings_are_of_one_model(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Also one that has been trained is another; what was loaded goes on in training."""
    spec, small, trained = replace(SEARCHES["over"]), tiny_llama(4), copy.deepcopy(llama)
    for model in (llama, small):
        generate(model, prompt(), 20, assistant=spec)
    with pytest.raises(SettingError, match=r"save_pretrained: this SelfSpec has drafted for 2 models.*`model`"):
        spec.save_pretrained(tmp_path)
    with pytest.raises(SettingTypeError, match="Linear"):
        spec.save_pretrained(tmp_path, torch.nn.Linear(2, 2))
    spec.save_pretrained(tmp_path, llama)
    in_training = SelfSpec.from_pretrained(tmp_path)
    assert_lossless(trained, in_training)
    train_a_step(trained)
    assert_lossless(trained, in_training)
    for other, words in (
        (trained, "other weights"),
        (small, "6 layers, not of 4"),
        (tiny_llama(LAYERS, vocabulary=98), "other names or shapes"),
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


@torch.no_grad()
def train_a_step(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.01)


def test_a_cache_file_of_a_model_gets_nothing_of_the_trained_one(tmp_path: Path) -> None:
    model, spec = tiny_llama(LAYERS), SelfSpec(cache_dir=tmp_path)
    contents = []
    for ids in (prompt(), prompt(seed=6)):
        generate(model, ids, 24, assistant=spec)
        knowledge.write_all()
        contents.append({file.name: file.read_bytes() for file in tmp_path.rglob("*.json")})
        train_a_step(model)
    assert contents[0] == contents[1] != {}


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
    adapted = []
    for seed in (0, 1):
        base = tiny_llama(4)
        torch.manual_seed(seed)
        adapted.append(Fingerprint.of_decoder(peft.get_peft_model(base, settings).get_base_model()))
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
    ({"draft": {"class": "SkipLayers", "search": {"class": "TopKTree"}}}, "SkipLayers"),
    ({"draft": {"class": "Cascade", "sources": [{"class": "FixedLength", "num_tokens": 3}]}}, "Cascade"),
    ({"stop": {"class": "ConfidenceThreshold", "confidence": {"class": "system"}}}, "stop.confidence has the class"),
    ({"stop": {"class": "AdaptiveThreshold", "rule": {"class": "Lookup"}}}, "AdaptiveThreshold"),
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
        for part in (SelfSpec(), Adapter(2, 64, 4)):
            with pytest.raises(SettingError, match=r"cannot be written|File name too long") as error:
                part.save_pretrained(tmp_path / place)
            assert str(tmp_path / place) in str(error.value)
        with pytest.raises(SettingError, match=r"--out .*nothing can be written there"):
            check_folder("--out", tmp_path / place)
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
            LinearProbe.load(tmp_path)
    else:
        loaded = LinearProbe.load(tmp_path)
        assert (loaded.about, loaded.digest) == (first.about, first.digest)
    second.save_pretrained(tmp_path)
    assert LinearProbe.load(tmp_path).digest == second.digest != first.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
