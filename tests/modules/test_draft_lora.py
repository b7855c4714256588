"""LoRA that is active while the first layers draft and off in verification: drafts, the fit and the files."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import check_lossless, unchanged
from helpers.fitted import Recording, arguments, lora_of, rows, weights
from helpers.models import ROW, ragged_batch, tiny_llama
from helpers.processes import peft_calls_old_name
from hf_selfspec import EarlyExit, EarlyExitLora, FixedLength, SelfSpec, fit_draft_lora
from hf_selfspec.errors import (
    SettingError,
    SettingTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.modules.lora import DraftLora
from hf_selfspec.train import lora as lora_fit
from hf_selfspec.train.frozen_model import FrozenModel

EXIT = 2


def spec_of(lora: Any, stop: Any = None, **settings: Any) -> SelfSpec:
    return SelfSpec(EarlyExitLora(lora), stop or FixedLength(3), **settings)


@pytest.mark.every_run("30.0")
@pytest.mark.parametrize("size", [0.02, 30.0])
def test_verification_never_starts_from_drafted_states(size: float, llama: LlamaForCausalLM) -> None:
    """Keys, values and states of drafts are not the model's, in any layer."""
    with unchanged(llama):
        stats = check_lossless(llama, spec_of(lora_of(llama, exit_layer=4, size=size), FixedLength(6)), 12)
    assert all((call.acceptance_rate > 0.1) == (size < 1) for call in stats)


def test_layers_below_the_first_addition_are_exact(llama: LlamaForCausalLM) -> None:
    """Verification may start from their states."""
    anatomy = Anatomy.of(llama)
    shapes = [shape for shape in lora_fit.shapes_of(anatomy, 4) if shape[0].startswith(("2.", "3."))]
    lora = DraftLora(4, 4, shapes)
    for up in lora.up:
        torch.nn.init.normal_(up, std=0.3)
    assert lora.substitutes(anatomy).first_layer == 2
    check_lossless(llama, spec_of(lora.eval(), FixedLength(6)), 12)


def test_models_in_bfloat16() -> None:
    """Drafts compute in the model's precision, and so does the fit; the LoRA itself stays in float32."""
    model = tiny_llama(factor=0.5).to(torch.bfloat16)
    lora = fit_draft_lora(model, None, rows(19), exit_layer=1, block_size=32)
    assert {value.dtype for value in lora.parameters()} == {torch.float32}
    assert any(bool(up.any()) for up in lora.up)
    with torch.no_grad():
        linear, substitute = next(iter(lora.substitutes(Anatomy.of(model)).of.items()))
        assert substitute(linear, torch.zeros(1, 1, 64, dtype=torch.bfloat16)).dtype is torch.bfloat16
    spec = spec_of(lora)
    model.generate(**ragged_batch((9,)), max_new_tokens=9, do_sample=False, assistant=spec)
    assert spec.stats.drafted > 0


def test_threads_have_additions_of_their_own(llama: LlamaForCausalLM) -> None:
    """Several generations with one model, each with another LoRA or with none."""
    specs = [spec_of(lora_of(llama, seed, size=0.1)) for seed in range(2)] + [SelfSpec(EarlyExit(EXIT), FixedLength(3))]
    plain = llama.generate(**ROW, max_new_tokens=16, do_sample=False)

    def accepted(spec: SelfSpec) -> int:
        assert torch.equal(llama.generate(**ROW, max_new_tokens=16, do_sample=False, assistant=spec), plain)
        assert spec.stats is not None
        return spec.stats.accepted

    alone = [accepted(spec) for spec in specs]
    with unchanged(llama), ThreadPoolExecutor(len(specs)) as pool:
        assert list(pool.map(accepted, specs)) == alone


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_fit_sees_what_drafts_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of windows in the fit are those of drafts that begin where the window does."""
    model, rule = build(name), Recording(ends=False)
    lora = lora_of(model, exit_layer=1, size=0.1)
    spec = SelfSpec(EarlyExitLora(lora), rule, max_draft=4)
    model.generate(**ragged_batch((12,)), max_new_tokens=24, do_sample=False, assistant=spec)
    frozen, told = FrozenModel(model, (1,)), 0
    with torch.no_grad(), frozen.frozen():
        for at, (ids, logits, _) in enumerate(rule.calls[:8]):
            row, drafted = ids[:, :-1], []
            frozen.hidden_states(row)
            for offset in range(lora_fit._WINDOW):
                monkeypatch.setattr(lora_fit, "_offset", lambda offset=offset: offset)
                drafted.append(frozen.own_head(lora_fit.drafted_states(frozen, lora, row))[:, -1])
            # The window has to begin with the text's last token, at % 4 tokens before the last one.
            right = (-(row.shape[1] - 1 - at % 4)) % lora_fit._WINDOW
            torch.testing.assert_close(drafted[right], logits, rtol=1e-3, atol=1e-4)
            told += sum(not torch.allclose(logits, other, rtol=1e-3, atol=1e-4) for other in drafted)
    assert told > 8


def test_a_fit_learns_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    before = weights(model)
    args = arguments(tmp_path, num_train_epochs=3, learning_rate=1e-2)
    with unchanged(model):
        lora = fit_draft_lora(model, None, rows(), exit_layer=EXIT, rank=8, block_size=32, args=args)
    figures = lora.about["figures"]
    assert figures["agreement with the whole model"] > figures["agreement without LoRA"] + 0.1
    assert figures["last loss"] < figures["first loss"]
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    check_lossless(model, spec_of(lora), 8)


@peft_calls_old_name
def test_a_fit_around_adapters_of_peft() -> None:
    """What PEFT has added is part of the model, not of what is fitted."""
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(3), config)
    lora = fit_draft_lora(model, None, rows(19), exit_layer=1, block_size=32)
    names = [name for name, _, _ in lora.shapes]
    assert "0.self_attn.q_proj.base_layer" in names
    assert "0.mlp.up_proj" in names
    assert len(names) == 7
    check_lossless(model, spec_of(lora), 8)


def test_models_to_which_none_can_be_fitted() -> None:
    for name in ("falcon_h1", "bloom"):
        with pytest.raises(UnsupportedModelError, match="Fit an adapter instead"):
            fit_draft_lora(build(name), None, [{"input_ids": [3] * 640}], exit_layer=1, block_size=32)


def test_files(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    lora = lora_of(llama)
    lora.save_pretrained(tmp_path / "lora")
    spec = spec_of(tmp_path / "lora")
    spec.save_pretrained(tmp_path / "spec")
    assert SelfSpec.from_pretrained(tmp_path / "spec").draft == spec.draft
    (saved,), (loaded,) = (check_lossless(llama, each, 12, [ROW]) for each in (spec_of(lora), spec))
    assert (saved.drafted, saved.accepted) == (loaded.drafted, loaded.accepted)


def test_mistakes_are_told(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    fitted = fit_draft_lora(tiny_llama(seed=1), None, rows(19), exit_layer=1, block_size=32)
    options: dict[str, Any] = {"exit_layer": 1, "block_size": 32}

    def generate(lora: DraftLora) -> Any:
        return llama.generate(torch.tensor([[3]]), max_new_tokens=3, assistant=spec_of(lora))

    broken = lora_of(tiny_llama(layers=3), exit_layer=1)
    broken.shapes = (("0.mlp.nothing", 64, 128), *broken.shapes[1:])
    for wrong, error, words in (
        (lambda: generate(broken), SettingError, r"a linear layer 'mlp\.nothing' of 64 to 128"),
        (lambda: DraftLora(2, 4, []), SettingError, "names no linear layer"),
        (lambda: DraftLora(2, 4, [("2.mlp", 4, 4)]), SettingError, "a layer below 2"),
        (lambda: EarlyExitLora(8), SettingTypeError, r"EarlyExitLora\(lora\) must be DraftLora or the path"),
        (lambda: generate(lora_of(tiny_llama(8), exit_layer=6)), SettingError, "is for exit layer 6, but Llama"),
        (lambda: generate(fitted), SettingError, "this draft LoRA was fitted to a model with other weights"),
        (lambda: spec_of(fitted).export_draft(tmp_path, llama), UnsupportedOptionError, "cannot be exported"),
        (lambda: fit_draft_lora(llama, None, rows(20), rank=0, **options), SettingError, r"fit_draft_lora\(rank\)"),
    ):
        with pytest.raises(error, match=words):
            wrong()
