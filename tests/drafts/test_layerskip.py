"""Early exits: which one drafts where none is given, and what is known of each."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, PreTrainedModel

from helpers.architectures import build
from helpers.calls import unchanged
from helpers.models import damp, ragged_batch, tiny_llama
from helpers.sampling import peak
from helpers.searches import Clock, generated, prompt
from hf_selfspec import Cascade, EarlyExit, Lookup, SelfSpec, SettingTypeError
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.model.anatomy import Anatomy


def test_five_exits_are_spread_over_the_depth() -> None:
    for layers, exits in ((2, [1]), (4, [1, 2, 3]), (6, [1, 2, 3, 4, 5]), (12, [2, 4, 6, 8, 10])):
        assert [arm.layer for arm in EarlyExit().arms(Anatomy.of(tiny_llama(layers)))] == exits


def exit_model(start: int, factor: float = 0.01) -> PreTrainedModel:
    """Eight layers, those from ``start`` on weigh so much."""
    model = tiny_llama(8, factor=1.0)
    damp(model, model.model.layers, start, factor)
    peak(model.model.norm)
    return model


@pytest.mark.times_decide
def test_the_fastest_exit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is right, deeper ones cost more, and shallower ones are wrong. No exit has the results of another."""
    model, spec = exit_model(4), SelfSpec.layerskip()
    plain = generated(model, prompt(), 150)
    clock = Clock().of(model, monkeypatch)
    assert spec.choice(model) is None
    with unchanged(model):
        assert torch.equal(generated(model, prompt(), 150, assistant=spec), plain)
    choice = spec.choice(model)
    assert choice.layer == 4
    assert spec.stats.plan == choice.plan.picture() == "####...."
    begun = clock.now
    generated(model, prompt(), 150, assistant=spec)
    assert clock.now - begun < 150 * 1.1 / 1.3
    assert choice.speedup == pytest.approx(1.44, abs=0.1)  # 4 tokens of 1.1 for 3 x 0.55 and 1.4
    spec.export_draft(tmp_path, model)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 4


@pytest.mark.times_decide
@pytest.mark.parametrize("free", [False, True])
def test_exits_that_do_not_pay_are_tried_in_little_of_the_time(free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exit_model(7, 30.0)  # the last layer decides
    spec = SelfSpec(Cascade([Lookup(0), EarlyExit()])) if free else SelfSpec.layerskip()
    clock = Clock().of(model, monkeypatch)

    def seconds(tokens: int, assistant: SelfSpec | None) -> float:
        begun = clock.now
        generated(model, prompt(), tokens, do_sample=True, assistant=assistant)
        return (clock.now - begun) / tokens

    plain, _, *ours = seconds(20, None), *(seconds(140, spec) for _ in range(4))
    assert spec.choice(model) is None
    assert sum(ours) / 3 <= 1.03 * plain


@pytest.mark.every_run("llama-1|gemma2-3")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, rows) for name in ("llama", "gemma2", "gpt_oss", "opt", "gpt_bigcode") for rows in (1, 3)),
        *(("falcon_h1", 1), ("qwen3_next", 1)),  # plain serves batches of states
    ],
)
def test_ids_are_plains_whatever_drafts(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exit, free drafts, both or nothing, from round to round."""
    model, chance, seen = build(name), random.Random(0), set[tuple[bool, str | None]]()

    def choose(controller: Controller, promised: Any, free: float = 0.0) -> str | None:
        seen.add((free > 0, source := chance.choice([None, *promised])))
        return source

    monkeypatch.setattr(Controller, "choose", choose)
    monkeypatch.setattr(Controller, "speedup", lambda *given: 2.0 * chance.randrange(2))
    inputs = ragged_batch((4, 9, 6)[:rows], seed=11)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    for spec in (SelfSpec.layerskip(), SelfSpec(Cascade([Lookup(), EarlyExit()]))):
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
    assert {source for _, source in seen} == {None, *(f"EarlyExit(layer={layer})" for layer in (1, 2, 3))}
    assert {is_free for is_free, _ in seen} == {False, True}


def test_lengths_of_drafts() -> None:
    """Three tokens, or what is given."""
    model = exit_model(2)
    for spec, most in ((SelfSpec.layerskip(3), 3), (SelfSpec.layerskip(3, num_draft=5), 5)):
        generated(model, prompt(), 24, assistant=spec)
        assert max(spec.stats.accepted_lengths) == most


@pytest.mark.times_decide
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_kinds_of_calls_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = exit_model(4), SelfSpec.layerskip()
    Clock().of(model, monkeypatch)
    generated(model, prompt(), 100, assistant=spec)
    single = spec.choice(model)
    assert single is not None
    generated(model, prompt(3, 9), 2, assistant=spec)
    assert spec.choice(model) is None
    generated(model, prompt(), 2, assistant=spec)
    assert spec.choice(model) == spec.choice(PeftModel(model, LoraConfig(target_modules=["q_proj"]))) == single
    assert replace(spec).choice(model) is None
    with pytest.raises(SettingTypeError, match=r"SelfSpec.choice takes a causal LM"):
        spec.choice("model")
