"""Parts of a call that transformers' own loop generates: ids, streams, processors' states and the cache are plain's."""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from helpers.calls import ROW
from helpers.models import ragged_batch
from helpers.searches import search_of
from hf_selfspec import SelfSpec
from hf_selfspec.batch import Text
from hf_selfspec.decode import decoder
from hf_selfspec.decode.loop import Loop
from hf_selfspec.draft.controlled import ControlledDrafter
from hf_selfspec.model.prompt import CACHE_NAME

pytestmark = pytest.mark.times_decide
# Rounds of ours and steps of transformers' own loop take turns, three at a time.
TURNS = (3, 3, 0, 0)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lets rounds without a draft and the loop take turns; returns the lengths of the text before and after each."""
    turns, lengths, run = itertools.cycle(TURNS), list[tuple[int, int]](), Loop.run

    def watched(loop: Loop, ids: torch.Tensor, cache: DynamicCache, *args: Any) -> None:
        run(loop, ids, cache, *args)
        lengths.append((ids.shape[1], cache.get_seq_length()))

    monkeypatch.setattr(
        ControlledDrafter, "loop_steps", lambda drafter, text, left, has_loop=True: next(turns) if left > 3 else 0
    )
    monkeypatch.setattr(Loop, "run", watched)
    return lengths


class EveryThird(LogitsProcessor):
    """Forbids the likeliest token at every third call, by its own count."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        best = scores.argmax(-1, keepdim=True)
        return scores.scatter(1, best, -torch.inf) if self.calls % 3 == 0 else scores


class EndsRows(StoppingCriteria):
    """Ends a row at some tokens; plain generate goes on with it until the others end."""

    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append("end")


ROWS = ragged_batch()


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (ROW, {}),
        (ROWS, {}),
        (ROWS, {"eos_token_id": [67, 62], "pad_token_id": 0}),
        (ROW, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 20}),
        (ROW, {"logits_processor": EveryThird}),
        (ROW, {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] % 11 == 0], "eos_token_id": None}),
    ],
    ids=["one row", "ragged rows", "ends", "penalties", "a processor that counts", "a criterion"],
)
def test_ids(llama: LlamaForCausalLM, runs: list[Any], inputs: dict[str, Any], options: dict[str, Any]) -> None:
    outputs = []
    for assistant in (None, SelfSpec.lookup()):
        arguments = options | {name: [EveryThird()] for name in options if name == "logits_processor"}
        streamer = Heard() if inputs is ROW else None
        ids = llama.generate(
            **inputs, max_new_tokens=28, do_sample=False, streamer=streamer, assistant=assistant, **arguments
        )
        outputs.append((ids.tolist(), streamer and streamer.tokens))
    assert outputs[0] == outputs[1]
    assert runs
    stats = assistant.stats
    assert sum(map(len, stats.from_draft)) == stats.tokens
    assert (stats.mean_generated_length - 1) * stats.rounds == pytest.approx(stats.accepted)


def test_a_search_without_time_does_not_need_rounds(
    llama: LlamaForCausalLM, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of the default, which looks for layers beside free drafts."""

    def steps(drafter: ControlledDrafter, text: Text, left: int, has_loop: bool = True) -> int:
        assert drafter.others
        return 3 if has_loop and left > 3 and all(drafter.miss(text) for drafter in drafter.others.values()) else 0

    monkeypatch.setattr(ControlledDrafter, "loop_steps", steps)
    options = {"max_new_tokens": 60, "do_sample": False}
    spec = SelfSpec()
    assert torch.equal(llama.generate(**ROW, **options, assistant=spec), llama.generate(**ROW, **options))
    assert runs
    assert search_of(spec, llama).generated >= 45  # but for the last ones, of which it is told together


def test_cache(llama: LlamaForCausalLM, runs: list[Any]) -> None:
    """What is handed back is as plain's, also where rows have ended in the loop, and so is the next turn."""
    options = {"max_new_tokens": 28, "do_sample": False, "return_dict_in_generate": True}
    plain = llama.generate(**ROWS, **options)
    ours = llama.generate(**ROWS, **options, assistant=SelfSpec.lookup())
    assert runs
    assert torch.equal(ours.sequences, plain.sequences)
    for mine, theirs in zip(ours[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


def test_long_texts_are_not_copied(llama: LlamaForCausalLM, runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_COPIED", 0)
    monkeypatch.setattr(type(llama), "get_memory_footprint", lambda model: 16)
    llama.generate(**ROW, max_new_tokens=20, do_sample=False, assistant=SelfSpec.lookup())
    assert not runs


class Unmasked(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, logits_to_keep: int = 0, **cache: Any) -> Any:
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, attention_mask=None, **cache
        )


def test_a_model_that_takes_no_mask(llama: LlamaForCausalLM, runs: list[Any]) -> None:
    """Plain steps that begin in the middle of a text would ask for one."""
    model, ids = Unmasked(llama.config).eval(), ROW["input_ids"]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options, assistant=SelfSpec.lookup()), model.generate(ids, **options))


def test_what_a_criterion_changes(llama: LlamaForCausalLM, runs: list[Any]) -> None:
    """It writes earlier tokens, in the loop as well, and adds a hook there, after which nothing is drafted."""
    found = []
    for assistant in (None, SelfSpec.lookup()):
        hooks: list[Any] = []

        def change(ids: torch.Tensor, *_: Any, hooks: list[Any] = hooks, **__: Any) -> torch.Tensor:
            ids[:, -4] = 9 if ids.shape[1] % 6 == 0 else ids[:, -4]
            if ids.shape[1] == 30:
                hooks.append(llama.model.layers[1].register_forward_hook(lambda _, args, states: steered(states)))
            return ids[:, -1] < 0

        options = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": [change]}
        found.append(llama.generate(**ROW, **options, assistant=assistant).tolist())
        hooks[0].remove()
    assert found[0] == found[1]
    assert runs[-1] == (27, 29), "all is left to rounds from the hook on"


def steered(states: torch.Tensor) -> torch.Tensor:
    """With another state of the last token."""
    return torch.cat([states[:, :-1], states[:, -1:].flip(-1)], dim=1)


class PassesOn(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


@pytest.mark.parametrize("place", [0, 3])
def test_a_layer_without_keys(llama: LlamaForCausalLM, runs: list[Any], place: int) -> None:
    """As of a pruned model; of the first one transformers' loop would take the length of the text."""

    class Pruned(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model.layers[place] = PassesOn()

    model, options = Pruned(llama.config).eval(), {"max_new_tokens": 28, "do_sample": False}
    plain = model.generate(**ROW, **options)
    assert torch.equal(model.generate(**ROW, **options, assistant=SelfSpec.lookup()), plain)
    assert bool(runs) == (place > 0)


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (ROW, {"return_dict_in_generate": True, "output_scores": True}),
        (ROW, {CACHE_NAME: DynamicCache}),
        (ROWS, {"logits_processor": EveryThird}),
        (ROWS, {"stopping_criteria": [EndsRows()], "eos_token_id": None}),
    ],
    ids=["scores are returned", "a cache of the user's", "rows that advance together", "rows that end without a token"],
)
def test_where_it_is_not_possible(
    llama: LlamaForCausalLM, runs: list[Any], inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    arguments = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    arguments |= {"logits_processor": [arguments["logits_processor"]]} if "logits_processor" in arguments else {}
    ours = llama.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=SelfSpec.lookup(), **arguments)
    assert not runs
    if "stopping_criteria" in options:
        assert torch.equal(ours, llama.generate(**inputs, max_new_tokens=20, do_sample=False, **arguments))
