"""SelfSpec.layerskip, its probe, and early_exit_only."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import tiny_gpt2, tiny_llama
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from hf_selfspec import (
    ConfidenceThreshold,
    EarlyExit,
    ExitChoice,
    FixedLength,
    SelfSpec,
    SettingError,
    SettingTypeError,
)
from hf_selfspec.bench.trained import _traces
from hf_selfspec.draft import probe
from hf_selfspec.model.exits import Exits
from hf_selfspec.search.exit_choice import ForwardCosts, Replay, Trace, choose, draft_lengths, replay

COSTS = ForwardCosts(fixed=1.0, layer=2.0, token=0.5, step=0.25, num_layers=4)


def prompt(length: int = 6, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(5))


def greedy(model, ids, tokens=48, **kwargs):
    model.generation_config.eos_token_id = None
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **kwargs
    )


# Costs and replay ----------------------------------------------------------------------------------------------------


def test_costs_are_fitted_to_three_forwards():
    one, full, many = 1 + 2 * 2.0, 1 + 4 * 2.0, 1 + 4 * (2.0 + 0.5 * 7)
    fitted = ForwardCosts.fit(early=2, early_one=one, full_one=full, full_many=many, many=8, layers=4)
    assert (fitted.fixed, fitted.layer, fitted.token, fitted.step) == (1.0, 2.0, 0.5, 0.0)


def test_cost_of_a_round():
    assert COSTS.plain() == 1 + 4 * 2
    assert COSTS.draft(1) == 1 + 2 + 0.25
    # The last drafted token goes through 1 layer on its own; then 3 tokens go through 3 layers.
    assert COSTS.verify(1, 2) == (1 + 1 * 2) + (1 + 3 * (2 + 2 * 0.5))
    assert COSTS.verify(1, 0) == COSTS.plain()


def test_fixed_drafts_replayed_by_hand():
    accept = np.array([[1, 1, 0, 1, 0, 0, 1.0]])
    found = replay(Trace(accept, accept), FixedLength(2), 1, COSTS, 25)
    # Rounds: from 0 two accepted (to 3); from 3 one (to 5); from 5 none (to 6); from 6 only one token is left.
    seconds = 3 * (2 * COSTS.draft(1) + COSTS.verify(1, 2)) + COSTS.draft(1) + COSTS.verify(1, 1)
    assert found == Replay(pytest.approx(seconds), 7, 4)


def test_confident_drafts_replayed_by_hand():
    accept = np.array([[1, 1, 0, 1, 0, 0, 1.0]])
    sure = np.array([[0.9, 0.2, 0.9, 0.9, 0.9, 0.1, 0.9]])
    assert draft_lengths(sure, ConfidenceThreshold(0.5), 3).tolist() == [[2, 1, 3, 3, 2, 1, 1]]
    found = replay(Trace(accept, sure), ConfidenceThreshold(0.5), 1, COSTS, 3)
    # Rounds from 0 (2 drafted, both accepted), 3 (3 drafted, one), 5 (one, none), 6 (one, accepted).
    assert (found.drafted, found.accepted) == (7, 4)


def test_replay_of_likely_acceptance_is_the_mean_over_outcomes():
    generator = np.random.default_rng(0)
    accept, sure = generator.random((1, 12)), generator.random((1, 12))
    rule, total = ConfidenceThreshold(0.3), 0.0
    runs = 4000
    for _ in range(runs):
        outcome = (generator.random(12) < accept[0]).astype(float)
        # An outcome is drawn for each position, so a walk along it is one run of the decoder.
        total += replay(Trace(outcome[None], sure), rule, 2, COSTS, 4).seconds
    expected = replay(Trace(accept, sure), rule, 2, COSTS, 4).seconds
    assert total / runs == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("rule", [FixedLength(3), ConfidenceThreshold(0.02)])
def test_replay_foretells_what_decoding_does(rule):
    model = tiny_llama()
    ids, tokens = prompt(), 80
    spec = SelfSpec(draft=EarlyExit(3), stop=rule)
    text = greedy(model, ids, tokens, assistant=spec)
    trace = _traces(model, text, ids.shape[1], [3], None)[3]
    found = replay(Trace(trace.accept[:, 1:], trace.confidence[:, 1:]), rule, 2, COSTS, 25)  # after the prefill's token
    assert 0 < spec.stats.accepted < spec.stats.drafted
    # A rejected draft goes on along another text, and the end of the text cuts the last drafts.
    assert found.accepted == pytest.approx(spec.stats.accepted, abs=2)
    assert found.drafted == pytest.approx(spec.stats.drafted, rel=0.1)


def test_the_fastest_exit_is_chosen():
    bad, good = np.zeros((1, 40)), np.ones((1, 40))
    traces = {1: [Trace(bad, bad)], 2: [Trace(good, good)], 3: [Trace(good, good)]}
    choice = choose(traces, [FixedLength(2), FixedLength(4)], COSTS, 25)
    assert (choice.layer, choice.stop) == (2, FixedLength(4))
    assert choice.by_layer[2] == choice.expected_speedup > choice.by_layer[3] > 1 > choice.by_layer[1]
    assert choice.acceptance_rate == pytest.approx(1.0)
    assert "exit layer 2, FixedLength(num_tokens=4)" in str(choice)


def test_no_draft_is_chosen_where_none_pays():
    bad = np.zeros((1, 40))
    choice = choose({1: [Trace(bad, bad)], 2: [Trace(bad, bad)]}, [FixedLength(1)], COSTS, 25)
    assert choice.layer is None
    assert "no draft" in str(choice)


# The probe while generating -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny_llama, lambda: tiny_gpt2(128)])
@pytest.mark.parametrize("rows", [1, 3])
def test_probing_changes_no_token(build, rows):
    model, spec = build(), SelfSpec.layerskip()
    assert spec.choice(model) is None
    for _ in range(3):
        ids = prompt(rows=rows)
        assert torch.equal(greedy(model, ids, assistant=spec), greedy(model, ids))
    choice = spec.choice(model)
    assert isinstance(choice, ExitChoice)
    assert set(choice.by_layer) == set(range(1, model.config.num_hidden_layers))
    assert choice.tokens >= 3 * 32 * rows
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_four_texts_are_probed_and_the_choice_is_kept(monkeypatch):
    model, spec, probes = tiny_llama(), SelfSpec.layerskip(), []
    original = probe.ProbingDraft._probe
    monkeypatch.setattr(probe.ProbingDraft, "_probe", lambda self, text: probes.append(1) or original(self, text))
    greedy(model, prompt(), 16, assistant=spec)  # too short to probe
    assert spec.choice(model) is None
    for _ in range(6):
        greedy(model, prompt(), assistant=spec)
    assert len(probes) == 4
    other = tiny_llama()
    assert spec.choice(other) is None
    assert copy.deepcopy(spec).choice(model) is None
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_the_chosen_exit_is_used(monkeypatch):
    model, spec = tiny_llama(), SelfSpec.layerskip()
    cheap = ForwardCosts(fixed=0.1, layer=2.0, token=0.01, step=0.0, num_layers=6)
    monkeypatch.setattr(probe.ProbingDraft, "_costs", lambda self, text: cheap)
    for _ in range(2):
        greedy(model, prompt(), assistant=spec)
    choice = spec.choice(model)
    assert choice.layer is not None
    assert spec.stats.plan == "#" * choice.layer + "." * (6 - choice.layer)
    assert spec.stats.drafted > 0


def test_where_no_draft_pays_none_is_made(monkeypatch):
    model, spec = tiny_llama(), SelfSpec.layerskip()
    expensive = ForwardCosts(fixed=1.0, layer=0.0, token=0.0, step=50.0, num_layers=6)
    monkeypatch.setattr(probe.ProbingDraft, "_costs", lambda self, text: expensive)
    greedy(model, prompt(), assistant=spec)
    assert torch.equal(greedy(model, prompt(), assistant=spec), greedy(model, prompt()))
    assert spec.choice(model).layer is None
    assert (spec.stats.drafted, spec.stats.plan) == (0, "######")


def test_given_parts_are_kept_by_the_probe():
    model = tiny_llama()
    only_length = SelfSpec.layerskip(exit_layer=3)
    greedy(model, prompt(), assistant=only_length)
    assert set(only_length.choice(model).by_layer) == {3}
    only_exit = SelfSpec.layerskip(num_draft=2)
    greedy(model, prompt(), assistant=only_exit)
    assert only_exit.choice(model).stop == FixedLength(2)
    own = SelfSpec.layerskip(stop=lambda ids, logits, states: torch.ones(len(ids), dtype=torch.bool))
    for _ in range(2):
        greedy(model, prompt(), assistant=own)
    assert own.stats.drafted <= own.stats.rounds  # its own rule ends each draft after a token


def test_sampling_with_a_probe_runs_and_chooses():
    model, spec = tiny_llama(), SelfSpec.layerskip()
    model.generation_config.eos_token_id = None
    options = {"do_sample": True, "top_p": 0.9, "temperature": 0.7, "max_new_tokens": 48, "pad_token_id": 0}
    ids = model.generate(prompt(), attention_mask=torch.ones(1, 6, dtype=torch.long), assistant=spec, **options)
    assert ids.shape == (1, 54)
    assert spec.choice(model) is not None


def test_threads_that_probe_and_threads_that_do_not_share_a_model():
    model, ids = tiny_llama(), prompt()
    model.generation_config.eos_token_id = None
    expected = greedy(model, ids)
    model.lm_head.register_forward_pre_hook(lambda *_: time.sleep(0.002))  # lets other threads in
    specs = [None, SelfSpec.layerskip(), SelfSpec.layerskip(), None] * 3

    def run(spec):
        return [greedy(model, ids, **({} if spec is None else {"assistant": spec})) for _ in range(4)]

    with ThreadPoolExecutor(len(specs)) as pool:
        for found in pool.map(run, specs):
            assert all(torch.equal(text, expected) for text in found)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_failing_probe_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_llama()

    def fail(self, states):
        raise RuntimeError("in the probe")

    monkeypatch.setattr(Exits, "head", fail)
    with pytest.raises(RuntimeError, match="in the probe"):
        greedy(model, prompt(), assistant=SelfSpec.layerskip())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Settings ------------------------------------------------------------------------------------------------------------


def test_layerskip_is_an_early_exit_with_a_stop_rule():
    assert SelfSpec.layerskip(6, 4) == SelfSpec(draft=EarlyExit(6), stop=FixedLength(4), max_draft=12)
    rule = ConfidenceThreshold(0.4)
    assert SelfSpec.layerskip(6, stop=rule, max_draft=9) == SelfSpec(draft=EarlyExit(6), stop=rule, max_draft=9)
    assert SelfSpec.layerskip(6, 20).max_draft == 20


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: SelfSpec.layerskip(0), SettingError, "EarlyExit(layer) must be at least 1, got 0"),
        (lambda: SelfSpec.layerskip("6"), SettingTypeError, "got '6'"),
        (lambda: SelfSpec.layerskip(6, 0), SettingError, "FixedLength(num_tokens) must be at least 1, got 0"),
        (lambda: SelfSpec.layerskip(6, 2, FixedLength(2)), SettingError, "give one of the two"),
        (lambda: SelfSpec(stop=None), SettingTypeError, "None goes with EarlyExit"),
        (lambda: SelfSpec.early_exit_only(0), SettingError, "EarlyExitOnly(layer) must be at least 1, got 0"),
        (lambda: SelfSpec.early_exit_only(None), SettingTypeError, "got None"),
    ],
)
def test_wrong_settings(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_exit_that_does_not_exist():
    with pytest.raises(SettingError, match=r"EarlyExitOnly\(layer=6\) is not possible: .* has 6 layers"):
        greedy(tiny_llama(), prompt(), assistant=SelfSpec.early_exit_only(6))


# Early exit only -----------------------------------------------------------------------------------------------------


def truncated(model, layers):
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    small = type(model)(config).eval()
    small.load_state_dict({name: value for name, value in model.state_dict().items() if name in small.state_dict()})
    return small


@pytest.mark.parametrize("build", [tiny_llama, lambda: tiny_gpt2(128)])
def test_early_exit_only_is_the_truncated_model(build):
    model = build()
    assert isinstance(model, (LlamaForCausalLM, GPT2LMHeadModel))
    small, spec = truncated(model, 2), SelfSpec.early_exit_only(2)
    for rows in (1, 3):
        ids = prompt(rows=rows)
        found = greedy(model, ids, assistant=spec)
        assert torch.equal(found, greedy(small, ids))
        assert not torch.equal(found, greedy(model, ids))
    assert (spec.stats.drafted, spec.stats.plan) == (0, "##....")


def test_early_exit_only_samples_from_the_truncated_model():
    model = tiny_llama()
    scores = greedy(
        model, prompt(), 4, assistant=SelfSpec.early_exit_only(2), return_dict_in_generate=True, output_logits=True
    ).logits
    expected = greedy(truncated(model, 2), prompt(), 4, return_dict_in_generate=True, output_logits=True).logits
    assert torch.allclose(torch.stack(scores), torch.stack(expected), atol=1e-5)
