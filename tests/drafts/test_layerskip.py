"""SelfSpec.layerskip and its probe."""

import copy
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel

from helpers.architectures import build
from helpers.calls import unchanged
from helpers.models import ragged_batch, tiny_llama
from helpers.searches import generated, prompt
from helpers.watched import drafts_into
from hf_selfspec import (
    ConfidenceThreshold,
    EarlyExit,
    ExitChoice,
    FixedLength,
    ProductThreshold,
    SelfSpec,
)
from hf_selfspec.drafts.layers import probing
from hf_selfspec.drafts.stop.rules import confidence
from hf_selfspec.errors import SettingTypeError, UnsupportedModelError
from hf_selfspec.model.exits import Exits
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search import exit_study
from hf_selfspec.search.exit_study import ExitStudy, choose_exit
from hf_selfspec.search.forward_costs import ForwardCosts, Stopwatch
from hf_selfspec.search.replay import Replays, Rule, Trace, replays
from hf_selfspec.search.replay import trace as traced

COSTS = ForwardCosts(fixed=1.0, attention=0.5, mlp=1.5, several=0.75, token=0.5, step=0.25, num_layers=4)


def exit_plan(layer: int) -> LayerPlan:
    return LayerPlan.early_exit(4, layer)


def test_cost_of_a_round():
    assert COSTS.plain() == 1 + 4 * 2
    assert COSTS.draft(exit_plan(1)) == 1 + 2 + 0.25
    assert COSTS.draft(LayerPlan(4, frozenset([1]), frozenset([1, 2]))) == 1 + 3 * 0.5 + 2 * 1.5 + 0.25
    assert COSTS.verify(1, 0) == COSTS.plain()
    # Without KVQ reuse, 2 tokens through all layers.
    assert COSTS.verify(1, 1) == 1.75 + 4 * (2 + 0.5)
    # With it, the last drafted token goes through 1 layer on its own; then 4 tokens go through 3 layers. From
    # 2 drafted tokens on that spares as much as the other forward costs beside its layers.
    assert COSTS.reuse_from(1) == 2
    assert COSTS.verify(1, 2) == 1.75 + 4 * (2 + 2 * 0.5)
    assert COSTS.verify(1, 3) == (1 + 1 * 2) + (1.75 + 3 * (2 + 3 * 0.5)) < 1.75 + 4 * (2 + 3 * 0.5)
    assert ForwardCosts(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 4).verify(2, 9) == 9


def test_verification_costs_what_rounds_of_its_size_took():
    """Where other sources were timed; beyond the largest of their rounds as much more as forwards show."""
    timed = replace(COSTS, token=0.0, further=(0.0, 3.0, 3.0, 7.0))
    assert [timed.verify(1, n) - timed.plain() for n in range(6)] == [0.0, 3.0, 3.0, 7.0, 7.0, 7.0]
    assert replace(timed, token=0.5).verify(0, 5) == timed.plain() + 7.0 + 4 * 0.5 * 2
    assert ForwardCosts.of_state(json.loads(json.dumps(asdict(timed))), 4) == timed
    # The layers that reuse spares cost at most their part of what was timed.
    flat = replace(COSTS, several=0.0, fixed=0.1, further=(0.0, 0.1, 0.1, 0.1))
    assert all(flat.verify(prefix, count) >= flat.plain() for prefix in range(4) for count in range(9))
    old = asdict(COSTS)
    del old["further"]
    assert ForwardCosts.of_state(old, 4) == COSTS


def replay(trace: Trace, rule: Rule, plan: LayerPlan, costs: ForwardCosts, max_draft: int) -> Replays:
    """One rule along one text."""
    return Replays(*(values.item() for values in replays([trace], [rule], plan, costs, max_draft)))


def walked(accept: np.ndarray, lengths: list[int], costs: ForwardCosts, plan: LayerPlan) -> tuple[float, ...]:
    """Seconds, tokens, drafted and accepted ones of a walk along one text that goes on at its beginning."""
    at, drafted, accepted, seconds = 0, 0, 0, 0.0
    while at < len(lengths):
        length = lengths[at]
        right = next((k for k in range(length) if not accept[(at + k) % len(accept)]), length)
        seconds += length * costs.draft(plan) + costs.verify(plan.first_altered, length)
        at, drafted, accepted = at + right + 1, drafted + length, accepted + right
    return seconds, at, drafted, accepted


def test_replays_are_walks_along_the_texts() -> None:
    """Of several rules along several texts of several rows, each row as if alone."""
    generator, rules = np.random.default_rng(0), [FixedLength(2), FixedLength(5), ConfidenceThreshold(0.5)]
    texts = [Trace((generator.random(size) < 0.6).astype(float), generator.random(size)) for size in ((1, 7), (3, 9))]
    rows = [(text.accept[row], text.confidence[row : row + 1]) for text in texts for row in range(len(text.accept))]
    for rule, *found in zip(rules, *replays(texts, rules, exit_plan(1), COSTS, 4), strict=True):
        walks = [walked(accept, rule.lengths(sure, 4)[0].tolist(), COSTS, exit_plan(1)) for accept, sure in rows]
        assert found == pytest.approx([sum(values) for values in zip(*walks, strict=True)])
    part = texts[1].part(1, 1, 3)
    assert (part.accept.tolist(), part.tokens) == (texts[1].accept[1:2, 1:3].tolist(), 2)


@pytest.mark.parametrize(
    ("rule", "sure", "most", "lengths"),
    [
        (ConfidenceThreshold(0.5), [0.9, 0.9, 0.1, 0.9], 9, [3, 2, 1, 4]),
        (FixedLength(3), [0.9, 0.9, 0.1, 0.9], 2, [2] * 4),
        (ProductThreshold(0.8), [0.9, 0.9, 0.9, 0.5, 1.0], 9, [3, 3, 2, 1, 4]),  # 0.9 0.9 is 0.81, with 0.9 0.729
        (ProductThreshold(0.8), [0.9, 0.9, 0.9, 0.5, 1.0], 2, [2, 2, 2, 1, 2]),
    ],
)
def test_lengths_of_drafts(rule, sure, most, lengths):
    """At the end a draft goes on at the beginning; the token with which it falls below the threshold is drafted."""
    assert rule.lengths(np.array([sure]), most).tolist() == [lengths]


def test_replay_of_likely_acceptance_is_the_mean_over_outcomes():
    generator = np.random.default_rng(0)
    accept, sure = generator.random((1, 12)), generator.random((1, 12))
    rule, total = ConfidenceThreshold(0.3), 0.0
    runs = 2000
    for _ in range(runs):
        outcome = (generator.random(12) < accept[0]).astype(float)
        # An outcome is drawn for each position, so a walk along it is one run of the decoder.
        total += replay(Trace(outcome[None], sure), rule, exit_plan(2), COSTS, 4).seconds
    expected = replay(Trace(accept, sure), rule, exit_plan(2), COSTS, 4).seconds
    assert total / runs == pytest.approx(expected, rel=0.03)


@torch.no_grad()
def _traces(model, ids, prompt, layers):
    """Traces of exits along a text, by greedy choices of each exit's own logits, from one forward of the model."""
    written = slice(prompt - 1, ids.shape[1] - 1)
    exits = Exits(model)
    exits.attach()
    try:
        exits.chosen = tuple(layers)
        full = model(input_ids=ids).logits[0, written].float()
        found = {}
        for layer, states in zip(layers, exits.states, strict=True):
            logits = exits.head(states[0, written]).float()
            found[layer] = traced(logits[None], full[None], confidence(logits)[None], False)
        return found
    finally:
        exits.chosen = ()
        exits.detach()


def test_replay_foretells_what_decoding_does():
    model, rule = tiny_llama(), ConfidenceThreshold(0.02)
    ids, tokens = prompt(), 80
    spec = SelfSpec(draft=EarlyExit(3), stop=rule)
    text = generated(model, ids, tokens, assistant=spec)
    trace = _traces(model, text, ids.shape[1], [3])[3]
    after_the_prefill = Trace(trace.accept[:, 1:], trace.confidence[:, 1:])
    found = replay(after_the_prefill, rule, exit_plan(2), COSTS, 25)
    assert 0 < spec.stats.accepted < spec.stats.drafted
    # A rejected draft goes on along another text, and the end of the text cuts the last drafts, but not in a replay.
    assert found.accepted == pytest.approx(spec.stats.accepted, abs=2)
    assert found.drafted == pytest.approx(spec.stats.drafted, rel=0.1)


def test_the_fastest_exit_is_chosen():
    bad, good = np.zeros((1, 40)), np.ones((1, 40))
    traces = {1: [Trace(bad, bad)], 2: [Trace(good, good)], 3: [Trace(good, good)]}
    choice = choose_exit(traces, [FixedLength(2), FixedLength(4)], COSTS, 25)
    assert (choice.layer, choice.stop) == (2, FixedLength(4))
    assert choice.by_layer[2] == choice.expected_speedup > choice.by_layer[3] > 1 > choice.by_layer[1]
    assert choice.acceptance_rate == pytest.approx(1.0)
    assert "exit layer 2, FixedLength(num_tokens=4)" in str(choice)
    none = choose_exit({1: [Trace(bad, bad)], 2: [Trace(bad, bad)]}, [FixedLength(1)], COSTS, 25)
    assert none.layer is None
    assert "no draft" in str(none)


@pytest.mark.parametrize(("tokens", "accept", "is_idle"), [(1000, 0, False), (1024, 0, True), (1024, 1, False)])
def test_a_study_is_idle_where_enough_text_shows_that_no_draft_pays(tokens, accept, is_idle, machine):
    study, known = ExitStudy(4), np.full((1, tokens), float(accept))
    machine.forwards_cost(fixed=1.0, attention=0.5, mlp=1.5, several=0.75, token=0.5, step=0.25)
    study.add({1: [Trace(known, known)]}, [FixedLength(4)], 25, rounds=())
    assert study.is_idle == is_idle


@pytest.mark.every_run("3")
@pytest.mark.parametrize("rows", [1, 3])
def test_probing_changes_no_token(rows):
    model, spec = tiny_llama(), SelfSpec.layerskip()
    assert spec.choice(model) is None
    ids = prompt(rows, 9)
    plain = generated(model, ids)
    with unchanged(model):
        for _ in range(3):
            assert torch.equal(generated(model, ids, assistant=spec), plain)
    choice = spec.choice(model)
    assert isinstance(choice, ExitChoice)
    exits = set(range(1, model.config.num_hidden_layers))
    # After 256 tokens only the three that look fastest are compared.
    assert set(choice.by_layer) == exits if rows == 1 else len(exits & set(choice.by_layer)) == 3
    assert choice.tokens >= 3 * 40 * rows


def test_a_model_is_probed_until_enough_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_study, "ENOUGH", 100)
    model, spec = tiny_llama(), SelfSpec.layerskip()
    generated(model, prompt(), 6, assistant=spec)
    assert spec.choice(model) is None  # too little to see, and to time
    seen = []
    for _ in range(5):
        generated(model, prompt(), assistant=spec)
        seen.append(spec.choice(model).tokens)
    assert seen == [47 * min(count, 3) for count in range(1, 6)]
    other = tiny_llama()
    assert spec.choice(other) is None
    assert copy.deepcopy(spec).choice(model) is spec.choice(model)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_rows_that_end_early_count_as_far_as_they_went():
    model, spec = tiny_llama(), SelfSpec.layerskip()
    ids = prompt(3, 9)
    plain = generated(model, ids)
    end = int(plain[1, 9 + 5])
    lengths = [next((i for i, token in enumerate(row[9:].tolist()) if token == end), 47) for row in plain]
    assert min(lengths) < 8 < max(lengths)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 48, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, eos_token_id=end, assistant=spec, **options)
    assert spec.choice(model).tokens == sum(lengths)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "drawn"])
def test_traces_of_a_text_are_what_each_exit_says(options, monkeypatch):
    """``top_k=1`` leaves the first choice alone, so that acceptance is agreement where tokens are drawn, too."""
    model, spec, found = tiny_llama(), SelfSpec.layerskip(), []
    original = probing.ProbingDraft._traces
    monkeypatch.setattr(
        probing.ProbingDraft, "_traces", lambda self, text, n: found.append(original(self, text, n)) or found[-1]
    )
    text = generated(model, prompt(), 48, assistant=spec, **options)
    seen = {layer: np.concatenate([part[layer][0].accept[0] for part in found]) for layer in found[0]}
    expected = _traces(model, text, prompt().shape[1], list(seen))
    for layer, accept in seen.items():
        # After the first generated token and each later one but the last.
        np.testing.assert_allclose(accept, expected[layer].accept[0, 1:], atol=1e-6)
    assert len({tuple(accept) for accept in seen.values()}) > 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_kinds_of_calls_choose_for_themselves():
    model, spec = tiny_llama(), SelfSpec.layerskip()
    generated(model, prompt(), assistant=spec)
    single = spec.choice(model)
    generated(model, prompt(3, 9), 42, assistant=spec)
    several = spec.choice(model)
    assert (single.tokens, several.tokens) == (47, 3 * 41)
    generated(model, prompt(), 12, assistant=spec)
    assert spec.choice(model).tokens == 47 + 11
    assert spec.choice(PeftModel(model, LoraConfig(target_modules=["q_proj"]))).tokens == 47 + 11
    with pytest.raises(SettingTypeError, match=r"SelfSpec.choice takes a causal LM"):
        spec.choice("model")


def test_disturbed_timings_do_not_count():
    watch = Stopwatch(exit_plan(2))
    watch.seconds = {"early": [5.0, 50.0], "full": [9.0, 12.0], "few": [12.0, 40.0], "many": [24.0, 90.0]}
    watch.seconds["draft"] = [5.5, 60.0]
    watch.complete()
    later = {"early": [7.0], "full": [99.0], "few": [11.5, 99.0], "many": [23.5], "draft": [99.0]}
    for name, times in later.items():
        watch.seconds[name] += times
    assert watch.complete() == ForwardCosts(1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 4)
    # Two tokens that took less than one, many less than two, and a part of the model longer than all of it.
    watch = Stopwatch(exit_plan(2), LayerPlan(4, frozenset(), frozenset([1])))
    watch.seconds = {"early": [9.5], "attention": [9.5], "full": [9.0], "few": [8.5], "many": [8.0], "draft": [5.0]}
    assert watch.costs() == ForwardCosts(9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4)


class Slow(dict):
    """Lets other threads in between reading and writing."""

    def __getitem__(self, layer):
        time.sleep(0.002)
        return super().__getitem__(layer)


def test_a_study_is_complete_while_threads_add_to_it():
    """No text is lost, and each choice has one text more behind it."""
    study, bad = ExitStudy(4), np.zeros((1, 40))

    study.timings.seconds = {"early": [3.0], "full": [9.0], "few": [9.5], "many": [10.0], "draft": [3.0]}

    def add(_):
        return study.add(Slow({layer: [Trace(bad, bad)] for layer in (1, 2, 3)}), [FixedLength(1)], 25, rounds=())

    with ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(add, range(12)))
    assert sorted(choice.tokens for choice in choices) == [40 * count for count in range(1, 13)]
    assert study.timings.texts == 12


def test_timings_use_no_random_numbers(monkeypatch):
    """Those of the generation go on where they were."""
    model, states = tiny_llama(), []
    model.generation_config.eos_token_id = None
    spec = SelfSpec.layerskip()
    original = probing.ProbingDraft.measure

    def watched(self, *args):
        before = torch.get_rng_state()
        complete = original(self, *args)
        states.append(torch.equal(before, torch.get_rng_state()))
        return complete

    monkeypatch.setattr(probing.ProbingDraft, "measure", watched)
    model.generate(prompt(), max_new_tokens=48, do_sample=True, pad_token_id=0, assistant=spec)
    assert states == [True, True]


def test_the_chosen_exit_is_used(machine):
    model, spec = tiny_llama(), SelfSpec.layerskip()
    machine.forwards_cost()
    generated(model, prompt(), assistant=spec)
    choice = spec.choice(model)
    assert (choice.layer, choice.stop) == (3, FixedLength(6))
    assert choice.reuse_from == 4  # 0.1 for another forward, 0.03 spared for each token
    assert spec.stats.plan == "###..."
    for tokens in (48, 12):  # also where no probe is due
        generated(model, prompt(), tokens, assistant=spec)
        assert spec.stats.plan == "###..."
        assert 0 < max(spec.stats.accepted_lengths) <= 6


@pytest.mark.parametrize("tokens", [3, 5])
def test_states_are_reused_where_that_pays(machine, tokens):
    model, drafts, spec = tiny_llama(), [], SelfSpec.layerskip(num_draft=tokens)
    machine.forwards_cost()
    spec = replace(spec, draft=drafts_into(drafts, spec.draft))
    plain = generated(model, prompt())
    for _ in range(2):
        drafts.clear()
        assert torch.equal(generated(model, prompt(), assistant=spec), plain)
    lengths = {draft.size: draft.states is not None for draft in drafts if draft.size}
    assert max(lengths) == tokens
    assert lengths == {length: 0.01 * spec.choice(model).layer * length >= 0.1 for length in lengths}


def test_where_no_draft_pays_none_is_made(machine):
    model, spec = tiny_llama(), SelfSpec.layerskip()
    machine.forwards_cost(fixed=1.0, attention=0.0, mlp=0.0, token=0.0, step=50.0)
    generated(model, prompt(), assistant=spec)
    assert torch.equal(generated(model, prompt(), assistant=spec), generated(model, prompt()))
    assert spec.choice(model).layer is None
    assert (spec.stats.drafted, spec.stats.plan) == (0, "######")


def test_given_parts_are_kept_by_the_probe():
    model = tiny_llama()
    only_length = SelfSpec.layerskip(exit_layer=3)
    generated(model, prompt(), 24, assistant=only_length)
    assert set(only_length.choice(model).by_layer) == {3}
    only_exit = SelfSpec.layerskip(num_draft=2)
    generated(model, prompt(), 24, assistant=only_exit)
    assert only_exit.choice(model).stop == FixedLength(2)
    own = SelfSpec.layerskip(stop=lambda ids, logits, states: torch.ones(len(ids), dtype=torch.bool))
    for _ in range(2):
        generated(model, prompt(), 24, assistant=own)
    assert own.stats.drafted <= own.stats.rounds  # its own rule ends each draft after a token


def test_a_failing_probe_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_llama()

    def fail(self, states):
        raise RuntimeError("in the probe")

    monkeypatch.setattr(Exits, "head", fail)
    with unchanged(model), pytest.raises(RuntimeError, match="in the probe"):
        generated(model, prompt(), assistant=SelfSpec.layerskip())


def test_models_whose_exits_cannot_be_compared() -> None:
    model, spec = build("gpt_bigcode"), SelfSpec.layerskip(1, 2)
    with pytest.raises(UnsupportedModelError, match=r"GPTBigCodeForCausalLM .* exit_layer and a num_draft"):
        generated(model, prompt(), assistant=SelfSpec.layerskip())
    assert torch.equal(generated(model, prompt(), assistant=spec), generated(model, prompt()))


@pytest.mark.every_run("llama")
@pytest.mark.parametrize("name", ["llama", "opt", "qwen3_next"])
def test_single_exits_that_are_tried_change_nothing(name, monkeypatch):
    """Each in turn, on the last tokens of a text, before one looks as if it paid."""
    tried, add_trial, model = [], ExitStudy.add_trial, build(name)
    monkeypatch.setattr(ExitStudy, "is_promising", False)
    monkeypatch.setattr(ExitStudy, "add_trial", lambda *trial: tried.append(trial) or add_trial(*trial))
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    for rows in (1, 3):
        inputs = ragged_batch((4, 9, 6)[:rows], seed=11)
        plain = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, assistant=SelfSpec.layerskip()), plain)
        assert tried
        tried.clear()


def test_single_exits_decide_late_and_for_one_process() -> None:
    """However many rows a trial has, all three places are tried twice; a file never tells of it."""
    study = ExitStudy(12)
    study.is_promising = False
    hopeless = Trace(np.zeros((8, 16)), np.full((8, 16), 0.9))
    for tried in range(6):
        assert study.choice is None, tried
        study.add_trial(study.next_exit(), hopeless, [FixedLength(2)], 8)
    assert study.choice is not None
    assert study.is_idle
    assert sorted(study.choice.by_layer) == [2, 4, 8]
    assert study.state() == {}
