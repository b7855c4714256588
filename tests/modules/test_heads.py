"""Heads beside the model's own: those that choose an exit for each token, and those of some tokens alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import check_lossless
from helpers.fitted import LAYERS, arguments, calibrated, heads_of, rows, weights
from helpers.models import ROW, VOCABULARY, ragged_batch, tiny_llama
from helpers.sampling import SAMPLES, check_exact, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from helpers.watched import drafts_into
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    ReducedHead,
    SelfSpec,
    attach,
    fit_exit_heads,
    fit_reduced_head,
)
from hf_selfspec.batch import Draft
from hf_selfspec.errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from hf_selfspec.model import head
from hf_selfspec.model.head import HeadRows
from hf_selfspec.model.linear import FewTokenLinear
from hf_selfspec.modules.heads import ExitHeads, Predictions, calibrate, confidence, default_layers

# Exit heads ----------------------------------------------------------------------------------------------------------


def test_calibrations() -> None:
    assert confidence(torch.tensor([[0.0, 0.0], [9.0, -9.0]])).tolist() == pytest.approx([-math.log(2), 0], abs=1e-5)
    texts: list[Predictions] = [
        (torch.tensor(sure), torch.tensor(right).float())
        for sure, right in (
            ([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]], [[0, 1, 1], [0, 0, 0]]),
            ([[0.0, 1.0], [0.0, 1.0]], [[0, 0], [0, 0]]),
        )
    ]
    calibration = calibrate(texts, [0.4, 0.5, 0.9])
    assert calibration["tokens"] == 5
    assert calibration["thresholds"] == [[0.0, 1.0, 2.0], [None, None, None]]
    # First tokens come with the prompts, so three are drafted, or two.
    assert calibration["acceptance"] == [2 / 3, 2 / 3, 1.0]
    assert calibrate([(-sure, right) for sure, right in texts], [0.4, 0.5])["acceptance"] == [2 / 3, None]
    heads = ExitHeads([1, 2], 8, 5, about={"calibration": calibration})
    assert heads.draft_thresholds(0.6) == [0.0, math.inf]
    assert heads.draft_thresholds(0.7) == [2.0, math.inf]
    assert default_layers(24, 4) == [4, 9, 14, 19]  # DSSD's own for 24 layers
    assert default_layers(4, 4) == [1, 2, 3]


def test_calibration_on_what_the_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the loosest threshold above which heads are right often enough; a text that ends counts up to its
    end."""
    model, texts, epsilons = tiny_llama(8), rows(120), (0.2, 0.9)
    prompts = torch.tensor([row["input_ids"][:8] for row in texts[-6:]])  # those that are held out
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
        monkeypatch.setattr("hf_selfspec.train.heads._EPSILONS", epsilons)
        settings = {"layers": LAYERS, "block_size": 32, "copied": True}
        args = arguments(tmp_path / "trainer", max_steps=1, learning_rate=1e-9)
        heads = fit_exit_heads(model, None, texts, args=args, output_dir=tmp_path, **settings)
    assert attached.stats is None
    assert model.generation_config is before
    calibration = heads.about["calibration"]
    assert calibration["tokens"] == sum(at - 7 for at in ends)
    with torch.no_grad():
        outputs = [model(row[None, : at + 1], output_hidden_states=True) for row, at in zip(written, ends, strict=True)]
        own = torch.cat([output.logits[0, 7:-1] for output in outputs]).argmax(-1)
        for number, layer in enumerate(LAYERS):
            states = torch.cat([output.hidden_states[layer][0, 7:-1] for output in outputs])
            logits = heads.logits(number, states)
            sure, right = confidence(logits), (logits.argmax(-1) == own).float()
            enough = [[one for one in sure.unique() if right[sure >= one].mean() >= epsilon] for epsilon in epsilons]
            expected = [min(values).item() if values else None for values in enough]
            assert calibration["thresholds"][number] == pytest.approx(expected, abs=1e-5)
    assert ExitHeads.from_pretrained(tmp_path).about == heads.about


def fitted(model: Any, folder: Path, told: str = "", **options: Any) -> ExitHeads:
    """Exit heads, and the warning that they reach none of the accuracies."""
    chosen = {name: options.pop(name) for name in ("max_steps", "learning_rate") if name in options}
    options = {"block_size": 32, "args": arguments(folder, **chosen)} | options
    if not told:
        return fit_exit_heads(model, None, rows(80), **options)
    with pytest.warns(UserWarning, match=rf"fit_exit_heads: .* reach none of the accuracies from 0\.\d on .({told})"):
        return fit_exit_heads(model, None, rows(80), **options)


def test_fits_of_exit_heads(tmp_path: Path) -> None:
    model: LlamaForCausalLM = tiny_llama(factor=1.5)
    before = weights(model)
    heads = fitted(model, tmp_path, layers=[2, 4], max_steps=80, learning_rate=2e-2, output_dir=tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    figures, calibration = heads.about["figures"], heads.about["calibration"]
    assert figures["last loss"] < figures["first loss"] / 2
    assert heads.figures().items() <= figures.items()
    assert calibration["tokens"] == 4 * 24  # what the model writes after a quarter of each row
    assert ExitHeads.from_pretrained(tmp_path).about == heads.about
    reached = [rate for rate in calibration["acceptance"] if rate is not None]
    assert figures["drafts accepted at best"] == pytest.approx(max(reached), abs=1e-3)
    check_lossless(model, SelfSpec.dssd(tmp_path, max(reached)), 8)
    # After few steps, with few parameters.
    low = fitted(model, tmp_path, "no head is sure enough", layers=[2, 4], rank=8, max_steps=4)
    assert low.num_parameters == 2 * (64 + 8 * (64 + VOCABULARY)) < heads.num_parameters
    assert low.about["figures"]["drafts accepted at best"] == 0.0
    # Copies begin as the model's own exits.
    copied, drawn = (
        fitted(model, tmp_path, "at best 0|no head", copied=copied, max_steps=1, learning_rate=1e-9)
        for copied in (True, False)
    )
    with torch.no_grad():
        output = model(torch.tensor([rows(1)[0]["input_ids"]]), output_hidden_states=True)
        for number, layer in enumerate(copied.layers):
            state = output.hidden_states[layer]
            model_logits = model.lm_head(model.model.norm(state))
            torch.testing.assert_close(copied.logits(number, state), model_logits, rtol=1e-3, atol=1e-3)
            assert not torch.allclose(drawn.logits(number, state), model_logits, atol=0.1)


def test_mistakes_about_exit_heads(tmp_path: Path) -> None:
    model = tiny_llama(8)
    heads = heads_of(model, 0.5)
    heads.about = {"calibration": calibrated(heads.about["calibration"]["thresholds"], 0.8979)}

    def generate(other: Any, heads: ExitHeads) -> Any:
        return other.generate(**ROW, max_new_tokens=3, assistant=SelfSpec.dssd(heads, 0.8))

    def fit(count: int = 60, **options: Any) -> Any:
        return fit_exit_heads(model, None, rows(count), **{"block_size": 32} | options)

    shared = heads_of(model, 0.5, (1,))
    for wrong, error, words in (
        (lambda: SelfSpec.dssd(ExitHeads([2], 64, 97)), SettingError, "have no thresholds"),
        (lambda: SelfSpec.dssd(heads), SettingError, r"epsilon=0\.9 is more than .* reach: .* at best 0\.897 of"),
        (lambda: SelfSpec.dssd(3), SettingTypeError, "must be ExitHeads or the path of a saved one"),
        (lambda: generate(tiny_llama(6), heads), SettingError, "but LlamaForCausalLM has 6 layers"),
        (lambda: generate(build("gemma3n_text"), shared), UnsupportedModelError, "exit heads cannot draft"),
        (lambda: fit(block_size=1), SettingError, "leaves the model nothing to write"),
        (lambda: fit(3), SettingError, "none can be held out"),
    ):
        with pytest.raises(error, match=words):
            wrong()


# Heads of some tokens ------------------------------------------------------------------------------------------------

KEPT = range(0, VOCABULARY, 3)


def reduced_to(tokens: Any = KEPT, vocabulary: int = VOCABULARY, layer: int = 2, length: int = 3) -> SelfSpec:
    return SelfSpec(EarlyExit(layer, ReducedHead.of(tokens, vocabulary)), FixedLength(length))


def drafted_by(model: Any, spec: SelfSpec, lengths: tuple[int, ...] = (9, 5), **options: Any) -> set[int]:
    """Tokens that were drafted in a call."""
    drafts: list[Draft] = []
    spec = replace(spec, draft=drafts_into(drafts, spec.draft))
    model.generate(**ragged_batch(lengths), max_new_tokens=12, pad_token_id=0, assistant=spec, **options)
    lines = [draft.tokens[row, :length] for draft in drafts for row, length in enumerate(draft.lengths)]
    return set(torch.cat(lines).tolist())


@pytest.mark.parametrize("do_sample", [False, True])
def test_only_these_are_drafted(do_sample: bool, llama: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    drafted = drafted_by(llama, reduced_to(), do_sample=do_sample)
    assert len(drafted) > 2
    assert drafted <= set(KEPT)


@pytest.mark.every_run("gemma2")
@pytest.mark.parametrize("name", ["gemma2", "phi", "falcon_h1"])
def test_scales_caps_biases_and_ties(name: str) -> None:
    """What comes before and behind the head is the model's own code: all tokens are what the whole head says."""
    model = build(name)
    size = model.get_output_embeddings().weight.shape[0]
    specs = reduced_to(range(size), size, 1, 2), SelfSpec(EarlyExit(1), FixedLength(2))
    whole, usual = ([stats.accepted for stats in check_lossless(model, spec, 10)] for spec in specs)
    assert whole == usual
    half = reduced_to(range(0, size, 2), size, 1, 2)
    assert {token % 2 for token in drafted_by(model, half, (9,), do_sample=False)} == {0}


@pytest.mark.slow
def test_drawn_tokens_have_the_models_distribution() -> None:
    check_exact(sample(reduced_to([1, 4], 5), rows=SAMPLES, top_k=0), exact_joint(tiny_vocabulary(), []))


def test_the_most_frequent_tokens_are_found(tmp_path: Path) -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [90, 91, 200, -1]
    texts = [{"input_ids": [5] * 9 + [8] * 7 + [3] * 7 + [60] * 2}] * 40
    head = fit_reduced_head(model, None, texts, size=5, output_dir=tmp_path / "head")
    assert head.tokens.tolist() == [3, 5, 8, 90, 91]
    assert head.about["figures"]["share of held-out tokens"] == pytest.approx(0.92, abs=0.04)
    again = ReducedHead.from_pretrained(tmp_path / "head")
    assert (again.tokens.tolist(), again.vocabulary) == (head.tokens.tolist(), VOCABULARY)
    assert fit_reduced_head(model, None, texts, size=10**5).tokens.tolist() == list(range(VOCABULARY))
    assert fit_reduced_head(model, None, texts, size=7).tokens.tolist() == [0, 3, 5, 8, 60, 90, 91]
    spec = SelfSpec(EarlyExit(3, tmp_path / "head"), FixedLength(2))
    spec.save_pretrained(tmp_path / "spec")
    assert SelfSpec.from_pretrained(tmp_path / "spec").draft == spec.draft
    check_lossless(model, spec, 8)


def test_mistakes_about_heads_of_some_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reduced, place = tiny_llama(), reduced_to(), tmp_path / "head"
    ReducedHead.of([2, 5], VOCABULARY).save_pretrained(place)
    file = place / "model.safetensors"
    save_file(load_file(file) | {"tokens": torch.tensor([2, 97])}, file)
    weight = model.lm_head.weight
    model.lm_head = type("Other", (torch.nn.Linear,), {})(64, VOCABULARY, bias=False)
    model.lm_head.weight = weight
    headless = tiny_llama()
    monkeypatch.setattr(headless, "get_output_embeddings", lambda: None)
    check_lossless(headless, SelfSpec(EarlyExit(2), FixedLength(2)), 8)
    for wrong, error, words in (
        (lambda: EarlyExit(2, 8192), SettingTypeError, r"EarlyExit\(head\) must be ReducedHead or the path"),
        (lambda: EarlyExit(2, tmp_path / "nowhere"), SettingError, "there is no saved part"),
        (lambda: reduced.export_draft(tmp_path / "export", tiny_llama()), UnsupportedOptionError, "cannot be exported"),
        (lambda: fit_reduced_head(tiny_llama(), None, [{"input_ids": [97]}]), SettingError, "distinct ids"),
        (lambda: check_lossless(tiny_llama(), reduced_to([1, 97], 98)), UnsupportedModelError, "names token 97"),
        (lambda: check_lossless(model, reduced), UnsupportedModelError, "no output head that is a plain linear layer"),
        (lambda: check_lossless(headless, reduced), UnsupportedModelError, "leave `head` out"),
        (lambda: ReducedHead.of([3, 3], VOCABULARY), SettingError, "must have distinct ids"),
        (lambda: ReducedHead.from_pretrained(place), SettingError, "must have distinct ids"),
    ):
        with pytest.raises(error, match=words):
            wrong()


@pytest.mark.usefixtures("no_warnings_yet")
def test_a_model_that_does_not_call_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some models of the Hub, which multiply with its weight."""
    model = tiny_llama(factor=0.5)
    original = type(model).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        head, self.lm_head = self.lm_head, torch.nn.Linear(64, VOCABULARY, bias=False)
        self.lm_head.weight = head.weight
        try:
            return original(self, *args, **options)
        finally:
            self.lm_head = head

    monkeypatch.setattr(type(model), "forward", forward)
    plain = model.generate(**ROW, max_new_tokens=9)
    with pytest.warns(UserWarning, match="without a call of its output head"):
        assert torch.equal(model.generate(**ROW, max_new_tokens=9, assistant=reduced_to()), plain)


def test_rows_are_copied_once_for_a_model_until_its_head_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec, made = tiny_llama(factor=0.5), reduced_to(), list[int]()
    monkeypatch.setattr(
        head, "FewTokenLinear", lambda *sizes, **options: made.append(sizes[1]) or FewTokenLinear(*sizes, **options)
    )
    for _ in range(2):
        with torch.inference_mode():
            drafted_by(model, spec, do_sample=False)
    assert made == [len(KEPT)]
    states = torch.ones(1, 64, requires_grad=True)
    HeadRows(model, spec.draft.module.tokens).of_tokens(states).sum().backward()  # as in a training
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    drafted_by(model, spec, do_sample=False)
    model.lm_head = torch.nn.Linear(64, VOCABULARY, bias=False)
    drafted_by(model, spec, do_sample=False)
    drafted_by(model, reduced_to(KEPT[1:]), do_sample=False)
    assert made == [len(KEPT)] * 3 + [len(KEPT) - 1]
