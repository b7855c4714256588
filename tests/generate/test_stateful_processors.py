"""Logits processors and stopping criteria that keep a state are called exactly as plain ``generate`` calls them."""

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import hf_selfspec
from helpers.calls import PAST, Counting
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.processes import peft_calls_old_name
from helpers.sampling import SPECS as SAMPLED
from helpers.sampling import check_exact, exact_joint, llama, sample
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, TopKTree
from hf_selfspec.drafts import stateless
from hf_selfspec.drafts.stateless import is_stateless
from hf_selfspec.errors import SettingTypeError, UnsupportedModelError

MODEL = tiny_llama(4, factor=0.5)
END = 50

SPECS: dict[str, Callable[[], SelfSpec]] = {
    "exit": lambda: SelfSpec(EarlyExit(3), FixedLength(4)),
    "exit, tree": lambda: SelfSpec(EarlyExit(3), FixedLength(4), TopKTree(((0.5, 3), (1.0, 2)))),
}
ROW, BATCH = ragged_batch((12,), seed=11), ragged_batch((4, 9, 6))


class AfterCalls(StoppingCriteria):
    """Ends each row after a number of calls of its own, whatever the text is."""

    def __init__(self, calls: list[int]) -> None:
        self.calls, self.seen = torch.tensor(calls), []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return len(self.seen) >= self.calls[: len(input_ids)]


def texts(spec: SelfSpec | None, inputs: Any, make: Any = Counting, **options: Any) -> Any:
    """Ids with a new processor, and the processor."""
    processor = make()
    options = {"max_new_tokens": 16, "do_sample": False, "logits_processor": [processor]} | options
    return MODEL.generate(**inputs, **options, assistant=spec), processor


@pytest.mark.parametrize("beside", [True, False], ids=["beside a processor", "alone"])
def test_a_criterion_ends_in_the_middle_of_accepted_tokens(beside: bool) -> None:
    model, spec = tiny_llama(factor=0.01), SelfSpec(EarlyExit(3), FixedLength(4))
    for count in (2, 5, 8):
        found = []
        for assistant in (None, spec):
            criterion, processors = AfterCalls([count]), [Counting()] if beside else []
            options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": processors}
            ids = model.generate(**ROW, **options, stopping_criteria=[criterion], assistant=assistant)
            found.append((ids.tolist(), [one.seen for one in processors], criterion.seen))
        assert found[0] == found[1]
        assert len(found[0][2]) == count
    assert beside or spec.stats.acceptance_rate > 0.7, "ends have to fall into accepted blocks"


def test_a_prefix_function_is_called_for_each_emitted_token_alone() -> None:
    found = []
    for spec in (None, SPECS["exit"]()):
        calls: list[tuple[int, list[int]]] = []

        def allowed(row: int, ids: torch.Tensor, calls: list[Any] = calls) -> list[int]:
            calls.append((row, ids.tolist()))
            return list(range(2 + (row + len(calls)) % 3, VOCABULARY, 3))

        options = {"max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed}
        found.append((MODEL.generate(**BATCH, **options, assistant=spec).tolist(), calls))
    assert found[0] == found[1]


class Declared(Counting):
    is_stateless = True


class Registered(lp.TemperatureLogitsWarper):
    pass


def test_what_is_stateless() -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [row]

    def of(function: Any) -> lp.PrefixConstrainedLogitsProcessor:
        return lp.PrefixConstrainedLogitsProcessor(function, num_beams=1)

    assert is_stateless(lp.TemperatureLogitsWarper(0.5))
    assert is_stateless(Declared())
    assert not is_stateless(Counting())
    assert not is_stateless(lambda ids, scores: scores)
    assert not is_stateless(lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, MODEL))
    assert not is_stateless(of(allowed))
    allowed.is_stateless = True
    assert is_stateless(of(allowed))
    assert not is_stateless(Registered(0.5))
    hf_selfspec.register_stateless(Registered)
    assert is_stateless(Registered(0.5))
    with pytest.raises(SettingTypeError, match=r"takes a class.*is_stateless"):
        hf_selfspec.register_stateless(Registered(0.5))


def test_a_declared_processor_is_called_for_drafts() -> None:
    _, processor = texts(SPECS["exit"](), ROW, Declared)
    assert len(processor.seen) > 20


def test_statistics_name_what_rows_advance_together_for() -> None:
    for inputs, words in ((ROW, ""), (BATCH, "Counting, AfterCalls")):
        spec = SPECS["exit"]()
        texts(spec, inputs, stopping_criteria=[AfterCalls([30, 30, 30])])
        assert spec.stats.together_for == words
        assert ("since Counting, AfterCalls may keep a state" in str(spec.stats)) == bool(words)


def test_only_what_is_known_is_stateless() -> None:
    """All that generate makes for a decoder-only model, but for two; a class that is new to us is not trusted."""
    known = {kind.__name__ for kind in stateless._registered}
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    made = set(re.findall(r"\b(\w+(?:LogitsProcessor|LogitsWarper|LengthPenalty|LogitNormalization))\(", source))
    others = {
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",  # as its function is
    }
    assert {"TopPLogitsWarper", "MinLengthLogitsProcessor"} <= made
    assert made - known == others & made
    assert not is_stateless(lp.DiaEOSDelayPatternLogitsProcessor([1, 2], 1, 16))


# What others' functions do to the ids, or the model, between two tokens.
Change = Callable[[Any, torch.Tensor], object]


def writes(ids: torch.Tensor, column: int) -> None:
    """Into the first row, and where the ids are padding."""
    if ids.dim() > 1 and ids.shape[1] % 5 == 0:
        ids[:1, column] = 9
        ids[ids[:, -1] == 0, -1] = 12


def hooks(model: Any, ids: torch.Tensor) -> None:
    """Adds a hook that steers the last token where there is none, and removes it again."""
    layer = model.get_base_model().model.layers[1]
    if ids.flatten()[-1] % 4 == 0:
        hook = layer._forward_hooks and layer._forward_hooks.popitem()
        assert hook or layer.register_forward_hook(steered)


def steered(layer: Any, args: Any, states: torch.Tensor) -> torch.Tensor:
    return torch.cat([states[:, :-1], states[:, -1:].flip(-1)], dim=1)


CHANGES: dict[str, Change] = {
    "writes a token": lambda model, ids: writes(ids, -1),
    "writes earlier tokens": lambda model, ids: writes(ids, -3),
    "hooks": hooks,
    "adapter": lambda model, ids: model.set_adapter("other" if ids.flatten()[-1] % 3 == 0 else "default"),
    "scale": lambda model, ids: scale(model, 8.0 if ids.flatten()[-1] % 3 == 0 else 2.0),
}


def scale(model: Any, factor: float) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.scaling["default"] = factor


class Between:
    """A processor, criterion or streamer that changes something, and keeps what it is called with."""

    def __init__(self, model: Any, change: Change) -> None:
        self.model, self.change, self.seen = model, change, list[Any]()

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())
        self.change(self.model, value)

    def end(self) -> None:
        self.seen.append("end")


class BetweenScores(Between):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put(input_ids)
        return scores


class BetweenTokens(Between):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.put(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


WHERE = {"logits_processor": BetweenScores, "stopping_criteria": BetweenTokens, "streamer": Between}


@peft_calls_old_name
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", WHERE)
def test_what_changes_between_two_tokens(where: str, change: str) -> None:
    """Has its effect on the next token, as in plain ``generate``."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    for inputs, name in itertools.product((ROW, BATCH), SPECS):
        found = []
        for assistant in (None, SPECS[name]()):
            torch.manual_seed(0)
            model = peft.get_peft_model(tiny_llama(4, factor=0.5), config).eval()
            model.add_adapter("other", config)
            watching = WHERE[where](model, CHANGES[change])
            function = watching if where == "streamer" else [watching]
            options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [83, 75], where: function}
            ids = model.generate(
                **{name: each.clone() for name, each in inputs.items()}, **options, assistant=assistant
            )
            found.append((ids.tolist(), watching.seen))
        assert found[0] == found[1]
        assert assistant.stats.accepted > 0


def test_a_hook_that_is_added_and_reads_the_cache() -> None:
    """Its keys are not those of plain ``generate``."""
    model = tiny_llama(4, factor=0.5)

    def add(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        attention = model.model.layers[0].self_attn
        attention.register_forward_hook(lambda _, args, kwargs, output: kwargs[PAST].layers[0].keys, with_kwargs=True)
        return scores

    with pytest.raises(UnsupportedModelError, match="reads the keys in the cache"):
        model.generate(**ROW, max_new_tokens=8, logits_processor=[add], assistant=SPECS["exit"]())


class SoftLimit(MaxLengthCriteria):
    """Ends rows at an even token behind the limit."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 2 == 0) & (input_ids.shape[1] > self.max_length)


class LateEnd(EosTokenCriteria):
    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > 20)


class Shifted(lp.PrefixConstrainedLogitsProcessor):
    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids, scores).roll(1, -1)


@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["row", "batch"])
@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [SoftLimit(16)]},
        {"stopping_criteria": [LateEnd(list(range(2, 40)))]},
        {"logits_processor": [Shifted(lambda row, ids: list(range(2 + row, VOCABULARY, 3)), 1)]},
    ],
    ids=["limit", "end", "prefix function"],
)
def test_classes_that_derive_from_those_of_transformers(inputs: Any, options: Any) -> None:
    options = {"max_new_tokens": 24, "logits_processor": []} | options
    plain, ours = (texts(spec, inputs, **options)[0] for spec in (None, SPECS["exit"]()))
    assert torch.equal(ours, plain)


class Tightening(LogitsProcessor):
    """A temperature that falls with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores * (1.0, 0.5, 1.5, 0.8)[self.calls - 1]


class TighteningByLength(LogitsProcessor):
    """The same, told by the length of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * (1.0, 0.5, 1.5, 0.8)[input_ids.shape[1] - 1]


@pytest.mark.every_run("early exit-8")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", SAMPLED)
def test_drawn_tokens_are_exact(name: str, rows: int) -> None:
    spec, sequences, accepted, drafted = SAMPLED[name], [], 0, 0
    for seed in range(240 // rows):
        sequences.append(sample(spec, rows=rows, seed=seed, logits_processor=[Tightening()])[0])
        accepted, drafted = accepted + spec.stats.accepted, drafted + spec.stats.drafted
    check_exact((torch.cat(sequences), accepted / drafted), exact_joint(llama(), [TighteningByLength()]))
