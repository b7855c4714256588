"""Exit heads: calibration, drafts that choose an exit for each token, fits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import check_lossless
from helpers.fitted import LAYERS, arguments, calibrated, heads_of, rows, weights
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from hf_selfspec import SelfSpec, attach, calibrate_exit_heads, fit_exit_heads
from hf_selfspec.errors import SettingError, SettingTypeError, UnsupportedModelError
from hf_selfspec.modules.draft_module import about
from hf_selfspec.modules.heads import METRICS, ExitHeads, Predictions, calibrate, default_layers, threshold


def unreached(name: str, words: str) -> Any:
    """The warning that heads reach none of the accuracies."""
    words = rf"{name}: these exit heads reach none of the accuracies from 0\.\d on .({words})"
    return pytest.warns(UserWarning, match=words)


def test_thresholds_are_the_loosest_that_are_right_often_enough() -> None:
    generator = torch.Generator().manual_seed(0)
    sure = torch.randint(0, 12, (40,), generator=generator) / 4  # some are equally sure
    right = (torch.rand(40, generator=generator) < 0.3 + sure / 5).float()
    for epsilon in (0.3, 0.5, 0.8, 0.95):
        enough = [value for value in sure.unique().tolist() if right[sure >= value].mean() >= epsilon]
        assert threshold(sure, right, epsilon) == (min(enough) if enough else None)


def test_calibrations() -> None:
    texts: list[Predictions] = [
        ({name: torch.tensor(sure) for name in METRICS}, torch.tensor(right).float())
        for sure, right in (
            ([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]], [[0, 1, 1], [0, 0, 0]]),
            ([[0.0, 1.0], [0.0, 1.0]], [[0, 0], [0, 0]]),
        )
    ]
    texts[0][0]["entropy"] = -texts[0][0]["entropy"]
    calibration = calibrate(texts, [0.4, 0.5, 0.9])
    assert calibration["tokens"] == 5
    assert calibration["thresholds"]["margin"] == [[0.0, 1.0, 2.0], [None, None, None]]
    assert calibration["thresholds"]["entropy"] == [[-3.0, None, None], [None, None, None]]
    assert calibration["auc"] == {"entropy": [0.0, None], "probability": [1.0, None], "margin": [1.0, None]}
    # First tokens come with the prompts, so three are drafted, or two.
    assert calibration["acceptance"]["margin"] == calibration["acceptance"]["probability"] == [2 / 3, 2 / 3, 1.0]
    assert calibration["acceptance"]["entropy"] == [2 / 3, None, None]
    assert calibration["metric"] == "probability"  # the first of those that tell best
    heads = ExitHeads([1, 2], 8, 5, about={"calibration": calibration})
    assert heads.draft_thresholds(0.6) == [0.0, math.inf]
    assert heads.draft_thresholds(0.7) == [2.0, math.inf]
    with pytest.raises(SettingError, match=r"epsilon=0\.7 is more than these exit heads reach: .* at best 0\.666 of"):
        heads.draft_thresholds(0.7, "entropy")
    with pytest.raises(SettingError, match="must be one of"):
        heads.draft_thresholds(0.5, "variance")


def test_layers_of_heads() -> None:
    assert default_layers(24, 4) == [4, 9, 14, 19]  # DSSD's own for 24 layers
    assert default_layers(4, 4) == [1, 2, 3]


def test_fits_of_heads(tmp_path: Path) -> None:
    model: LlamaForCausalLM = tiny_llama(factor=1.5)
    before = weights(model)
    args = arguments(tmp_path, max_steps=40, learning_rate=2e-2)
    options: dict[str, Any] = {"num_heads": 2, "block_size": 32, "args": args}
    heads = fit_exit_heads(model, None, rows(80), output_dir=tmp_path, **options)
    assert heads.layers == (2, 4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    figures, calibration = heads.about["figures"], heads.about["calibration"]
    assert figures["last loss"] < figures["first loss"] / 2
    assert heads.figures().items() <= figures.items()
    assert calibration["tokens"] == 4 * 24  # what the model writes after a quarter of each row
    assert ExitHeads.load(tmp_path).about == heads.about
    reached = [rate for rate in calibration["acceptance"][heads.metric] if rate is not None]
    assert figures["drafts accepted at best"] == pytest.approx(max(reached), abs=1e-3)
    check_lossless(model, SelfSpec.dssd(tmp_path, max(reached)), 8)
    # After few steps, with few parameters.
    with unreached("fit_exit_heads", "no head is sure enough"):
        few = options | {"args": arguments(tmp_path, max_steps=4)}
        low = fit_exit_heads(model, None, rows(80), rank=8, **few)
    assert low.num_parameters == 2 * (64 + 8 * (64 + VOCABULARY)) < heads.num_parameters
    assert low.about["figures"]["drafts accepted at best"] == 0.0


def test_copies_begin_as_the_models_own_exits(tmp_path: Path) -> None:
    model: LlamaForCausalLM = tiny_llama(factor=1.5)
    args = arguments(tmp_path, max_steps=1, learning_rate=1e-9)
    options: dict[str, Any] = {"block_size": 32, "args": args}
    fits = []
    for copied in (True, False):
        with unreached("fit_exit_heads", "at best 0|no head"):
            fits.append(fit_exit_heads(model, None, rows(80), copied=copied, **options))
    with torch.no_grad():
        output = model(torch.tensor([rows(1)[0]["input_ids"]]), output_hidden_states=True)
        for head, layer in enumerate(fits[0].layers):
            state = output.hidden_states[layer]
            model_logits = model.lm_head(model.model.norm(state))
            torch.testing.assert_close(fits[0].logits(head, state), model_logits, rtol=1e-3, atol=1e-3)
            assert not torch.allclose(fits[1].logits(head, state), model_logits, atol=0.1)


def test_calibration_on_what_the_model_writes(tmp_path: Path) -> None:
    """By hand; a text that ends counts up to its end."""
    model = tiny_llama(8)
    heads = heads_of(model, 0.5)
    texts = rows(6)
    prompts = torch.tensor([row["input_ids"][:8] for row in texts])
    written = model.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None)
    end = [int(written[0, 15]), 96]
    ends = [next((at for at in range(8, 32) if row[at] in end), 31) for row in written.tolist()]
    assert min(ends) < 31
    # Beams that the model usually writes with play no part.
    usual = {"num_return_sequences": 2, "return_dict_in_generate": True, "num_beams": 2}
    for name, value in (usual | {"eos_token_id": end}).items():
        setattr(model.generation_config, name, value)
    before = model.generation_config
    with attach(model, SelfSpec.lookup()) as attached:
        calibrated = calibrate_exit_heads(
            heads, model, None, texts, metric="entropy", epsilons=[0.2, 0.9], block_size=32, output_dir=tmp_path
        )
    assert attached.stats is None
    sure: list[list[torch.Tensor]] = [[], [], []]
    right: list[list[torch.Tensor]] = [[], [], []]
    for row, at in zip(written, ends, strict=True):
        with torch.no_grad():
            output = model(row[None, : at + 1], output_hidden_states=True)
        for head, layer in enumerate(LAYERS):
            logits = heads.logits(head, output.hidden_states[layer][0, 7:-1])
            sure[head].append(METRICS["entropy"](logits))
            right[head].append((logits.argmax(-1) == output.logits[0, 7:-1].argmax(-1)).float())
    assert model.generation_config is before
    calibration = calibrated.about["calibration"]
    assert calibration["tokens"] == sum(at - 7 for at in ends)
    for head in range(3):
        pair = torch.cat(sure[head]), torch.cat(right[head])
        expected = [threshold(*pair, epsilon) for epsilon in (0.2, 0.9)]
        assert calibration["thresholds"]["entropy"][head] == pytest.approx(expected, abs=1e-5)
    assert heads.about["calibration"]["epsilons"] == [0.9]  # those that were given stay as they are
    assert ExitHeads.load(tmp_path).about == calibrated.about


def test_mistakes(tmp_path: Path) -> None:
    model = tiny_llama(8)
    heads, shared = heads_of(model, 0.5), build("gemma3n_text")
    heads.about = {"calibration": calibrated(heads.about["calibration"]["thresholds"], 0.8979)}
    other = heads_of(model, 0.5)
    other.about = about(tiny_llama(8, factor=2.0), {}, {})

    def generate(other: Any, heads: ExitHeads) -> Any:
        return other.generate(**ragged_batch((4,)), max_new_tokens=3, assistant=SelfSpec.dssd(heads, 0.8))

    def calibrate_again(heads: Any, **options: Any) -> Any:
        return calibrate_exit_heads(heads, model, None, rows(), **{"block_size": 32} | options)

    def fit(count: int = 60, **options: Any) -> Any:
        return fit_exit_heads(model, None, rows(count), block_size=32, **options)

    for wrong, error, words in (
        (lambda: SelfSpec.dssd(ExitHeads([2], 64, 97)), SettingError, "have no thresholds"),
        (lambda: SelfSpec.dssd(heads), SettingError, r"epsilon=0\.9 is more than .* reach: .* at best 0\.897 of"),
        (lambda: SelfSpec.dssd(3), SettingTypeError, "must be ExitHeads or the path of a saved one"),
        (lambda: generate(tiny_llama(6), heads), SettingError, "but LlamaForCausalLM has 6 layers"),
        (lambda: generate(shared, heads_of(model, 0.5, (1,))), UnsupportedModelError, "exit heads cannot draft"),
        (lambda: calibrate_again(other), SettingError, "was fitted to|were fitted to"),
        (lambda: calibrate_again(heads, block_size=1), SettingError, "leaves the model nothing to write"),
        (lambda: calibrate_again(tmp_path / "none"), SettingError, "there is no saved part"),
        (lambda: fit(metric="variance"), SettingError, "must be one of"),
        (lambda: fit(epsilons=[0.9, 0.5]), SettingError, "must be in increasing order"),
        (lambda: fit(3), SettingError, "none can be held out"),
    ):
        with pytest.raises(error, match=words):
            wrong()
