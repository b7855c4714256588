"""How fast a model is with what was fitted, and what is told of parts that do not pay."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fitted import EXIT, arguments, rows
from helpers.models import tiny_llama
from hf_selfspec import EarlyExitAdapter, Lookup, SelfSpec, attach, fit_adapter, fit_exit_heads, fit_mtp, fit_probe
from hf_selfspec.modules.adapter import Adapter
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.train import fit as fits
from hf_selfspec.train.fit import speed_figures, speeds

TEXT = torch.tensor([row["input_ids"] for row in rows(6)])


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
    """Found by generation with them, with the settings of the model itself, which others may use meanwhile; they are
    written once, with all figures."""
    model, written, save = tiny_llama(3, factor=0.05), list[Path](), DraftModule.save_pretrained
    configs, usual = [], model.generation_config
    monkeypatch.setattr(
        DraftModule, "save_pretrained", lambda part, folder: written.append(folder) or save(part, folder)
    )
    model.register_forward_pre_hook(lambda *_: configs.append(model.generation_config))
    args, out = arguments(tmp_path, max_steps=2), tmp_path / "out"
    part = fit_function(model, None, rows(20), args=args, output_dir=out, block_size=32, **chosen)
    assert part.about["figures"]["speed over plain generate"] > 0
    assert written == [out]
    assert type(part).load(out).about == part.about
    assert not any(module.training for module in model.modules())
    assert configs
    assert all(config is usual for config in configs)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("free", "pays"), [(0.5, False), (1.5, True)])
def test_parts_that_add_nothing_to_free_drafts(free: float, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which only calls take time: 2 seconds without an assistant, 1 with the part, and with free drafts
    so many, or with both twice as many."""
    model, part, clock = tiny_llama(3), Adapter(EXIT, 64, 4), [0.0]
    spec, original = SelfSpec.kangaroo(part), type(model).generate

    def generate(model: Any, *args: Any, **options: Any) -> Any:
        draft = options["assistant"] and options["assistant"].draft
        clock[0] += {False: 2.0, EarlyExitAdapter: 1.0, Lookup: free}.get(draft and type(draft), 2 * free)
        return original(model, *args, **options)

    monkeypatch.setattr(type(model), "generate", generate)
    monkeypatch.setattr(fits, "perf_counter", lambda: clock[0])
    if pays:
        figures = speed_figures(part, model, TEXT, spec)
    else:
        with pytest.warns(UserWarning, match=r"this adapter does not pay: .* at 2\.00 times .* 2\.00 .* 4\.00"):
            figures = speed_figures(part, model, TEXT, spec)
    assert list(figures.values()) == [2.0, round(1 / free, 2), round(2 / free, 2)]
    assert speed_figures(part, model, TEXT[:0], spec) == {}


def test_parts_are_compared_to_the_model_alone() -> None:
    """Not to what is attached to it."""
    model = tiny_llama(3)
    with attach(model, SelfSpec.lookup()) as spec:
        speeds(model, TEXT[:2], 4, [SelfSpec.lookup()])
        assert spec.stats is None


def test_a_fit_is_not_lost_to_its_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[float]:
        raise IndexError

    monkeypatch.setattr(fits, "speeds", fail)
    args, out = arguments(tmp_path, max_steps=2), tmp_path / "out"
    with pytest.warns(UserWarning, match="adapter: its speed could not be measured"):
        adapter = fit_adapter(tiny_llama(3), None, rows(20), exit_layer=EXIT, block_size=32, args=args, output_dir=out)
    assert all(map(torch.equal, Adapter.load(out).state_dict().values(), adapter.state_dict().values()))
