"""How fast a model is with a part that is being fitted: when fits end, and what is told of parts that do not pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from test_fitting import EXIT, arguments, rows
from transformers import GenerationConfig

from hf_selfspec import (
    Adapter,
    LinearProbe,
    SelfSpec,
    SettingError,
    SettingTypeError,
    fit_adapter,
    fit_exit_heads,
    fit_probe,
)
from hf_selfspec.train import speed
from hf_selfspec.train.speed import HeldOutSpeed, greedily, tell_whether_it_pays


def speeds(monkeypatch: pytest.MonkeyPatch, *found: float) -> list[dict[str, torch.Tensor]]:
    """Has looks at the speed find these, then the last one again; returns the weights that each look was at."""
    coming, seen = iter(found), list[dict[str, torch.Tensor]]()

    def of(self: HeldOutSpeed, part: Any) -> float:
        seen.append({name: value.clone() for name, value in part.state_dict().items()})
        return next(coming, found[-1])

    monkeypatch.setattr(HeldOutSpeed, "of", of)
    return seen


def test_a_fit_ends_when_it_gets_no_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest weights are kept, and a gain of a hundredth is none."""
    seen = speeds(monkeypatch, 1.0, 1.2, 1.21, 1.1, 9.0)
    args = arguments(tmp_path, max_steps=40, eval_steps=3)
    adapter = fit_adapter(tiny_llama(), None, rows(), exit_layer=EXIT, block_size=32, args=args, patience=2)
    assert adapter.about["recipe"]["steps"] == 12
    assert len(seen) == 5  # the last one is of the whole fit
    for name, value in adapter.state_dict().items():
        assert torch.equal(value, seen[1][name])
    assert any(not torch.equal(value, seen[3][name]) for name, value in adapter.state_dict().items())
    assert adapter.about["figures"]["speed over plain generate"] == 9.0


def test_a_fit_that_gets_faster_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = speeds(monkeypatch, 1.0, 1.1, 1.2, 1.3)
    args = arguments(tmp_path, max_steps=8, eval_steps=2)
    probe = fit_probe(tiny_llama(), None, rows(), exit_layer=EXIT, block_size=32, args=args, patience=1)
    assert probe.about["recipe"]["steps"] == 8
    assert all(torch.equal(value, seen[-1][name]) for name, value in probe.state_dict().items())


def test_all_kinds_of_parts_have_a_speed(tmp_path: Path) -> None:
    """Found by generation with them, in the middle of a fit, too."""
    model = tiny_llama(factor=0.05)
    options: dict[str, Any] = {"block_size": 32, "patience": 1}
    for fit, chosen in (
        (fit_adapter, {"exit_layer": EXIT}),
        (fit_probe, {"exit_layer": EXIT}),
        (fit_exit_heads, {"layers": [EXIT], "copied": True, "epsilons": (0.1, 0.9)}),
    ):
        args = arguments(tmp_path, max_steps=4, eval_steps=2)
        part = fit(model, None, rows(), args=args, **options, **chosen)
        assert part.about["figures"]["speed over plain generate"] > 0
    assert not any(module.training for module in model.modules())


def test_speed_is_that_of_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds a token in turn, by a clock on which a call with the part takes half as long."""
    model, now = tiny_llama(), [0.0]
    original = type(model).generate

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        now[0] += 1.0 if "assistant" in options else 2.0
        return original(self, *args, **options)

    monkeypatch.setattr(type(model), "generate", generate)
    monkeypatch.setattr(speed, "perf_counter", lambda: now[0])
    part = Adapter(EXIT, 64, 4).train()
    text = torch.tensor([row["input_ids"] for row in rows(6)])
    usual = model.generation_config
    assert HeldOutSpeed(model, text, SelfSpec.kangaroo).of(part) == pytest.approx(2.0)
    assert part.training
    assert model.generation_config is usual


def test_a_part_that_cannot_draft_has_no_speed() -> None:
    def refuse(part: Any) -> SelfSpec:
        raise SettingError("it reaches no threshold")

    text = torch.tensor([row["input_ids"] for row in rows(2)])
    assert HeldOutSpeed(tiny_llama(), text, refuse).of(LinearProbe(EXIT, 64, False)) == 0.0


@pytest.mark.parametrize(("found", "is_told"), [(0.97, True), (1.4, False)])
def test_parts_that_do_not_pay_are_told(
    found: float, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speeds(monkeypatch, found)
    known = HeldOutSpeed(tiny_llama(), torch.ones(2, 8, dtype=torch.long), SelfSpec.kangaroo)
    part = Adapter(EXIT, 64, 4)
    assert tell_whether_it_pays(part, known) == {"speed over plain generate": found}
    assert ("adapter: with it, the model generates at 0.97 times" in caplog.text) == is_told
    empty = HeldOutSpeed(tiny_llama(), torch.ones(0, 8, dtype=torch.long), SelfSpec.kangaroo)
    assert tell_whether_it_pays(part, empty) == {}


def test_texts_are_written_without_settings_of_the_model() -> None:
    model = tiny_llama()
    usual = model.generation_config = GenerationConfig(
        do_sample=True, num_beams=3, repetition_penalty=2.0, eos_token_id=[4, 5]
    )
    with greedily(model, 7) as ends:
        assert ends == {4, 5}
        found = model.generation_config
        assert (found.max_new_tokens, found.num_beams, found.repetition_penalty) == (7, None, None)
    assert model.generation_config is usual


def test_wrong_patience(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exit_layer": EXIT, "block_size": 32, "args": arguments(tmp_path, max_steps=1)}
    with pytest.raises(SettingError, match=r"fit_adapter\(patience\) must be at least 1, got 0"):
        fit_adapter(tiny_llama(), None, rows(), **options, patience=0)
    with pytest.raises(SettingTypeError, match=r"fit_adapter\(patience\)"):
        fit_adapter(tiny_llama(), None, rows(), **options, patience="often")
    with pytest.raises(SettingError, match="no held-out text"):
        fit_adapter(tiny_llama(), None, rows(4), **options, patience=1)
    with pytest.raises(SettingError, match="no held-out text"):
        fit_probe(tiny_llama(), None, rows(), **options, do_sample=True, patience=1)
