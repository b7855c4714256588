"""Loss, accuracy and agreement of every exit, against forwards that know nothing of exits."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from helpers.architectures import NO_EXITS, STATEFUL, build
from helpers.calls import unchanged
from helpers.models import VOCABULARY, character_tokenizer, tiny_gpt2, tiny_llama
from helpers.processes import peft_calls_old_name
from hf_selfspec import SettingError, SettingTypeError, UnsupportedModelError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import ForwardPass, obeying, partial_forwards
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.tools import exit_report as report_module
from hf_selfspec.tools.exit_report import ExitReport, exit_report

pytestmark = peft_calls_old_name

TEXTS = ["Layers that matter less", "ab", "the deeper they are, 0123456789."]
TOKENS = sum(len(text) - 1 for text in TEXTS)
Logits = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def tied_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, initializer_range=0.25, pad_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


@torch.no_grad()
def by_hand(tokenizer: PreTrainedTokenizerFast, logits_of: Logits) -> list[list[float]]:
    """Losses, accuracies and agreements from the logits ``[s, v]`` of every exit on each text."""
    rows: list[list[torch.Tensor]] = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        logits = torch.stack([found.float() for found in logits_of(ids)])[:, :-1]
        right = ids[0, 1:]
        losses = [F.cross_entropy(found, right, reduction="none") for found in logits]
        choices = logits.argmax(-1)
        rows.append([torch.stack(losses), choices == right, choices == choices[-1]])
    return [torch.cat([row[index].double() for row in rows], dim=1).mean(1).tolist() for index in range(3)]


def assert_is(report: ExitReport, expected: list[list[float]], tolerance: float = 1e-5) -> None:
    assert list(report.loss) == pytest.approx(expected[0], rel=tolerance)
    assert list(report.accuracy) == pytest.approx(expected[1], abs=tolerance)
    assert list(report.agreement) == pytest.approx(expected[2], abs=tolerance)
    # Nothing above is about numbers that are all the same.
    assert len(set(report.loss)) == len(report.loss)
    assert 0 < min(report.agreement) < max(report.agreement) == report.agreement[-1] == 1


def through_norm_and_head(model: LlamaForCausalLM) -> Logits:
    def logits_of(ids: torch.Tensor) -> Sequence[torch.Tensor]:
        output = model(ids, output_hidden_states=True)
        earlier = output.hidden_states[1:-1]
        return [*(model.lm_head(model.model.norm(hidden))[0] for hidden in earlier), output.logits[0]]

    return logits_of


def test_llama_by_hand(
    llama: LlamaForCausalLM, fresh_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    report = exit_report(llama, tokenizer, TEXTS)
    assert_is(report, by_hand(tokenizer, through_norm_and_head(llama)))
    fresh_llama.config.return_dict = False
    assert exit_report(fresh_llama, tokenizer, TEXTS) == report
    assert report.tokens == TOKENS
    assert report.model_name == "LlamaForCausalLM"
    assert len(report.loss) == 6


# Tied heads, soft-caps, scales, projections, a decoder under another name, streams.
NAMES = ("gemma2", "cohere", "granite", "opt", "opt-350m", "llama4_text", "gemma3n_text")
RECURRENT = [name for name in STATEFUL if name not in NO_EXITS]


@pytest.mark.every_run(f"tied|mamba2|{'|'.join(NAMES)}")
@pytest.mark.parametrize("name", ["tied", *NAMES, *RECURRENT])
def test_architectures(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Forwards of the causal LM itself that leave later layers out."""
    model = tied_gpt2() if name == "tied" else build(name)
    report = exit_report(model, tokenizer, TEXTS)
    anatomy = Anatomy.of(model)

    def logits_of(ids: torch.Tensor) -> Sequence[torch.Tensor]:
        found = []
        with partial_forwards(model, anatomy):
            for layer in range(1, anatomy.num_layers):
                with obeying(ForwardPass(LayerPlan.early_exit(anatomy.num_layers, layer))):
                    found.append(model(ids, use_cache=False).logits[0])
        return [*found, model(ids).logits[0]]

    assert_is(report, by_hand(tokenizer, logits_of))


def test_peft(tokenizer: PreTrainedTokenizerFast) -> None:
    """The adapters count, also one on the head, and also that they are switched off."""
    torch.manual_seed(4)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "lm_head"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    base = model.get_base_model()
    report = exit_report(model, tokenizer, TEXTS)
    assert_is(report, by_hand(tokenizer, through_norm_and_head(base)))
    with model.disable_adapter():
        without = exit_report(model, tokenizer, TEXTS)
    plain = exit_report(tiny_llama(), tokenizer, TEXTS)
    assert without.loss == pytest.approx(plain.loss)
    assert abs(report.loss[-1] - plain.loss[-1]) > 1e-2


@pytest.mark.parametrize(("name", "elements", "most"), [("llama", 4 * VOCABULARY - 1, 3), ("llama4_text", 1, 1)])
def test_chunks(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, name: str, elements: int, most: int
) -> None:
    """The numbers are the same, and there are never logits of more tokens, also where the decoder is the model."""
    model = build(name)
    whole, layers = exit_report(model, tokenizer, TEXTS), model.config.num_hidden_layers
    monkeypatch.setattr(report_module, "LOGIT_ELEMENTS", elements)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel() // VOCABULARY))
    report = exit_report(model, tokenizer, TEXTS)
    assert max(rows) == most
    assert sum(rows) == layers * TOKENS
    assert report.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (report.accuracy, report.agreement) == (whole.accuracy, whole.agreement)


def rows_seen(model: PreTrainedModel, *args: Any, **options: Any) -> list[list[int]]:
    seen: list[list[int]] = []
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].tolist()))
    try:
        report = exit_report(model, *args, **options)
    finally:
        handle.remove()
    assert report.tokens == sum(len(row) - 1 for row in seen)
    return seen


def test_texts_are_cut_at_max_length_or_the_models_positions(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert rows_seen(llama, tokenizer, TEXTS) == rows
    assert rows_seen(llama, tokenizer, iter(TEXTS), max_length=5) == [row[:5] for row in rows]
    assert [len(row) for row in rows_seen(tiny_gpt2(positions=32), tokenizer, ["abc" * 20, "ab"])] == [32, 2]
    unknown = tiny_llama(layers=2)
    unknown.config.max_position_embeddings = 0
    assert [len(row) for row in rows_seen(unknown, tokenizer, ["abc" * 1000])] == [2048]


def test_special_tokens(llama: LlamaForCausalLM) -> None:
    """The first token of the template is a context, and a cut text does not end in its last one."""
    tokenizer = character_tokenizer()
    tokenizer.truncation_side = "left"
    template = TemplateProcessing("<s> $A <pad>", special_tokens=[("<s>", 1), ("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = template
    a = ord("a") - 30
    assert rows_seen(llama, tokenizer, ["abcd", ""], max_length=4) == [[1, a, a + 1, a + 2], [1, 0]]


def test_training_modes_come_back(tokenizer: PreTrainedTokenizerFast) -> None:
    """Module by module; and nothing is dropped out, no gradient recorded meanwhile."""
    model = tiny_gpt2(positions=64).train()
    model.transformer.h[2].eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    meanwhile: list[bool] = []
    model.transformer.h[1].register_forward_hook(
        lambda module, args, output: meanwhile.extend([module.training, torch.is_grad_enabled()])
    )
    with unchanged(model):
        report = exit_report(model, tokenizer, TEXTS)
    assert [module.training for module in model.modules()] == modes
    assert set(meanwhile) == {False}
    assert report == exit_report(model.eval(), tokenizer, TEXTS)


def test_after_an_exception(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama().train()
    calls: list[int] = []

    def explode(module: torch.nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 9:  # in the second text
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_pre_hook(explode)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        exit_report(model, tokenizer, TEXTS)
    handle.remove()
    assert len(calls) == 9
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert exit_report(model, tokenizer, TEXTS) == exit_report(tiny_llama(), tokenizer, TEXTS)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["abc", "a"], {}, r"text 1 is 'a', of 1 tokens, but it takes at least 2"),
        (["abc", 3], {}, r"must be a list of strings, .* got \['abc', 3\]"),
        (["abc"], {"max_length": 1}, r"max_length\) must be at least 2, got 1"),
        (["abc"], {"max_length": 2.5}, r"max_length\) must be a whole number .* got 2\.5"),
    ],
)
def test_settings(
    llama: LlamaForCausalLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, texts: Any, options: Any, message: str
) -> None:
    monkeypatch.delattr(type(llama.model), "forward")
    with pytest.raises((SettingError, SettingTypeError), match=message):
        exit_report(llama, tokenizer, texts, **options)


def test_models_that_are_refused(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SettingTypeError, match=r"got SimpleNamespace\. Unwrap it first, .* model\.module"):
        exit_report(SimpleNamespace(module=llama), tokenizer, TEXTS)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING puts virtual tokens in front"):
        exit_report(peft.get_peft_model(tiny_llama(), config), tokenizer, TEXTS)
    big_code = build("gpt_bigcode").train()
    with unchanged(big_code), pytest.raises(UnsupportedModelError, match="fixes the batch after its last layer"):
        exit_report(big_code, tokenizer, TEXTS)


REPORT = ExitReport((10.25, 4.0, 2.5), (0.0, 0.25, 0.5), (0.125, 0.75, 1.0), 4321, "org/model")


def test_table() -> None:
    assert [line.split() for line in str(REPORT).splitlines()] == [
        ["org/model,", "4321", "tokens"],
        ["exit", "loss", "above", "last", "accuracy", "agreement"],
        ["1", "10.250", "+7.750", "0.000", "0.125"],
        ["2", "4.000", "+1.500", "0.250", "0.750"],
        ["3", "2.500", "+0.000", "0.500", "1.000"],
    ]


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models of different depth, and without a window."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figure = REPORT.plot()
    assert figure.axes[0].get_legend() is None
    assert figure.get_suptitle() == "org/model"
    twin = ExitReport((3.0, 2.0), (0.1, 0.2), (0.5, 1.0), 10, "other")
    figure = REPORT.plot(others={"twin": twin})
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    assert [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in lines] == [
        ("org/model", [1, 2, 3], [10.25, 4.0, 2.5]),
        ("twin", [1, 2], [3.0, 2.0]),
        ("org/model", [1, 2, 3], [0.125, 0.75, 1.0]),
        ("twin", [1, 2], [0.5, 1.0]),
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats per token)", "agreement with the last layer"]
    REPORT.plot(tmp_path / "exits.svg")
    assert "<svg" in (tmp_path / "exits.svg").read_text()
