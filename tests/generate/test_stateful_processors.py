"""Logits processors and stopping criteria that keep a state are called exactly as plain ``generate`` calls them."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import hf_selfspec
from helpers.calls import Counting, Recorder
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.processes import peft_calls_old_name
from helpers.sampling import SPECS as SAMPLED
from helpers.sampling import check_exact, exact_joint, llama, sample
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, TopKTree
from hf_selfspec.drafts.scoring import is_stateless
from hf_selfspec.errors import SettingTypeError

MODEL = tiny_llama(4, factor=0.5)

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


# A tokenizer that writes all tokens, and padding, with three letters.
LETTERS = SimpleNamespace(batch_decode=lambda rows: ["".join("abc"[int(token) % 3] for token in row) for row in rows])


class MultiTokenEOSCriteria(StoppingCriteria):
    """Ends all rows at once, when each of them has had a text among its last tokens, as lm-eval's does."""

    __module__ = "lm_eval.models.utils_hf"

    def __init__(self, sequence: str, width: int, rows: int) -> None:
        self.sequence, self.tokenizer, self.initial_decoder_input_length = sequence, LETTERS, width
        self.sequence_id_len, self.done_tracker = len(sequence) + 2, [False] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        last = input_ids[:, self.initial_decoder_input_length :][:, -self.sequence_id_len :]
        found = [self.sequence in text for text in self.tokenizer.batch_decode(last)]
        self.done_tracker = [before or now for before, now in zip(self.done_tracker, found, strict=True)]
        return all(self.done_tracker)


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


@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["row", "batch"])
def test_rows_keep_their_own_pace_with_the_criterion_of_lm_eval(inputs: dict[str, torch.Tensor]) -> None:
    """If tokens end rows, too, and nothing else does, and the cache is not handed back. A row that ends earlier has
    padding, which may be the text."""
    model, width, ends = tiny_llama(factor=0.05), inputs["input_ids"].shape[1], set[int]()
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, width:]
    for sequences, end in product((["a"], ["ab"], ["bc"], ["aaa"], ["cc", "ba", "abb"]), (None, int(plain[-1, 7]))):
        found = list[Any]()
        for assistant in (None, spec := SelfSpec(EarlyExit(3), FixedLength(4))):
            criteria = [MultiTokenEOSCriteria(sequence, width, len(plain)) for sequence in sequences]
            options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
            ids = model.generate(**inputs, **options, stopping_criteria=criteria, assistant=assistant)
            found.append((ids.tolist(), [criterion.done_tracker for criterion in criteria]))
        assert found[0] == found[1], (sequences, end)
        assert len(plain) == 1 or bool(spec.stats.together_for) is (end is None)
        assert spec.stats.accepted or len(found[0][0][0]) < width + 5
        ends.add(len(found[0][0][0]))
    assert len(ends) > 3, ends
    beside = AfterCalls([9, 8, 7])
    beside.is_stateless = True
    for more in ({"return_dict_in_generate": True}, {"stopping_criteria": [*criteria, beside]}):
        model.generate(**inputs, **options | {"stopping_criteria": criteria} | more, assistant=spec)
        assert len(plain) == 1 or spec.stats.together_for.startswith("MultiTokenEOSCriteria")


def test_statistics_name_what_rows_advance_together_for() -> None:
    for inputs, words in ((ROW, ""), (BATCH, "Counting, AfterCalls")):
        spec = SPECS["exit"]()
        texts(spec, inputs, stopping_criteria=[AfterCalls([5, 5, 5])])
        assert spec.stats.together_for == words
        assert ("since Counting, AfterCalls may keep a state" in str(spec.stats)) == bool(words)


def every_third(row: int, ids: torch.Tensor) -> list[int]:
    return list(range(2 + row % 3, VOCABULARY, 3))


def test_a_prefix_function_is_called_for_each_emitted_token_alone() -> None:
    found: list[Any] = []
    for spec in (None, SPECS["exit"]()):
        calls: list[tuple[int, list[int]]] = []

        def allowed(row: int, ids: torch.Tensor, calls: list[Any] = calls) -> list[int]:
            calls.append((row, ids.tolist()))
            return every_third(row + len(calls), ids)

        found.append((texts(spec, BATCH, prefix_allowed_tokens_fn=allowed)[0].tolist(), calls))
    assert found[0] == found[1]


Declared = type("Declared", (Counting,), {"is_stateless": True})
Registered = type("Registered", (lp.TemperatureLogitsWarper,), {})


def test_what_is_stateless() -> None:
    """What is known or declared, of all that generate makes for a decoder-only model; no class that is new to us. It is
    called for drafts."""
    assert len(texts(SPECS["exit"](), ROW, Declared)[1].seen) > 20

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [row]

    def judged() -> list[bool]:
        constrained = lp.PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
        return [is_stateless(each) for each in (constrained, Registered(0.5))]

    assert is_stateless(lp.TemperatureLogitsWarper(0.5))
    assert is_stateless(Declared())
    guidance = lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, MODEL)
    for other in (Counting(), len, guidance, lp.DiaEOSDelayPatternLogitsProcessor([1, 2], 1, 16)):
        assert not is_stateless(other)
    assert judged() == [False, False]
    allowed.is_stateless = True
    hf_selfspec.register_stateless(Registered)
    assert judged() == [True, True]
    with pytest.raises(SettingTypeError, match=r"takes a class.*is_stateless"):
        hf_selfspec.register_stateless(Registered(0.5))
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    made = set(re.findall(r"\b(\w+(?:LogitsProcessor|LogitsWarper|LengthPenalty|LogitNormalization))\(", source))
    assert {"TopPLogitsWarper", "MinLengthLogitsProcessor"} <= made
    made -= {type(guidance).__name__, "PrefixConstrainedLogitsProcessor"}  # which is as its function is
    assert [name for name in made if not is_stateless(object.__new__(getattr(lp, name)))] == []


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


def is_third(ids: torch.Tensor) -> bool:
    return int(ids.flatten()[-1]) % 3 == 0


SCALED = "base_model.model.model.layers.1.self_attn.q_proj"
CHANGES: dict[str, Change] = {
    "writes a token": lambda model, ids: writes(ids, -1),
    "writes earlier tokens": lambda model, ids: writes(ids, -3),
    "hooks": hooks,
    "adapter": lambda model, ids: model.set_adapter("other" if is_third(ids) else "default"),
    "scale": lambda model, ids: model.get_submodule(SCALED).scaling.update(default=8.0 if is_third(ids) else 2.0),
}


class Between(Recorder):
    """A processor, criterion or streamer that changes something, and keeps what it is called with."""

    def __init__(self, change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.change(value)


WHERE: dict[str, Callable[[Between], Any]] = {
    "logits_processor": lambda watching: [lambda ids, scores: watching.put(ids) or scores],
    "stopping_criteria": lambda watching: [lambda ids, scores, **_: watching.put(ids) or torch.zeros(len(ids)).bool()],
    "streamer": lambda watching: watching,  # its tokens are copies, so that it writes none
}


@peft_calls_old_name
@pytest.mark.every_run("logits_.*-(writes a token|scale)|stop.*-(writes earlier tokens|adapter)|streamer-hooks")
@pytest.mark.parametrize(
    ("where", "change"),
    [pair for pair in product(WHERE, CHANGES) if pair[0] != "streamer" or pair[1][0] != "w"],
)
def test_what_changes_between_two_tokens(where: str, change: str) -> None:
    """Has its effect on the next token, as in plain ``generate``."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    for inputs, make in zip((ROW, BATCH), SPECS.values(), strict=True):
        found = []
        for assistant in (None, make()):
            torch.manual_seed(0)
            model = peft.get_peft_model(tiny_llama(4, factor=0.5), config).eval()
            model.add_adapter("other", config)
            watching = Between(partial(CHANGES[change], model))
            options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [83, 75]}
            copies = {name: each.clone() for name, each in inputs.items()}
            ids = model.generate(**copies, **options, **{where: WHERE[where](watching)}, assistant=assistant)
            found.append((ids.tolist(), watching.calls))
        assert found[0] == found[1]
        assert assistant.stats.accepted > 0


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


@pytest.mark.parametrize("function", [SoftLimit(16), LateEnd(list(range(2, 40))), Shifted(every_third, 1)])
def test_classes_that_derive_from_those_of_transformers(function: Any) -> None:
    name = "logits_processor" if isinstance(function, LogitsProcessor) else "stopping_criteria"
    for inputs in (ROW, BATCH):
        ids = [texts(spec, inputs, **{name: [function]})[0] for spec in (None, SPECS["exit"]())]
        assert torch.equal(*ids)


TEMPERATURES = (1.0, 0.5, 1.5, 0.8)


class Tightening(LogitsProcessor):
    """A temperature for each of its calls."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores * TEMPERATURES[self.calls - 1]


@pytest.mark.every_run("early exit-8")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", SAMPLED)
def test_drawn_tokens_are_exact(name: str, rows: int) -> None:
    spec, sequences, accepted, drafted = SAMPLED[name], [], 0, 0
    for seed in range(240 // rows):
        sequences.append(sample(spec, rows=rows, seed=seed, logits_processor=[Tightening()])[0])
        accepted, drafted = accepted + spec.stats.accepted, drafted + spec.stats.drafted
    joint = exact_joint(llama(), [lambda ids, scores: scores * TEMPERATURES[ids.shape[1] - 1]])
    check_exact((torch.cat(sequences), accepted / drafted), joint)
