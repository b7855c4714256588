"""What is told of a model: of its config, and loss, accuracy and agreement of every exit, by hand."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, CLIPConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from helpers.architectures import build
from helpers.calls import unchanged
from helpers.models import VOCABULARY, character_tokenizer, tiny_gpt2, tiny_llama, tiny_t5
from helpers.processes import peft_calls_old_name
from hf_selfspec import ExitReport, SelfSpecError, SettingTypeError, UnsupportedModelError, exit_report, inspect_model
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import ForwardPass, obeying, partial_forwards
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.tools import exit_report as report_module

pytestmark = peft_calls_old_name

TEXTS = ["Layers that matter less", "ab", "the deeper they are, 0123456789."]
TOKENS = sum(len(text) - 1 for text in TEXTS)
Logits = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@torch.no_grad()
def assert_is_by_hand(report: ExitReport, tokenizer: PreTrainedTokenizerFast, logits_of: Logits) -> None:
    """Losses, accuracies and agreements are those of the logits ``[s, v]`` of every exit on each text."""
    rows: list[list[torch.Tensor]] = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        logits = torch.stack([found.float() for found in logits_of(ids)])[:, :-1]
        losses = [F.cross_entropy(found, ids[0, 1:], reduction="none") for found in logits]
        choices = logits.argmax(-1)
        rows.append([torch.stack(losses), choices == ids[0, 1:], choices == choices[-1]])
    expected = [torch.cat([row[index].double() for row in rows], dim=1).mean(1).tolist() for index in range(3)]
    assert list(report.loss) == pytest.approx(expected[0], rel=1e-5)
    assert list(report.accuracy) == pytest.approx(expected[1], abs=1e-5)
    assert list(report.agreement) == pytest.approx(expected[2], abs=1e-5)
    # Nothing above is about numbers that are all the same.
    assert len(set(report.loss)) == len(report.loss)
    assert 0 < min(report.agreement) < max(report.agreement) == report.agreement[-1] == 1


def through_norm_and_head(model: LlamaForCausalLM) -> Logits:
    def logits_of(ids: torch.Tensor) -> Sequence[torch.Tensor]:
        output = model(ids, output_hidden_states=True)
        earlier = output.hidden_states[1:-1]
        return [*(model.lm_head(model.model.norm(hidden))[0] for hidden in earlier), output.logits[0]]

    return logits_of


def test_llama_and_peft_by_hand(fresh_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Adapters count, also one on the head, and also that they are switched off."""
    report = exit_report(fresh_llama, tokenizer, TEXTS)
    assert_is_by_hand(report, tokenizer, through_norm_and_head(fresh_llama))
    assert (report.tokens, report.model_name, len(report.loss)) == (TOKENS, "LlamaForCausalLM", 6)
    fresh_llama.config.return_dict = False
    assert exit_report(fresh_llama, tokenizer, TEXTS) == report
    torch.manual_seed(4)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "lm_head"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    assert_is_by_hand(exit_report(model, tokenizer, TEXTS), tokenizer, through_norm_and_head(model.get_base_model()))
    with model.disable_adapter():
        assert exit_report(model, tokenizer, TEXTS).loss == exit_report(tiny_llama(), tokenizer, TEXTS).loss


# Tied heads, soft-caps, a decoder under another name, recurrent states; all others are trained through their exits.
@pytest.mark.parametrize("name", ["tied", "gemma2", "opt-350m", "llama4_text", "mamba2"])
def test_architectures(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Forwards of the causal LM itself that leave later layers out."""
    model = build("gpt2", tie_word_embeddings=True) if name == "tied" else build(name)
    anatomy = Anatomy.of(model)

    def logits_of(ids: torch.Tensor) -> Sequence[torch.Tensor]:
        found = []
        with partial_forwards(model, anatomy):
            for layer in range(1, anatomy.num_layers):
                with obeying(ForwardPass(LayerPlan.early_exit(anatomy.num_layers, layer))):
                    found.append(model(ids, use_cache=False).logits[0])
        return [*found, model(ids).logits[0]]

    assert_is_by_hand(exit_report(model, tokenizer, TEXTS), tokenizer, logits_of)


@pytest.mark.parametrize(("name", "elements", "most"), [("llama", 4 * VOCABULARY - 1, 3), ("llama4_text", 1, 1)])
def test_there_are_never_logits_of_more_tokens(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, name: str, elements: int, most: int
) -> None:
    """Also where the decoder is the model, and with the same figures."""
    model = build(name)
    whole, layers = exit_report(model, tokenizer, TEXTS), model.config.num_hidden_layers
    monkeypatch.setattr(report_module, "LOGIT_ELEMENTS", elements)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel() // VOCABULARY))
    report = exit_report(model, tokenizer, TEXTS)
    assert (max(rows), sum(rows)) == (most, layers * TOKENS)
    assert report.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (report.accuracy, report.agreement) == (whole.accuracy, whole.agreement)


def rows_seen(model: PreTrainedModel, *args: Any, **options: Any) -> list[list[int]]:
    seen, embeddings = list[list[int]](), model.get_input_embeddings()
    with embeddings.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].tolist())):
        report = exit_report(model, *args, **options)
    assert report.tokens == sum(len(row) - 1 for row in seen)
    return seen


def test_what_goes_through_the_model(llama: LlamaForCausalLM) -> None:
    """Texts are cut at ``max_length`` or where positions end, at no other side, and without an end-of-text token; the
    first token of a template is a context."""
    tokenizer = character_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert rows_seen(llama, tokenizer, TEXTS) == rows
    assert rows_seen(llama, tokenizer, iter(TEXTS), max_length=5) == [row[:5] for row in rows]
    assert [len(row) for row in rows_seen(tiny_gpt2(positions=32), tokenizer, ["abc" * 20, "ab"])] == [32, 2]
    unknown = tiny_llama(layers=2)
    unknown.config.max_position_embeddings = 0
    assert [len(row) for row in rows_seen(unknown, tokenizer, ["abc" * 1000])] == [2048]
    tokenizer.truncation_side = "left"
    template = TemplateProcessing("<s> $A <pad>", special_tokens=[("<s>", 1), ("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = template
    a = ord("a") - 30
    assert rows_seen(llama, tokenizer, ["abcd", ""], max_length=4) == [[1, a, a + 1, a + 2], [1, 0]]


def test_the_model_comes_back(tokenizer: PreTrainedTokenizerFast) -> None:
    """Module by module, also after an exception; nothing is dropped out, no gradient recorded meanwhile."""
    model = tiny_gpt2(positions=64).train()
    model.transformer.h[2].eval()
    meanwhile: list[bool] = []

    def look(module: torch.nn.Module, *_: Any) -> None:
        meanwhile.extend([module.training, torch.is_grad_enabled()])
        if len(meanwhile) == 2 * 8:  # in the last of three texts
            raise KeyboardInterrupt

    for layer in (0, 1, 3):
        model.transformer.h[layer].register_forward_hook(look)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        exit_report(model, tokenizer, TEXTS)
    with unchanged(model):
        report = exit_report(model, tokenizer, TEXTS)
    assert set(meanwhile) == {False}
    assert report == exit_report(tiny_gpt2(positions=64), tokenizer, TEXTS)


def test_what_is_refused(tokenizer: Any, llama: LlamaForCausalLM) -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    for model, texts, options, message in (
        (llama, ["abc", "a"], {}, r"text 1 is 'a', of 1 tokens, but it takes at least 2"),
        (llama, ["abc", 3], {}, r"must be a list of strings, .* got \['abc', 3\]"),
        (llama, ["abc"], {"max_length": 1}, r"max_length\) must be at least 2, got 1"),
        (SimpleNamespace(module=llama), TEXTS, {}, r"got SimpleNamespace\. Unwrap it first, .* model\.module"),
        (peft.get_peft_model(tiny_llama(), prompts), TEXTS, {}, "PROMPT_TUNING puts virtual tokens in front"),
        (build("gpt_bigcode"), TEXTS, {}, "fixes the batch after its last layer"),
    ):
        with pytest.raises(SelfSpecError, match=message):
            exit_report(model, tokenizer, texts, **options)


def test_table() -> None:
    report = ExitReport((10.25, 4.0, 2.5), (0.0, 0.25, 0.5), (0.125, 0.75, 1.0), 4321, "org/model")
    assert [line.split() for line in str(report).splitlines()] == [
        ["org/model,", "4321", "tokens"],
        ["exit", "loss", "above", "last", "accuracy", "agreement"],
        ["1", "10.250", "+7.750", "0.000", "0.125"],
        ["2", "4.000", "+1.500", "0.250", "0.750"],
        ["3", "2.500", "+0.000", "0.500", "1.000"],
    ]


NAMES = ("llama", "gpt2", "bloom", "gemma2", "deepseek_v3", "gpt_neo", "qwen3_next", "mamba2", "opt", "mixtral")


def test_what_a_config_tells() -> None:
    told = {}
    for name in NAMES:
        model = build(name)
        told[name] = one = inspect_model(model.config)
        assert one == inspect_model(model)
        assert one.parameters == model.num_parameters()
        assert f"{type(model).__name__} ({model.config.model_type})" in str(one)
    for words, names in {
        "lines: it cannot take a tree mask": {"bloom", "gpt_neo"},
        "batches are left to plain generate": {"gpt_neo", "qwen3_next", "mamba2"},
        "rolled back when a draft is rejected": {"qwen3_next", "mamba2"},
        ", and no more": {"gpt2", "opt", "gpt_neo"},
        "forwards over a few tokens": set(NAMES) - {"bloom", "gpt_neo"},
        "4 with attention or similar, 0 with an MLP": {"mamba2"},
        "not in linear layers, or of widths": {"deepseek_v3", "qwen3_next", "mamba2", "mixtral"},
    }.items():
        assert {name for name, one in told.items() if words in str(one)} == names, words
    assert "possible in bfloat16" in str(inspect_model(tiny_llama(vocabulary=112)))


def test_layers_and_sizes() -> None:
    """No weights are made: no machine here could hold the last model."""
    told = inspect_model(tiny_llama(6).config)
    assert told.abilities["blocks to skip"] == "8", "attention and MLP of all layers but the first and the last"
    assert "blocks to skip         8\n" in str(told)
    assert "at least 4 layers" in str(inspect_model(tiny_llama(3).config))
    sizes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100, "num_attention_heads": 128}
    assert inspect_model(LlamaConfig(**sizes)).parameters > 3e11


def test_models_that_are_refused() -> None:
    told = inspect_model(tiny_t5())
    assert "not possible: T5ForConditionalGeneration is an encoder-decoder model" in str(told)
    assert told.parameters > 0
    with pytest.raises(UnsupportedModelError, match="has no causal LM for a CLIPConfig"):
        inspect_model(CLIPConfig())
    for given in ("llama", BertConfig):
        with pytest.raises(SettingTypeError, match="inspect_model takes a causal LM"):
            inspect_model(given)
