"""Comparisons of methods: the protocol by hand, the stream, going on, what does not fit."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerBase

from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL
from hf_selfspec import (
    Comparison,
    EarlyExit,
    FixedLength,
    SelfSpec,
    SettingError,
    SettingTypeError,
    compare,
)
from hf_selfspec.drafts import Drafter, Session
from hf_selfspec.stats import GenerationStats
from hf_selfspec.tools.methods import LAYERS, OURS_GROUP, PLAIN, Method, methods_of
from hf_selfspec.tools.report import verdict
from hf_selfspec.tools.results import acceptance, fastest, ratios
from hf_selfspec.tools.stream import Call, repetitions

TEXTS = ["def read_text(path):", "class Stack:", "import os\n\ndef main():", "for line in lines:"]
OURS = {"exit": SelfSpec(EarlyExit(3), FixedLength(3)), "free": SelfSpec.lookup()}


def call(seconds: float, tokens: int, prefill: float = 0.0, **more: Any) -> Call:
    """A call by its seconds on the wall; CPU time is twice as much."""
    times = {"seconds": {"wall": seconds, "cpu": 2 * seconds}, "to_first": {"wall": prefill, "cpu": 2 * prefill}}
    return Call("plain", 0, 0, 0, "a", [9], [list(range(tokens))], first_tokens=1, **times, **more)


def rounds(count: int, drafted: int | None, histogram: dict[str, int]) -> dict[str, Any]:
    accepted = sum(int(length) * times for length, times in histogram.items())
    return {"rounds": count, "drafted": drafted, "accepted": accepted, "histogram": histogram}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(4, vocabulary=4096)


@pytest.fixture(scope="module")
def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1, bos_token_id=1, eos_token_id=None)
    return MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def compared(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Comparison:
    methods = ["prompt-lookup(2)", *OURS.values()]
    return compare(model, tokenizer, TEXTS, methods, max_new_tokens=8, temperature=[0, 0.7], progress=False)


def made(folder: Path) -> list[Call]:
    """The calls of a comparison, in the order in which they were made."""
    return [Call(**json.loads(line)) for line in (folder / "calls.jsonl").read_text().splitlines()[1:]]


class KilledError(Exception):
    """Stands for the end of the process."""


@dataclass(frozen=True)
class Reporting(EarlyExit):
    """Keeps the statistics of its calls."""

    stats: list[GenerationStats] = field(default_factory=list, repr=False)

    def start(self, session: Session) -> Drafter:
        drafter: Any = super().start(session)
        drafter.report = self.stats.append
        return drafter


def test_ratio_of_means_is_spec_benchs_and_stands_beside_that_of_totals() -> None:
    plain = [call(1.0, 10), call(4.0, 20), call(2.0, 10)] * 4
    mine = [call(0.5, 10), call(4.0, 20), call(1.0, 10)] * 4
    found = ratios(plain, mine, Call.whole, "wall")
    means = found["ratio_of_means"]
    assert means["value"] == pytest.approx((20 + 5 + 10) / (10 + 5 + 5))
    assert found["ratio_of_totals"]["value"] == pytest.approx((40 / 5.5) / (40 / 7))
    assert 1 <= means["low"] < means["value"] < means["high"] <= 2


def test_decoding_leaves_out_what_comes_before_the_first_tokens() -> None:
    found = ratios([call(5.0, 9, prefill=1.0)], [call(3.0, 9, prefill=1.0)], Call.decoding, "cpu")
    assert found["ratio_of_means"]["value"] == found["ratio_of_totals"]["value"] == pytest.approx(2.0)
    alone = [call(1.0, 1, prefill=1.0)]
    assert ratios(alone, alone, Call.decoding, "wall") is None


def test_intervals_are_those_of_the_bootstrap_over_ten_prompts_and_more() -> None:
    """Of the mean of independent values the standard error is known."""
    speeds = 10 + torch.randn(400, generator=torch.Generator().manual_seed(0))
    mine = [call(1 / float(speed), 1) for speed in speeds]
    whole, ten, nine = (
        ratios([call(0.1, 1)] * count, mine[:count], Call.whole, "wall")["ratio_of_means"] for count in (400, 10, 9)
    )
    expected = 2 * 1.96 * float(speeds.std()) / 10 / math.sqrt(400)
    assert whole["high"] - whole["low"] == pytest.approx(expected, rel=0.1)
    assert ten["low"] is not None
    assert nine["low"] is None


def test_acceptance_by_hand() -> None:
    first, second = rounds(6, 12, {"0": 2, "1": 2, "2": 2}), rounds(4, 8, {"2": 4})
    found = acceptance([call(1, 9, rounds=first), call(1, 9, rounds=second), call(1, 9)])
    assert (found["num_rounds"], found["num_draft_tokens"], found["num_accepted_tokens"]) == (10, 20, 14)
    assert found["mean_acceptance_length"] == pytest.approx(2.4)
    assert found["draft_acceptance_rate"] == pytest.approx(0.7)
    assert found["acceptance_histogram"] == {"0": 2, "1": 2, "2": 6}
    assert found["conditional_acceptance"] == [pytest.approx(8 / 10), pytest.approx(6 / 8)]
    unknown = acceptance([call(1, 9, rounds=rounds(3, None, {"1": 3}))])
    assert unknown["draft_acceptance_rate"] is None
    assert acceptance([call(1, 9)]) is None


def test_repetitions() -> None:
    assert repetitions(list(range(40))) == repetitions([*range(20), *range(11), 99]) == repetitions([]) == 0
    assert repetitions([*range(20), *range(15), 99]) == 15


def test_results_by_condition_and_method(compared: Comparison) -> None:
    greedy, drawn = json.loads(json.dumps(compared.results))["conditions"]
    assert [method["name"] for method in greedy["methods"]][:2] == ["plain", "prompt-lookup(2)"]
    assert greedy["prompts"] == 3, "the first call is left out"
    for method in greedy["methods"]:
        assert method["equal_ids"] == {"texts": 3, "equal": 3, "share": 1, "differences": []}
        assert method["output_sequence_length"] == 8
        assert method["peak_memory_bytes"] is None
        assert method["request_latency"] > method["time_to_first_token"] > 0
    assert drawn["temperature"] == 0.7
    assert drawn["methods"][2]["equal_ids"] is None


def test_acceptance_is_that_of_the_statistics_and_of_the_stream(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Of ours by its statistics; of prompt lookup by what its loop streams, which adds up to the ids."""
    source = Reporting(3)
    methods = {"prompt-lookup(2)": "prompt-lookup(2)", "exit": SelfSpec(source, FixedLength(3))}
    compare(model, tokenizer, [TEXTS[0] * 6], methods, max_new_tokens=24, out=tmp_path, progress=False)
    plain, lookup, ours = made(tmp_path)
    stats = source.stats[-1]
    assert ours.ids == plain.ids == lookup.ids
    assert plain.rounds is None
    assert lookup.first_tokens + lookup.rounds["rounds"] + lookup.rounds["accepted"] == 24
    assert (ours.rounds["drafted"], ours.rounds["accepted"]) == (stats.drafted, stats.accepted)
    assert ours.first_tokens == 1
    assert ours.rounds["rounds"] + ours.rounds["accepted"] == ours.decoding("wall")[0] == 23


def test_batches_count_each_rows_own_tokens(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    found = compare(model, tokenizer, TEXTS, ["SelfSpec.lookup()"], max_new_tokens=8, batch_size=2, progress=False)
    (condition,) = found.results["conditions"]
    assert condition["kinds"] == {"batch of 2": 1}
    assert [method["equal_ids"]["texts"] for method in condition["methods"]] == [2, 2]
    named = compare(model, tokenizer, TEXTS, ["prompt-lookup(2)"], max_new_tokens=4, batch_size=4, progress=False)
    assert [method["name"] for method in named.results["conditions"][0]["methods"]] == ["plain"]


def test_a_killed_run_goes_on_where_it_was(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a home folder, with a model whose modules are in different modes, which it keeps."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model, folder = tiny_llama(4, vocabulary=4096).train(), tmp_path / "out"
    for layer in model.model.layers[::2]:
        layer.eval()
    modes = [module.training for module in model.modules()]

    def again(methods: Any = OURS, **more: Any) -> Comparison:
        return compare(model, tokenizer, TEXTS, methods, max_new_tokens=6, out="~/out", progress=False, **more)

    def dies(*_: Any) -> None:
        if (folder / "calls.jsonl").exists() and len(made(folder)) == 7:
            raise KilledError

    hook = model.register_forward_pre_hook(dies)
    with pytest.raises(KilledError):
        again()
    hook.remove()
    before = made(folder)
    with (folder / "calls.jsonl").open("a") as file:
        file.write('{"method": "pl')  # a line that was cut short
    found = again()
    assert [module.training for module in model.modules()] == modes
    assert made(folder)[:7] == before
    places = [(call.method, call.prompt) for call in made(folder)]
    assert sorted(places) == sorted({(name, prompt) for name in ("plain", *OURS) for prompt in range(4)})
    assert found.results["conditions"][0]["prompts"] == 1, "first calls of either process are left out"
    assert {"results.json", "report.md", "speed-up-0.png"} <= {path.name for path in folder.iterdir()}
    found.save("~/saved")
    assert (tmp_path / "saved" / "results.json").read_text() == (folder / "results.json").read_text()
    finished = made(folder)
    assert str(again()) == str(found)
    assert made(folder) == finished
    with pytest.raises(SettingError, match=r"other settings \(seed: 0, now 3\)"):
        again(seed=3)
    with pytest.raises(SettingError, match=r"other settings \(method exit: .*num_tokens=3.*now .*num_tokens=4"):
        again(OURS | {"exit": SelfSpec(EarlyExit(3), FixedLength(4))})
    (folder / "calls.jsonl").write_text("[]\n")
    with pytest.raises(SettingError, match="is not a file of measured calls"):
        again()


def test_the_order_rotates_and_each_pass_has_a_spec_of_its_own(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A ``SelfSpec`` drafts nearly all of the answer that it has given before, in the same pass."""
    options = {"max_new_tokens": 16, "passes": 2, "out": tmp_path, "progress": False}
    found = compare(model, tokenizer, [TEXTS[0]] * 2, OURS, **options)
    names, calls = ["plain", *OURS], made(tmp_path)
    assert [call.method for call in calls[:6]] == [*names, *names[1:], names[0]]
    assert found.results["conditions"][0]["prompts"] == 2, "of two passes the second counts, with all its prompts"
    first, second, third, fourth = (call.rounds["rounds"] for call in calls if call.method == "free")
    assert first > 2 * second
    assert third > 2 * max(second, fourth)


def test_plain_with_the_linear_layers_of_a_spec(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """They run in its calls alone, it is never the winner, and the verdict tells what drafts alone bring."""
    head, seen = model.lm_head, set[bool]()
    hook = head.register_forward_pre_hook(lambda *_: seen.add("forward" in vars(head)))
    (condition,) = compare(model, tokenizer, TEXTS[:2], [LAYERS], max_new_tokens=8, progress=False).results[
        "conditions"
    ]
    hook.remove()
    assert seen == {True, False}
    layers = condition["methods"][1]
    assert layers["equal_ids"]["share"] == 1
    layers["whole"]["ratio_of_means"]["value"] = 2.0
    assert fastest(condition["methods"]) == PLAIN
    ours = {
        **layers,
        "name": "SelfSpec()",
        "group": OURS_GROUP,
        "whole": {"ratio_of_means": {"value": 3.0, "low": None}},
    }
    told = verdict({**condition, "methods": [*condition["methods"], ours], "best": "SelfSpec()"}).details
    assert "Of that, drafts alone 1.50 and its linear layers, of plain generate too, 2.00." in told


@pytest.mark.slow
@pytest.mark.usefixtures("no_warnings_yet")
def test_methods_that_do_not_fit_are_left_out_with_reasons(
    model: LlamaForCausalLM, mamba: MambaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = compare(model, tokenizer, TEXTS[:2], max_new_tokens=33, progress=False).results
    names = [method["name"] for method in found["conditions"][0]["methods"]]
    assert {"plain", "prompt-lookup(3)", "SelfSpec()", "SelfSpec.layerskip()", "SelfSpec.swift()"} <= set(names)
    assert "fitted" in found["left_out"]["SelfSpec.kangaroo(adapter)"]
    assert "only when told to" in found["left_out"]["static-compiled"]
    assert "name it in --methods" in found["left_out"]["SelfSpec.mtp()"]
    left_out = compare(mamba, tokenizer, TEXTS[:2], max_new_tokens=33, progress=False).results["left_out"]
    assert "not supported with stateful models" in left_out["prompt-lookup(2)"]
    assert "SelfSpec.layerskip()" in left_out


@pytest.mark.parametrize("name", ["deep", "mtp", "prompt-lookup(2)"])
def test_named_methods_that_do_not_fit_are_refused_before_anything_is_measured(
    model: LlamaForCausalLM, mamba: MambaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str
) -> None:
    """Whether transformers refuses them or we do."""
    methods: Any = {"deep": SelfSpec.layerskip(99)} if name == "deep" else [name]
    with pytest.raises(SettingError, match=r"^methods: .* does not fit this model: .*Leave it out") as raised:
        compare(mamba if "lookup" in name else model, tokenizer, TEXTS, methods, out=tmp_path, progress=False)
    assert name in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_names_of_methods() -> None:
    """Short ones, and texts as for ``--spec``."""
    found = ["selfspec", "prompt-lookup(4, 6)", "SelfSpec.layerskip(3, num_draft=2)", "prompt-lookup"]
    names = ["SelfSpec()", "prompt-lookup(4, 6)", "SelfSpec.layerskip(3, num_draft=2)"]
    names += ["prompt-lookup(2)", "prompt-lookup(3)", "prompt-lookup(2, 5)"]
    assert [method.name for method in methods_of(found)] == ["plain", *names]
    make: Any = object
    assert Method("mine", "ours", "assistant=mine", make=make).settings == "<object object>", "in each process"


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (["magic"], {}, "there is no such folder or preset.* Other methods are plain, static-compiled, prompt-lookup"),
        ([SelfSpec.lookup(), SelfSpec.lookup()], {}, "is given twice"),
        ([3], {}, "methods must be names or SelfSpec objects, got 3"),
        ([], {"max_new_tokens": 1}, "max_new_tokens must be at least 2, got 1"),
        ([], {"temperature": -1}, "temperature must be a number of at least 0"),
        ([], {"top_p": 0.9}, "top_p has no effect on greedy decoding"),
        ([], {"batch_size": []}, "need at least one value each"),
        ([], {"batch_size": 5}, "batch_size=5: there are fewer prompts than that"),
        ([], {"clock": "sun"}, "clock must be one of auto, wall, cpu"),
        ([], {"max_new_tokens": 512}, "no prompt fits the model"),
        ([], {"texts": "one text"}, r"compare\(texts\) must be a list of strings or chats"),
        ([], {"texts": [[{"role": "user", "content": "import os"}]]}, "the tokenizer has no chat template, so the"),
    ],
)
def test_what_cannot_be_compared(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, methods: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((SettingError, SettingTypeError), match=message):
        compare(model, tokenizer, methods=methods, progress=False, **{"texts": TEXTS} | settings)


def test_prompts_of_several_kinds(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    kinds = {"short": ["def f", "import os", "class A:"], "long": [20 * "x = 1\n", "return x"]}
    options = {"max_new_tokens": 4, "max_prompt_tokens": 16, "progress": False}
    found = compare(model, tokenizer, kinds, ["prompt-lookup(2)"], **options).results
    assert found["conditions"][0]["kinds"] == {"short": 2, "long": 1}, "the first call is apart"
    assert found["about"]["prompts_left_out"] == {"long": 1}
    assert set(found["conditions"][0]["methods"][1]["by_kind"]) == {"short", "long"}
    for wrong, words in (({}, "has no kinds of prompts"), ({"a": "text"}, "must be a list of strings or chats")):
        with pytest.raises((SettingError, SettingTypeError), match=words):
            compare(model, tokenizer, wrong, **options)
