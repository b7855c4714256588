"""Drafts as checkpoints of their own: logits, ids with transformers' own loop, what is refused."""

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedModel

from helpers.architectures import ARCHITECTURES, SHARING, STATEFUL, build
from helpers.calls import unchanged
from helpers.fitted import adapter_of, heads_of
from helpers.models import character_tokenizer, ragged_batch, tiny_llama
from helpers.multimodal import build as build_multimodal
from helpers.processes import peft_calls_old_name
from hf_selfspec import FixedLength, OnTheFlySearch, SelfSpec
from hf_selfspec.drafts import MTP, Cascade, DynamicExit, EarlyExit, EarlyExitAdapter, Lookup, SkipLayers
from hf_selfspec.errors import SelfSpecError, SettingError, SettingTypeError, UnsupportedModelError
from hf_selfspec.learned import saving
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.tools import exporting
from hf_selfspec.tools.exporting import partial_logits

pytestmark = [pytest.mark.usefixtures("no_grad"), peft_calls_old_name]

# Longer than the windows of the tests' models.
TEXT = ragged_batch((24,), seed=3)
EXIT, SKIP = EarlyExit(2), SkipLayers([1], [1])
WITHOUT_STATES = [name for name in ARCHITECTURES if name not in STATEFUL]
# Those that transformers' own loop is tried with, and those whose files have names that modules do not have.
ASSISTED = ("bloom", "cohere2", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama4_text", "mpt")
NAMED = ("falcon", "gpt_oss", "mixtral", "qwen3_moe")
# A layer of these is another one at another place, or shares what it reads with others.
NO_OTHER_PLACE = ("diffllama", *SHARING)


def loaded(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """What transformers makes of the folder, in which nothing is missing or left over."""
    how = {"output_loading_info": True, "attn_implementation": model.config._attn_implementation}
    draft, report = AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not any(report.values()), report
    return draft


def exported(source: EarlyExit | SkipLayers, model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The draft from its folder, after a comparison of its logits with those of the partial model."""
    SelfSpec(source).export_draft(folder, model)
    draft = loaded(folder, model)
    ids = TEXT["input_ids"]
    expected = partial_logits(model, Anatomy.of(model), source.plan(Anatomy.of(model)), ids)
    assert (draft(input_ids=ids, use_cache=False).logits - expected).abs().max() <= 1e-5
    return draft


@pytest.mark.every_run("cohere2|deepseek_v3|falcon|gemma3_text|gpt2|mixtral|opt|phi3")
@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_logits_ids_and_names_on_architectures(name: str, tmp_path: Path) -> None:
    """Assisted generation of transformers gives plain's tokens; the files are those of the family, without layers."""
    (model := build(name)).save_pretrained(tmp_path / "whole")
    parts = {EXIT: name not in SHARING, SKIP: name not in NO_OTHER_PLACE}
    drafts = {part: exported(part, model, tmp_path / type(part).__name__) for part, can in parts.items() if can}
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    for draft in drafts.values() if name in ASSISTED else ():
        draft.generation_config.eos_token_id = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers' own loop
            ids = model.generate(**TEXT, **options, assistant_model=draft)
        assert torch.equal(ids, model.generate(**TEXT, **options))
    if EXIT in drafts:
        assert len(Anatomy.of(drafts[EXIT]).layers) == 2
    if name in NAMED:
        whole, draft = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "EarlyExit"))
        layers = {key: re.search(r"\.(?:layers|h)\.(\d+)\.", key) for key in whole}
        assert draft.keys() == {key for key, layer in layers.items() if layer is None or int(layer[1]) < 2}
        assert all(torch.equal(value, whole[key]) for key, value in draft.items())


def test_experts_and_kinds_of_attention_stay_with_their_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliding, full = "sliding_attention", "full_attention"
    kinds = {"num_hidden_layers": 6, "layer_types": [sliding, full] * 3}
    sparse = {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    for name, settings, skipped, expected in (
        ("qwen3_moe", sparse, [2, 4], {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2, 4]}),
        ("deepseek_v3", {"first_k_dense_replace": 2}, [1], {"num_hidden_layers": 3, "first_k_dense_replace": 1}),
        ("gemma3_text", kinds, [2, 4], {"layer_types": [sliding, full, full, full]}),
    ):
        monkeypatch.setitem(ARCHITECTURES, name, ARCHITECTURES[name] | settings)
        config = exported(SkipLayers(skipped, skipped), build(name), tmp_path / name).config
        assert {setting: getattr(config, setting) for setting in expected} == expected
    assert "layer_types" in (tmp_path / "gemma3_text" / "README.md").read_text()


def test_the_model_stays_as_it_was(fresh_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    model = fresh_llama.train()
    values, config = {name: value.clone() for name, value in model.state_dict().items()}, model.config.to_dict()
    with unchanged(model):
        SelfSpec(EXIT).export_draft(tmp_path / "draft", model)
    assert model.config.to_dict() == config
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_dtype_ties_tokenizer_and_generation_config(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = tied
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, assistant=SelfSpec())
    tokenizer = character_tokenizer()
    tokenizer.chat_template = {"default": "a template", "tools": "another"}  # which are in a folder of their own
    SelfSpec(EXIT).export_draft(tmp_path, model, tokenizer)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (draft.dtype, draft.generation_config.top_k) == (torch.bfloat16, 7)
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    assert "selfspec" not in (tmp_path / "generation_config.json").read_text().lower()
    assert model.generation_config.assistant == SelfSpec()
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert (again.get_vocab(), again.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)


def test_only_an_earlier_draft_is_replaced(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    place = tmp_path / "draft"
    SelfSpec(Cascade([Lookup(), EXIT])).export_draft(place, llama)  # free drafts are left out
    (place / "model-00002-of-00002.safetensors").write_text("of an earlier draft")
    SelfSpec(EarlyExit(3)).export_draft(place, llama)
    assert sorted(file.name for file in place.glob("*.safetensors")) == ["model.safetensors"]
    assert loaded(place, llama).config.num_hidden_layers == 3
    llama.save_pretrained(tmp_path / "whole")
    with pytest.raises(SettingError, match=r"config\.json of another model"):
        SelfSpec(EXIT).export_draft(tmp_path / "whole", llama)
    assert loaded(tmp_path / "whole", llama).config.num_hidden_layers == 6
    with pytest.raises(SettingTypeError, match=r"export_draft\(tokenizer\) must be a tokenizer"):
        SelfSpec(EXIT).export_draft(tmp_path, llama, tokenizer="smollm")


def test_the_card_has_commands_of_each_engine(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    SelfSpec(SkipLayers([2], [2]), FixedLength(4)).export_draft(tmp_path, llama)
    card = (tmp_path / "README.md").read_text()
    assert "`##.###`" in card
    assert "Some of its layers, written" in card
    lines = re.findall(r"^(?:vllm serve|python3 -m|llama-server).*$", card.replace("\\\n", ""), re.MULTILINE)
    vllm, sglang, llama_cpp = map(shlex.split, lines)
    assert json.loads(vllm[-1]) == {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options["--speculative-algorithm"] == "STANDALONE"
    assert options["--speculative-draft-model-path"] == str(tmp_path)
    assert int(options["--speculative-num-draft-tokens"]) == int(options["--speculative-num-steps"]) + 1 == 5
    assert llama_cpp[3:] == ["-md", "draft.gguf", "--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        compile(code, "card", "exec")


def test_what_a_search_has_chosen_is_exported(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """By the ``SelfSpec`` that has searched, and by one of its file; here the set of the file is another one."""
    spec = SelfSpec.swift(search=OnTheFlySearch(8, budget=1.0))
    with pytest.raises(SettingError, match=r"has chosen no part of LlamaForCausalLM yet.*Generate"):
        spec.export_draft(tmp_path / "draft", llama)
    llama.generate(**TEXT, max_new_tokens=40, do_sample=False, assistant=spec)
    with pytest.raises(UnsupportedModelError, match="attention or the MLP is left out alone"):
        spec.export_draft(tmp_path / "draft", llama)
    assert not (tmp_path / "draft").exists()
    spec.save_pretrained(tmp_path / "spec", llama)
    saved = saving.read(tmp_path / "spec" / "selfspec.json")
    (search,) = (state for state in saved.findings.values() if "set" in state)
    search["set"] = "###.##"
    saving.write(saved)
    spec = SelfSpec.from_pretrained(tmp_path / "spec")
    spec.export_draft(tmp_path / "draft", llama)
    assert "`###.##`" in (tmp_path / "draft" / "README.md").read_text()
    with pytest.raises(SettingError, match="was saved for"):
        spec.export_draft(tmp_path / "other", tiny_llama(seed=1))


def changed(name: str, value: Any) -> PreTrainedModel:
    """A model of which an attribute, or a setting of its config, is another one."""
    model = tiny_llama()
    setattr(model.config if hasattr(model.config, name) else model, name, value)
    return model


# What drafts, or how it is made for the model; the model, or how it is made; and what the error says.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "two sources": (Cascade([Lookup(), EXIT, SKIP]), tiny_llama, "has 2 sources besides its free drafts"),
    "heads": (lambda model: DynamicExit(heads_of(model, 0.5)), tiny_llama, "a checkpoint has nothing else"),
    "adapter": (lambda model: EarlyExitAdapter(adapter_of(model)), tiny_llama, "layers of the model alone"),
    "own layers": (MTP(), tiny_llama, "cannot be exported.*from the model.s own checkpoint"),
    "one block": (SkipLayers([1, 2], [1]), tiny_llama, r"in layers \[2\] of LlamaForCausalLM .* is left out alone"),
    "depth": (EarlyExit(6), tiny_llama, "must be between 1 and 5"),
    "PEFT": (EXIT, lambda: peft.get_peft_model(tiny_llama(), peft.LoraConfig()), r"Merge them first: .*merge_and_un"),
    "quantised": (EXIT, lambda: changed("hf_quantizer", object()), "it is quantised"),
    "offloaded": (EXIT, lambda: changed("lm_head", torch.nn.Linear(64, 97, device="meta")), "cpu, meta. Load it on"),
    "config": (EXIT, lambda: changed("hidden_size", 63), "no model of some of its layers"),
    "images": (EXIT, lambda: build_multimodal("llava"), "more than a text model"),
    "states": (EXIT, lambda: build("mamba"), "MambaForCausalLM has recurrent states"),
    "shared": (EXIT, lambda: build("gemma3n_text"), "so none can be taken out of it"),
    "place": (SKIP, lambda: build("diffllama"), r"layer 2 of DiffLlamaForCausalLM .* layer 1 .*lambda_init"),
    "another draft": (EXIT, tiny_llama, "would not predict what this part of LlamaForCausalLM predicts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_checkpoint_holds(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, make, message = REFUSED[case]
    model = make()
    if case == "another draft":
        monkeypatch.setattr(exporting, "draft_model", lambda *_: tiny_llama(2, seed=1))
    with pytest.raises(SelfSpecError, match=message):
        SelfSpec(source(model) if callable(source) else source).export_draft(tmp_path / "draft", model)
    assert not (tmp_path / "draft").exists()
