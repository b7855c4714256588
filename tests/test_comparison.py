"""Comparisons of ways of generating: the protocol by hand, the stream, going on, what does not fit."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from comparing import DEMO
from conftest import tiny_llama
from transformers import AutoTokenizer, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerBase

from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SettingError, SettingTypeError, compare
from hf_selfspec.bench.comparison import calls as timed
from hf_selfspec.bench.comparison.acceptance import acceptance
from hf_selfspec.bench.comparison.calls import Call, Caller, Rounds, cost_where_free, looping_share
from hf_selfspec.bench.comparison.compare import Asked, Comparison
from hf_selfspec.bench.comparison.prompts import Batch, Prompt
from hf_selfspec.bench.comparison.protocol import Measured, ratios
from hf_selfspec.bench.comparison.settings import Settings
from hf_selfspec.bench.comparison.ways import methods_of, ways_of

SCHEMA = Path(timed.__file__).parent / "results.schema.json"
TEXTS = ["def read_text(path):", "class Stack:", "import os\n\ndef main():", "for line in lines:"]
OURS = {"exit": SelfSpec(EarlyExit(3), FixedLength(3)), "free": SelfSpec.lookup()}


def call(seconds: float, tokens: int, prefill: float = 0.0, **more: Any) -> Call:
    """A call by its seconds on the wall; CPU time is twice as much."""
    given = {"way": "plain", "condition": 0, "turn": 0, "prompt": 0, "kind": "a", "prompt_tokens": [9]}
    given |= {"ids": [list(range(tokens))], "wall": seconds, "cpu": 2 * seconds, "wall_to_first": prefill}
    given |= {"cpu_to_first": 2 * prefill, "first_tokens": 1, "looping": 0.0, "in_process": 0}
    return Call(**{**given, **more})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocabulary=4096)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def compared(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Comparison:
    methods = ["prompt-lookup(2)", *OURS.values()]
    return compare(model, tokenizer, TEXTS, methods, max_new_tokens=16, temperature=[0, 0.7], progress=False)


def test_ratio_of_means_is_spec_benchs_and_stands_beside_that_of_totals() -> None:
    plain = [call(1.0, 10), call(4.0, 20), call(2.0, 10)] * 4
    way = [call(0.5, 10), call(4.0, 20), call(1.0, 10)] * 4
    found = ratios(Measured.whole(plain, "wall"), Measured.whole(way, "wall"))
    assert found is not None
    assert found.ratio_of_means.value == pytest.approx((20 + 5 + 10) / (10 + 5 + 5))
    assert found.ratio_of_totals.value == pytest.approx((40 / 5.5) / (40 / 7))
    low, high = found.ratio_of_means.low, found.ratio_of_means.high
    assert low is not None
    assert high is not None
    assert 1 <= low < found.ratio_of_means.value < high <= 2


def test_decoding_leaves_out_what_comes_before_the_first_tokens() -> None:
    plain, way = call(5.0, 9, prefill=1.0), call(3.0, 9, prefill=1.0)
    found = ratios(Measured.decoding([plain], "cpu"), Measured.decoding([way], "cpu"))
    assert found is not None
    assert found.ratio_of_means.value == found.ratio_of_totals.value == pytest.approx(2.0)
    assert found.ratio_of_means.low is None, "one prompt has no interval"
    alone = call(1.0, 1, prefill=1.0)
    assert ratios(Measured.decoding([alone], "wall"), Measured.decoding([alone], "wall")) is None


def test_intervals_are_those_of_the_bootstrap_over_prompts() -> None:
    """Of the mean of independent values the standard error is known."""
    generator = torch.Generator().manual_seed(0)
    speeds = 10 + torch.randn(400, generator=generator)
    way = [call(1 / float(speed), 1) for speed in speeds]
    found = ratios(Measured.whole([call(0.1, 1)] * 400, "wall"), Measured.whole(way, "wall"))
    assert found is not None
    assert found.ratio_of_means.low is not None
    assert found.ratio_of_means.high is not None
    width = found.ratio_of_means.high - found.ratio_of_means.low
    assert width == pytest.approx(2 * 1.96 * float(speeds.std()) / 10 / math.sqrt(400), rel=0.1)


def test_acceptance_by_hand() -> None:
    first = Rounds(rounds=6, drafted=12, accepted=6, histogram={0: 2, 1: 2, 2: 2}, cost_where_free=6.0)
    second = Rounds(rounds=4, drafted=8, accepted=8, histogram={2: 4}, cost_where_free=6.0)
    found = acceptance([call(1, 9, rounds=first), call(1, 9, rounds=second), call(1, 9)])
    assert found is not None
    assert (found.num_rounds, found.num_draft_tokens, found.num_accepted_tokens) == (10, 20, 14)
    assert found.mean_acceptance_length == pytest.approx(2.4)
    assert found.draft_acceptance_rate == pytest.approx(0.7)
    assert found.acceptance_histogram == {"0": 2, "1": 2, "2": 6}
    assert found.conditional_acceptance == [pytest.approx(8 / 10), pytest.approx(6 / 8)]
    assert found.simulated_free_verification == pytest.approx(2.0)
    unknown = acceptance([call(1, 9, rounds=Rounds(3, None, 3, {1: 3}))])
    assert unknown is not None
    assert unknown.draft_acceptance_rate is None
    assert acceptance([call(1, 9)]) is None


def test_loops_and_free_verification() -> None:
    assert looping_share(list(range(40))) == 0
    assert looping_share([*range(20), *range(15), 99]) == pytest.approx(15 / 36)
    assert looping_share([*range(20), *range(11), 99]) == 0
    assert looping_share([]) == 0
    assert cost_where_free([(1, 1), (32, 5), (64, 3)]) == 4.0


def test_results_have_the_form_of_the_schema(compared: Comparison) -> None:
    jsonschema.validate(compared.results, json.loads(SCHEMA.read_text()))
    greedy, drawn = compared.results["conditions"]
    assert [way["name"] for way in greedy["ways"]][:2] == ["plain", "prompt-lookup(2)"]
    assert greedy["prompts"] == 3, "the first call is told apart"
    for way in greedy["ways"]:
        assert way["equal_ids"]["equal"] == way["equal_ids"]["texts"] == 3
        assert way["equal_ids"]["parted"] == []
        assert way["output_sequence_length"] == 16
        assert way["peak_memory_bytes"] is None
        assert way["request_latency"] > way["time_to_first_token"] > 0
    assert drawn["temperature"] == 0.7
    assert drawn["ways"][2]["equal_ids"] is None
    assert compared.results["verify_cost"]["ours"]["1"] == 1
    broken = json.loads(json.dumps(compared.results))
    del broken["conditions"][0]["ways"][0]["acceptance"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, json.loads(SCHEMA.read_text()))


def test_acceptance_is_that_of_the_statistics_and_of_the_stream(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of ours by its statistics; of prompt lookup by what its loop streams, which adds up to the ids."""
    ids = tokenizer(TEXTS[0] * 6)["input_ids"]
    batch = Batch.of([Prompt("a", ids)], 0, model.device)
    caller = Caller(model, 0, 512)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain, lookup, ours = ways_of({"prompt-lookup(2)": "prompt-lookup(2)", "exit": OURS["exit"]})
    spec = SelfSpec(EarlyExit(3), FixedLength(3))
    found = {way.name: caller.call(way, batch, (0, 0, 0), options) for way in (plain, lookup)}
    mine = caller.call(ours, batch, (0, 0, 0), options, spec)
    assert mine.ids == found["plain"].ids == found["prompt-lookup(2)"].ids
    assert found["plain"].rounds is None
    theirs = found["prompt-lookup(2)"].rounds
    assert theirs is not None
    assert found["prompt-lookup(2)"].first_tokens + theirs.rounds + theirs.accepted == 24
    assert mine.rounds is not None
    assert spec.stats is not None
    assert (mine.rounds.drafted, mine.rounds.accepted) == (spec.stats.drafted, spec.stats.accepted)
    assert mine.first_tokens == 1
    assert mine.rounds.rounds + mine.rounds.accepted == mine.decoded == 23


def test_batches_count_each_rows_own_tokens(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    found = compare(model, tokenizer, TEXTS, ["SelfSpec.lookup()"], max_new_tokens=8, batch_size=2, progress=False)
    (condition,) = found.results["conditions"]
    assert condition["kinds"] == {"batch of 2": 1}
    assert [way["equal_ids"]["texts"] for way in condition["ways"]] == [2, 2]
    named = compare(model, tokenizer, TEXTS, ["prompt-lookup(2)"], max_new_tokens=4, batch_size=4, progress=False)
    assert [way["name"] for way in named.results["conditions"][0]["ways"]] == ["plain"]
    with pytest.raises(SettingError, match="batch_size=5: there are fewer prompts than that"):
        compare(model, tokenizer, TEXTS, [], batch_size=5, progress=False)


def test_text_is_a_table_and_a_verdict(compared: Comparison, tmp_path: Path) -> None:
    printed = str(compared)
    assert "greedy, batch 1\n\nway" in printed
    assert "temperature 0.7, batch 1" in printed
    assert "SelfSpec(draft=Lookup(" in printed
    assert compared.best in printed
    figure = compared.plot(tmp_path / "speed.png")
    assert len(figure.axes[0].patches) == 4
    assert (tmp_path / "speed.png").stat().st_size > 5000
    with pytest.raises(SettingError, match="no picture format"):
        compared.plot(tmp_path / "speed.doc")


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the process end in the middle of the call behind so many."""

    real = Caller.call

    def after(count: float) -> list[Call]:
        made: list[Call] = []

        def call(self: Caller, *args: Any, **kwargs: Any) -> Call:
            if len(made) == count:
                raise KilledError
            made.append(real(self, *args, **kwargs))
            return made[-1]

        monkeypatch.setattr(Caller, "call", call)
        return made

    return after


def test_a_killed_run_goes_on_where_it_was(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, killed_after: Any
) -> None:
    def again(**more: Any) -> Comparison:
        return compare(model, tokenizer, TEXTS, OURS, max_new_tokens=12, out=tmp_path, progress=False, **more)

    before = killed_after(7)
    with pytest.raises(KilledError):
        again()
    path = tmp_path / "calls.jsonl"
    with path.open("a") as file:
        file.write('{"call": {"way": "pl')  # a line that was cut short
    after = killed_after(math.inf)
    found = again()
    places = [(call.way, call.prompt) for call in (*before, *after)]
    assert len(before) == 7
    assert sorted(places) == sorted({(way, prompt) for way in ("plain", *OURS) for prompt in range(4)})
    assert found.results["conditions"][0]["prompts"] == 1, "first calls of either process are told apart"
    assert {"results.json", "report.md", "report.html", "speed-up-0.png"} <= {path.name for path in tmp_path.iterdir()}
    finished = killed_after(0)
    assert str(again()) == str(found)
    assert finished == []
    with pytest.raises(SettingError, match=r"other settings \(settings.seed: 0, now 3\)"):
        again(seed=3)
    path.write_text("[]\n")
    with pytest.raises(SettingError, match="is not a file of measured calls"):
        again()


def test_modes_are_put_back_and_home_folders_found(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each module, whichever of the others are in training mode."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tiny_llama(vocabulary=4096)
    model.train()
    for layer in model.model.layers[::2]:
        layer.eval()
    modes = [module.training for module in model.modules()]
    found = compare(model, tokenizer, TEXTS[:1], [], max_new_tokens=2, out="~/out", progress=False)
    assert [module.training for module in model.modules()] == modes
    found.save("~/saved")
    assert (tmp_path / "out" / "calls.jsonl").exists()
    assert (tmp_path / "saved" / "results.json").read_text() == (tmp_path / "out" / "results.json").read_text()


def test_a_run_that_goes_on_knows_what_was_learned(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, killed_after: Any
) -> None:
    """The store of earlier texts drafts the same prompt, although another process has seen it."""
    asked = {"max_new_tokens": 24, "progress": False}
    whole = compare(model, tokenizer, TEXTS[:1] * 3, {"free": SelfSpec.lookup()}, **asked)
    before = killed_after(2)
    with pytest.raises(KilledError):
        compare(model, tokenizer, TEXTS[:1] * 3, {"free": SelfSpec.lookup()}, out=tmp_path, **asked)
    assert len(before) == 2
    after = killed_after(math.inf)
    compare(model, tokenizer, TEXTS[:1] * 3, {"free": SelfSpec.lookup()}, out=tmp_path, **asked)
    first = next(call for call in before if call.way == "free")
    second = next(call for call in after if call.way == "free")
    assert first.rounds is not None
    assert second.rounds is not None
    assert second.rounds.accepted > first.rounds.accepted
    assert whole.results["conditions"][0]["ways"][1]["acceptance"]["num_accepted_tokens"] > 0


def test_the_order_of_ways_rotates_and_specs_are_kept(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, killed_after: Any
) -> None:
    made = killed_after(math.inf)
    asked = Settings(max_new_tokens=8, first_calls=1, passes=2)
    prompts = [Prompt("a", tokenizer(text)["input_ids"]) for text in TEXTS[:3]]
    found = Asked(model, tokenizer, prompts, asked, OURS, measures_costs=False).measured(progress=False)
    names = ["plain", *OURS]
    orders = [[call.way for call in made[start : start + 3]] for start in (0, 3, 6)]
    assert orders == [names, names[1:] + names[:1], names[2:] + names[:2]]
    (condition,) = found.results["conditions"]
    assert condition["prompts"] == 3, "of two passes the second counts, with all its prompts"
    assert [len(way["fresh_calls"]) for way in condition["ways"]] == [0, 1, 1]


@pytest.mark.usefixtures("no_warnings_yet")
def test_ways_that_do_not_fit_are_told_with_reasons(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = compare(model, tokenizer, TEXTS[:2], max_new_tokens=33, progress=False).results
    names = [way["name"] for way in found["conditions"][0]["ways"]]
    assert {"plain", "prompt-lookup(3)", "SelfSpec()", "SelfSpec.layerskip()", "SelfSpec.swift()"} <= set(names)
    why = {one["name"]: one["why"] for one in found["left_out"]}
    assert "fitted" in why["SelfSpec.kangaroo(adapter)"]
    assert "only when told to" in why["static-compiled"]
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1, bos_token_id=1, eos_token_id=None)
    mamba = MambaForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="cost of verifying several tokens is not measured with this model"):
        small = compare(mamba, tokenizer, TEXTS[:2], max_new_tokens=33, progress=False).results
    assert small["verify_cost"] is None
    why = {one["name"]: one["why"] for one in small["left_out"]}
    assert "not supported with stateful models" in why["prompt-lookup(2)"]
    assert "SelfSpec.layerskip()" in why


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["swift"], "'swift' is not known"),
        ([SelfSpec.lookup(), SelfSpec.lookup()], "is given twice"),
        ([3], "methods must be names or SelfSpec objects, got 3"),
    ],
)
def test_methods_that_are_none(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, methods: Any, message: str
) -> None:
    with pytest.raises((SettingError, SettingTypeError), match=message):
        compare(model, tokenizer, TEXTS, methods, progress=False)


@pytest.mark.parametrize("method", ["SelfSpec.layerskip()", "deep", "prompt-lookup(2)"])
def test_named_methods_that_do_not_fit_are_refused_before_anything_is_measured(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, killed_after: Any, method: str
) -> None:
    """Whether transformers refuses them or we do."""
    config = MambaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1, bos_token_id=1, eos_token_id=None)
    deep = method == "deep"
    model = tiny_llama(vocabulary=4096) if deep else MambaForCausalLM(config).eval()
    methods = {"deep": SelfSpec.layerskip(99)} if deep else [method]
    made = killed_after(math.inf)
    with pytest.raises(SettingError, match=f"methods: {re.escape(method)} does not fit this model: .*Leave it out"):
        compare(model, tokenizer, TEXTS, methods, max_new_tokens=8, out=tmp_path, progress=False)
    assert made == []
    assert list(tmp_path.iterdir()) == []


def test_chats_need_a_chat_template(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(SettingError, match="the tokenizer has no chat template, so the model cannot chat"):
        compare(model, tokenizer, [[{"role": "user", "content": "import os"}]], [], progress=False)


def test_words_of_a_command_line_are_methods() -> None:
    found = methods_of(["selfspec, prompt-lookup(4, 6)", "SelfSpec.layerskip(3, num_draft=2)", "prompt-lookup"])
    names = ["SelfSpec()", "prompt-lookup(4, 6)", "SelfSpec.layerskip(3, num_draft=2)"]
    assert list(found) == [*names, "prompt-lookup(2)", "prompt-lookup(3)", "prompt-lookup(2, 5)"]
    assert [way.name for way in ways_of(found)] == ["plain", *found]
    with pytest.raises(SettingError, match="Other methods are plain, static-compiled, prompt-lookup"):
        methods_of(["nothing"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2, got 1"),
        ({"temperature": -1}, "temperature must be a number of at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"top_p": 0.9}, "top_p has no effect on greedy decoding"),
        ({"batch_size": []}, "need at least one value each"),
        ({"clock": "sun"}, "clock must be one of auto, wall, cpu"),
        ({"max_new_tokens": 512}, "no prompt fits the model"),
    ],
)
def test_settings_that_are_not_possible(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        compare(model, tokenizer, TEXTS, [], progress=False, **settings)
    with pytest.raises(SettingTypeError, match="compare\\(texts\\) must be a non-empty list of non-empty strings"):
        compare(model, tokenizer, "one text")
