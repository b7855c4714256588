"""What was learned lasts: folders, whose findings they hold, and what is refused."""

import copy
import json
import operator
import pickle
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from helpers.findings import FILE, LAYERS, SEARCHES, assert_lossless, begins_with, fresh, generate, prompt
from helpers.models import tiny_gpt2, tiny_llama
from hf_selfspec import OnTheFlySearch, SelfSpec, TopKTree
from hf_selfspec.drafts import Cascade, EarlyExit, Lookup, SkipLayers
from hf_selfspec.drafts.stop.adaptive import AdaptiveThreshold
from hf_selfspec.drafts.stop.calibrated import CalibratedEntropy
from hf_selfspec.drafts.stop.rules import ConfidenceThreshold, FixedLength, ProductThreshold
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.model.fingerprint import Fingerprint, samples

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(LAYERS, factor=0.6)


@pytest.mark.parametrize(
    "spec",
    [
        SelfSpec(),
        SelfSpec(EarlyExit(3), FixedLength(4), max_draft=7),
        SelfSpec.layerskip(stop=AdaptiveThreshold(ProductThreshold(0.6), 0.7)),
        SelfSpec(SkipLayers((1, 2), ()), tree=TopKTree(((0.6, 3), (1.0, 2)))),
        SelfSpec.swift(0.4, OnTheFlySearch(8, 9, 3, 7, 0.9, 0.2, 5), tree=TopKTree()),
        SelfSpec(SkipLayers((3,), (4,), OnTheFlySearch(8, 9, 3)), tree=TopKTree()),
        SelfSpec(Cascade([Lookup(9), EarlyExit(2)]), CalibratedEntropy(0.3)),
    ],
    ids=["default", "exit", "probe", "skip", "swift", "search from a set", "cascade"],
)
def test_settings_come_back(spec: SelfSpec, tmp_path: Path) -> None:
    spec.save_pretrained(tmp_path / "a" / "b")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [FILE]
    loaded = SelfSpec.from_pretrained(tmp_path / "a" / "b")
    assert loaded == spec
    assert repr(loaded) == repr(spec)


@pytest.mark.every_run("begun-1")
@pytest.mark.parametrize(("name", "rows"), [("begun", 1), ("ratio given", 2)])
def test_findings_of_a_search_come_back(name: str, rows: int, llama: PreTrainedModel, tmp_path: Path) -> None:
    spec = fresh(SEARCHES[name])
    generate(llama, prompt(rows), 24, assistant=spec)
    choice, phase, found = spec.choice(llama), spec.stats.phase, spec._knowledge.latest(llama)
    assert phase == ("acceleration" if "given" in name else "optimization")
    spec.save_pretrained(tmp_path)
    loaded = SelfSpec.from_pretrained(tmp_path)
    assert begins_with(llama, loaded, rows)[0] == choice
    assert_lossless(llama, loaded, rows=rows)
    again = loaded._knowledge.latest(llama)
    assert len(found.trials) >= 3
    assert list(again.trials)[: len(found.trials)] == list(found.trials)
    assert again.generated > found.generated


def test_kinds_of_calls_are_kept_apart(llama: PreTrainedModel, tmp_path: Path) -> None:
    spec = fresh(SEARCHES["over"])
    choices = []
    for options in ({}, {"do_sample": True}):
        torch.manual_seed(0)
        generate(llama, prompt(), 24, assistant=spec, **options)
        choices.append(spec.choice(llama))
    assert choices[0] != choices[1]
    spec.save_pretrained(tmp_path)
    for options, choice in zip(({"do_sample": True}, {}), reversed(choices), strict=True):
        loaded = SelfSpec.from_pretrained(tmp_path)
        generate(llama, prompt(), 2, assistant=loaded, **options)
        assert loaded.choice(llama) == choice
        loaded.save_pretrained(tmp_path)  # with what it was not used for
    # A kind that was not met yet begins with the set of another.
    generate(llama, prompt(2), 2, assistant=loaded)
    assert loaded.stats.plan in {choice.plan.picture() for choice in choices}
    assert loaded.stats.phase == "optimization"


@torch.no_grad()
def saved_in(folder: Path, spec: SelfSpec, model: PreTrainedModel) -> Path:
    generate(model, prompt(), 24, assistant=spec)
    spec.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished search of the Llama; its file is small."""
    return saved_in(tmp_path_factory.mktemp("saved"), fresh(SEARCHES["over"], tree=TopKTree()), llama)


def test_pickles_begin_with_what_the_file_holds(llama: PreTrainedModel, saved: Path) -> None:
    loaded = SelfSpec.from_pretrained(saved)
    generate(llama, prompt(), 2, assistant=loaded)
    twin = pickle.loads(pickle.dumps(loaded))
    assert twin == loaded
    assert twin.stats is None
    assert begins_with(llama, twin) == (loaded.choice(llama), "acceleration")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tiny_llama(LAYERS, seed=1), "other weights"),
        (lambda: tiny_llama(4), "6 layers, not of 4"),
        (lambda: tiny_llama(LAYERS, vocabulary=98), "other names or shapes"),
        (lambda: tiny_gpt2(512), "a LlamaForCausalLM, not a GPT2LMHeadModel"),
    ],
)
def test_another_model_is_refused_before_work(make: Callable[[], PreTrainedModel], words: str, saved: Path) -> None:
    model, loaded = make(), SelfSpec.from_pretrained(saved)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    with pytest.raises(SettingError, match=words) as error:
        generate(model, prompt(), 5, assistant=loaded)
    assert str(saved / FILE) in str(error.value)


def test_findings_are_not_saved_for_another_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="other weights"):
        SelfSpec.from_pretrained(saved).save_pretrained(tmp_path, tiny_llama(LAYERS, seed=1))
    assert not list(tmp_path.iterdir())


def test_several_models_and_none_named(llama: PreTrainedModel, tmp_path: Path) -> None:
    other, spec = tiny_llama(4), fresh(SEARCHES["over"])
    for model in (llama, other):
        generate(model, prompt(), 20, assistant=spec)
    with pytest.raises(SettingError, match=r"save_pretrained: this SelfSpec has drafted for 2 models.*`model`"):
        spec.save_pretrained(tmp_path)
    spec.save_pretrained(tmp_path, other)
    loaded = SelfSpec.from_pretrained(tmp_path)
    assert_lossless(other, loaded)
    assert loaded.choice(other).plan == spec.choice(other).plan
    with pytest.raises(SettingTypeError, match="Linear"):
        spec.save_pretrained(tmp_path, torch.nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_peft_model(tmp_path: Path) -> None:
    """Its adapter belongs to the model that a file is for."""

    def adapted(seed: int) -> Any:
        base = tiny_llama(LAYERS, factor=0.6)
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(base, settings).eval()

    model, spec = adapted(0), fresh(SEARCHES["over"])
    generate(model, prompt(), 24, assistant=spec)
    spec.save_pretrained(tmp_path, model)
    loaded, same = SelfSpec.from_pretrained(tmp_path), adapted(0)
    assert begins_with(same, loaded) == (spec.choice(model), "acceleration")
    assert_lossless(same, loaded)
    with pytest.raises(SettingError, match="other weights"):
        generate(adapted(1), prompt(), 4, assistant=loaded)


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
    model = tiny_llama(4).to(torch.bfloat16)
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight.to(torch.float8_e4m3fn)
        layer.mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    before = Fingerprint.of_decoder(model)
    model.model.layers[3].mlp.up_proj.weight.data.view(torch.uint8)[0, 0] ^= 1
    assert "weights" in before.difference(Fingerprint.of_decoder(model))


def test_fingerprints_of_large_parameters() -> None:
    """Whole numbers of this size are not all in single precision."""
    assert samples([torch.zeros(1).expand(151936 * 896)]).tolist() == [0.0] * 8


def assert_refused(path: Path, words: str = FILE) -> None:
    with pytest.raises(SettingError, match=words) as error:
        SelfSpec.from_pretrained(path.parent)
    assert str(path) in str(error.value)


def test_files_that_are_something_else(saved: Path, tmp_path: Path) -> None:
    """One that was cut short anywhere, one of other content, none, and a folder in its place."""
    path, content = tmp_path / FILE, (saved / FILE).read_bytes()
    ends = [*range(0, len(content), max(1, len(content) // 30)), len(content) - 1]
    for other in (*(content[:end] for end in ends), b"null", b"{}", b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(other)
        assert_refused(path, "cut short or changed")
    assert_refused(tmp_path / "nowhere" / FILE, r"does not exist.*save_pretrained\(folder\)")
    (tmp_path / "folder" / FILE).mkdir(parents=True)
    assert_refused(tmp_path / "folder" / FILE)


def changed(saved: Path, folder: Path, keys: tuple[Any, ...], value: Any) -> Path:
    content = json.loads((saved / FILE).read_text())
    inner = reduce(operator.getitem, keys[:-1], content)
    inner[keys[-1]] = value
    (folder / FILE).write_text(json.dumps(content))
    return folder / FILE


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("format",), 2, "format 2.*reads format 1"),
        (("settings", "draft", "search", "max_steps"), "many", "max_steps"),
        (("settings",), [], "settings"),
        (("fingerprint",), {}, "model"),
    ],
)
def test_settings_that_do_not_fit(keys: tuple[Any, ...], value: Any, words: str, saved: Path, tmp_path: Path) -> None:
    assert_refused(changed(saved, tmp_path, keys, value), words)


def places(content: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be replaced; of lists the first and the last."""
    if keys:
        yield keys
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*keys, key))
    elif isinstance(content, list) and content:
        for index in sorted({0, len(content) - 1}):
            yield from places(content[index], (*keys, index))


@pytest.mark.parametrize("value", [None, -1, [[0.5]]], ids=repr)
def test_findings_that_do_not_fit(value: Any, saved: Path, llama: PreTrainedModel, tmp_path: Path) -> None:
    """Whatever was changed: the output is that of the model, or one error names the file before any forward."""
    content, plain, refused = json.loads((saved / FILE).read_text()), generate(llama, prompt(), 3), 0
    forwards: list[int] = []
    handle = llama.register_forward_pre_hook(lambda *_: forwards.append(1))
    for keys in places(content["findings"], ("findings",)):
        path = changed(saved, tmp_path, keys, value)
        forwards.clear()
        try:
            found, told = generate(llama, prompt(), 3, assistant=SelfSpec.from_pretrained(tmp_path)), ""
        except SettingError as error:
            found, told = plain, str(error)
        refused += bool(told)
        assert torch.equal(found, plain), keys
        assert not told or (str(path) in told and not forwards), keys
    handle.remove()
    assert refused > 5


def never(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(logits), dtype=torch.bool)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": never}, r"SelfSpec\(stop\) is <function never"),
        ({"stop": type("FixedLength", (ConfidenceThreshold,), {})()}, r"SelfSpec\(stop\) is "),
        ({"draft": CandidateGenerator()}, r"SelfSpec\(draft\) is .*CandidateGenerator object"),
    ],
    ids=["function", "class of the same name", "generator"],
)
def test_what_cannot_be_saved(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    words += ".*cannot be saved.*set it again after loading"
    with pytest.raises(SettingError, match=words):
        SelfSpec(**settings).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingError, match=words):
        SelfSpec(**settings, cache_dir=tmp_path)
