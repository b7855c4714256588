"""When fits end, how fast a model is with what was fitted, and what is told of parts that do not pay."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState, trainer
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_utils import EvalPrediction

from helpers.fitted import EXIT, arguments, rows
from helpers.models import tiny_llama
from hf_selfspec import (
    EarlyExitAdapter,
    SelfSpec,
    attach,
    fit_adapter,
    fit_exit_heads,
    fit_mtp,
    fit_probe,
)
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.modules.adapter import Adapter
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.train import fit_trainer
from hf_selfspec.train.fit import FitModule
from hf_selfspec.train.fit_trainer import speed_figures, speeds
from hf_selfspec.train.probe import ProbeFit


def agreements(monkeypatch: pytest.MonkeyPatch, *values: float) -> list[dict[str, torch.Tensor]]:
    """Has evaluations give these, then the last one again; returns the weights that each was of."""
    coming, evaluated_weights = iter(values), list[dict[str, torch.Tensor]]()

    def means(self: FitModule, evaluated: Any) -> dict[str, float]:
        evaluated_weights.append({name: value.clone() for name, value in self.part.state_dict().items()})
        return dict.fromkeys([*self.names, "agreement"], next(coming, values[-1]))

    monkeypatch.setattr(FitModule, "means", means)
    return evaluated_weights


def fit(fit_function: Any, folder: Path, text: int = 20, **changed: Any) -> Any:
    """A fit with ``patience``, whose other arguments are those of the Trainer."""
    of_fit = {name: changed.pop(name) for name in ("patience", "output_dir", "do_sample") if name in changed}
    args = arguments(folder, **changed)
    return fit_function(tiny_llama(3), None, rows(text), exit_layer=EXIT, block_size=32, args=args, **of_fit)


def is_like(part: Any, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, weights[name]) for name, value in part.state_dict().items())


def test_a_fit_ends_when_it_agrees_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best weights are kept, also of a probe for sampling. The last steps are evaluated at the end."""
    evaluated = agreements(monkeypatch, 0.1, 0.3, 0.3, 0.2, 0.9)
    adapter = fit(fit_adapter, tmp_path, max_steps=40, eval_steps=3, patience=2)
    assert adapter.about["recipe"]["steps"] == 12
    assert [is_like(adapter, weights) for weights in evaluated] == [False, True, False, False, True]
    evaluated = agreements(monkeypatch, 0.1, 0.2, 0.3, 0.4)
    probe = fit(fit_probe, tmp_path, max_steps=7, eval_steps=2, patience=1, do_sample=True)
    assert probe.about["recipe"]["steps"] == 7
    assert [is_like(probe, weights) for weights in evaluated] == [False, False, False, True, True]


def test_a_fit_that_resumes_knows_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And how often it has not become better."""
    evaluated = agreements(monkeypatch, 0.1, 0.3, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1)
    kept = {"save_strategy": "steps", "save_steps": 4, "eval_steps": 2, "max_steps": 20, "patience": 4}

    class Killed(TrainerCallback):
        def on_step_begin(self, args: Any, state: TrainerState, control: Any, **options: Any) -> None:
            if state.global_step == 7:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "DEFAULT_CALLBACKS", [*DEFAULT_CALLBACKS, Killed])
        with pytest.raises(KeyboardInterrupt):
            fit(fit_adapter, tmp_path, **kept)
    adapter = fit(fit_adapter, tmp_path, **kept)
    assert is_like(adapter, evaluated[1])
    assert adapter.about["recipe"]["steps"] == 12


def test_what_does_not_depend_on_the_module_does_not_count() -> None:
    of_probe: Any = ProbeFit(exit_layer=EXIT)
    module = FitModule(Adapter(EXIT, 64, 4), None, of_probe)  # type: ignore[arg-type]  # nothing of a model is read
    module.names = ("agreement_with_the_whole_model", "accepted")
    means = module.means(EvalPrediction(np.array([[[1.0, 0.0], [0.5, 0.0]]]), None))
    assert means == {"agreement_with_the_whole_model": 0.75, "accepted": 0.0, "agreement": 0.75}


@pytest.mark.filterwarnings("ignore:this MTP head does not pay")
@pytest.mark.every_run("fit_mtp-.*")
@pytest.mark.parametrize(
    ("fit_function", "chosen"),
    [
        (fit_adapter, {"exit_layer": EXIT}),
        (fit_probe, {"exit_layer": EXIT}),
        (fit_exit_heads, {"layers": [EXIT], "copied": True, "epsilons": (0.1, 0.9)}),
        (fit_mtp, {"steps": 2, "head_rows": 20}),
    ],
)
def test_parts_have_a_speed(
    fit_function: Any, chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by generation with them; they are written once, with all figures."""
    model, written, save = tiny_llama(3, factor=0.05), list[Path](), DraftModule.save_pretrained
    monkeypatch.setattr(
        DraftModule, "save_pretrained", lambda part, folder: written.append(folder) or save(part, folder)
    )
    args, out = arguments(tmp_path, max_steps=2, eval_steps=2), tmp_path / "out"
    part = fit_function(model, None, rows(20), args=args, output_dir=out, block_size=32, patience=1, **chosen)
    assert part.about["figures"]["speed over plain generate"] > 0
    assert written.count(out) == 1
    assert type(part).load(out).about == part.about
    assert not any(module.training for module in model.modules())


class Clock:
    """Seconds that only calls of ``generate`` take: 2 without an assistant, and 1 with one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, with_free: float = 1.0) -> None:
        self.now = 0.0
        original = type(model).generate

        def generate(model: Any, *args: Any, **options: Any) -> Any:
            spec = options.get("assistant")
            self.now += 2.0 if spec is False else 1.0 if isinstance(spec.draft, EarlyExitAdapter) else with_free
            return original(model, *args, **options)

        monkeypatch.setattr(type(model), "generate", generate)
        monkeypatch.setattr(fit_trainer, "perf_counter", lambda: self.now)


TEXT = torch.tensor([row["input_ids"] for row in rows(6)])


def test_parts_are_compared_to_the_model_alone() -> None:
    """Not to what is attached to it."""
    model = tiny_llama(3)
    with attach(model, SelfSpec.lookup()) as spec:
        speeds(model, TEXT[:2], 4, [SelfSpec.lookup()])
        assert spec.stats is None
        model.generate(TEXT[:1], max_new_tokens=2)
        assert spec.stats is not None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("with_free", "pays"), [(0.5, False), (1.5, True)])
def test_parts_that_add_nothing_to_free_drafts(with_free: float, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free drafts, and both together, take so many seconds; the part alone 1 and plain generate 2."""
    model = tiny_llama(3)
    Clock(monkeypatch, model, with_free)
    part, usual = Adapter(EXIT, 64, 4).train(), model.generation_config

    def slower_together(*args: Any) -> list[float]:
        alone, free, together = speeds(*args)
        return [alone, free, together / 2]

    monkeypatch.setattr(fit_trainer, "speeds", slower_together)
    if pays:
        figures = speed_figures(part, model, TEXT, SelfSpec.kangaroo)
    else:
        with pytest.warns(UserWarning, match=r"this adapter does not pay: .* at 2\.00 times .* 2\.00 .* 4\.00"):
            figures = speed_figures(part, model, TEXT, SelfSpec.kangaroo)
    assert part.training
    assert model.generation_config is usual
    assert figures["speed over plain generate"] == 2.0
    assert figures["speed of free drafts alone"] == round(2 / with_free, 2)
    assert speed_figures(part, model, TEXT[:0], SelfSpec.kangaroo) == {}


def test_a_fit_is_not_lost_to_its_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[float]:
        raise IndexError

    monkeypatch.setattr(fit_trainer, "speeds", fail)
    with pytest.warns(UserWarning, match="adapter: its speed could not be measured"):
        adapter = fit(fit_adapter, tmp_path, 20, max_steps=2, output_dir=tmp_path / "out")
    assert is_like(Adapter.load(tmp_path / "out"), adapter.state_dict())


def test_wrong_patience(tmp_path: Path) -> None:
    for fit_function, settings, error, words in (
        (fit_adapter, {"patience": 0}, SettingError, r"fit_adapter\(patience\) must be at least 1, got 0"),
        (fit_adapter, {"patience": "often"}, SettingTypeError, r"fit_adapter\(patience\)"),
        (fit_adapter, {"patience": 1, "text": 4}, SettingError, r"patience\) needs held-out rows, and of 4 rows none"),
    ):
        with pytest.raises(error, match=words):
            fit(fit_function, tmp_path, **settings)
