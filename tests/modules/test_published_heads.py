"""Heads as others publish them, EAGLE-3's and those of blocks: what they draft by hand, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    GenerationConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
)
from transformers.cache_utils import DFlashCache
from transformers.utils import ModelOutput

from helpers.architectures import build
from helpers.blocks import (
    CONFIGS,
    DAMAGED,
    EPSILON,
    HEADS,
    INNER,
    KV_HEADS,
    SIZE,
    THETA,
    block_of,
    context_of,
    logits_by_hand,
    normed,
    published,
    published_assistant,
    turned,
)
from helpers.calls import unchanged
from helpers.fitted import Recording, mtp_of
from helpers.models import BATCH, ROW, VOCABULARY, tiny_llama
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from helpers.watched import watched
from hf_selfspec import MTP, Block, FixedLength, SelfSpec, SettingError, UnsupportedModelError, load_head
from hf_selfspec.batch import Draft, Text
from hf_selfspec.drafts import Session
from hf_selfspec.drafts.attached import source_of
from hf_selfspec.modules.shipped import attached_head
from hf_selfspec.tools.cli import main

# The logits [n, r] of slots in which [n] tokens were drafted after a text [s].
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_logits(
    model: PreTrainedModel, source: Any, inputs: Any, predict: Predict, tokens: torch.Tensor, length: int = 0
) -> None:
    """All that is drafted has these logits, whatever was accepted before: from none to all of a draft, whose first
    tokens are then replaced by the right ones. Without a ``length`` a draft takes one forward."""
    plain, drafts, shown = model.generate(**inputs, max_new_tokens=16), list[int](), Recording(ends=False)

    def check(text: Text, draft: Draft) -> None:
        for row, length in enumerate(draft.lengths):
            if not length:
                continue
            before = text.ids[row, int(inputs["attention_mask"][row].argmax()) : text.lengths[row]]
            expected = predict(before, draft.tokens[row, :length])
            drafted_logits = torch.stack([logits[row] for _, logits, _ in shown.calls[:length]])
            torch.testing.assert_close(drafted_logits[:, tokens], expected, atol=1e-5, rtol=1e-5)
            right = plain[row, text.lengths[row] :][: (7 * len(drafts) + row) % (length + 1)]
            draft.tokens[row, : len(right)] = right
            drafts.append(length)
        shown.calls.clear()

    model(inputs["input_ids"], output_hidden_states=True)  # whose hooks transformers keeps
    spec = SelfSpec(watched(source, check), shown, max_draft=length or 25)
    with unchanged(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, assistant=spec), plain)
    assert spec.stats is not None
    assert max(drafts) == (length or source.module.num_tokens)
    assert 0.2 < spec.stats.acceptance_rate < 0.8
    assert 3 < spec.stats.draft_steps <= spec.stats.rounds * max(length, 1)


@pytest.mark.every_run(".*-batch|dspark gated-one row")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_what_the_definition_predicts(name: str, inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    settings, tensors = published(tmp_path, model, **CONFIGS[name])
    size = settings["draft_vocab_size"]
    tokens = torch.arange(size) + tensors.get("d2t", torch.zeros(size, dtype=torch.long))

    def predict(text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        return logits_by_hand(model, settings, tensors, text, drafted)

    check_logits(model, Block(tmp_path), inputs, predict, tokens)


@pytest.mark.every_run(".*-batch")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]], ids=str)
def test_blocks_are_those_of_transformers(kinds: list[str], inputs: Any, tmp_path: Path) -> None:
    model = tiny_llama(factor=0.5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=6, layer_types=kinds, block_size=5, mask_token_id=3, target_layer_ids=[1, 3, 5],
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    theirs.save_pretrained(tmp_path)

    @torch.no_grad()
    def predict(text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(text) - 1)
        block = torch.tensor([[int(text[-1]), *[3] * 4]])
        entered, places = context_of(model, text, [2, 4, 6])[None], torch.arange(len(text) + 4)[None]
        # The cache has another name in transformers 5.17.
        states = theirs(model.model.embed_tokens(block), entered, None, places, cache)
        expected: torch.Tensor = model.lm_head(states.last_hidden_state[0, 1 : 1 + len(drafted)])
        return expected

    check_logits(model, Block(tmp_path), inputs, predict, torch.arange(VOCABULARY))


# Variants of heads of EAGLE-3 and P-EAGLE: settings of speculators' format (else of the original one), and of both.
EAGLES: dict[str, dict[str, Any]] = {
    "original": {},
    "original, residual": {"norm_before_residual": True, "model_type": "qwen3"},
    "original, output": {"norm_output": True},
    "original, parallel": {"ptd_token_id": 0, "num_hidden_layers": 3},
    "norm before fc": {"speculators_model_type": "eagle3", "norm_before_fc": True, "num_hidden_layers": 2},
    "norms before fc, four states": {
        "speculators_model_type": "eagle3", "fc_norm": True, "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5, 7], "num_hidden_layers": 3,
    },
    "parallel": {
        "speculators_model_type": "peagle", "mask_token_id": 7, "num_hidden_layers": 2, "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4, 6],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}], "verifier": {"name_or_path": "a/b"}},
    },
}  # fmt: skip
_STATES: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
_OF_LAYER = ("num_hidden_layers", "model_type")


def published_eagle(folder: Path, model: PreTrainedModel, size: int = 40, **changed: Any) -> dict[str, torch.Tensor]:
    """Writes a random head with ``size`` draft tokens for a model, see :data:`EAGLES`; returns its tensors."""
    torch.manual_seed(1)
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    read, count = len(changed.get("eagle_aux_hidden_state_layer_ids", [0] * 3)), changed.get("num_hidden_layers", 1)
    is_original = "speculators_model_type" not in changed
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, read * width), "norm": (width,), "lm_head": (size, width)}
    if changed.get("norm_before_fc"):
        shapes["input_norm"] = (read * width,)
    if changed.get("fc_norm"):
        shapes |= {f"fc_norm.{number}": (width,) for number in range(read)}
    for number in range(count):
        layer, norms = f"layers.{number}.", ["input_layernorm", "post_attention_layernorm"]
        if number == 0:
            layer, norms = "midlayer." if is_original else layer, [*norms, "hidden_norm"]
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{layer}self_attn.{name}_proj"] = (heads * SIZE, width if number else 2 * width)
        if changed.get("model_type") == "qwen3":
            shapes |= {f"{layer}self_attn.{name}_norm": (SIZE,) for name in "qk"}
        shapes |= {f"{layer}self_attn.o_proj": (width, HEADS * SIZE), f"{layer}mlp.down_proj": (width, INNER)}
        shapes |= {f"{layer}mlp.{name}_proj": (INNER, width) for name in ("gate", "up")}
        shapes |= {f"{layer}{name}": (width,) for name in norms}
    tensors = {
        f"{name}.weight": torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.15
        for name, shape in shapes.items()
    }
    if "mask_token_id" in changed or "ptd_token_id" in changed:
        tensors["mask_hidden"] = torch.randn(1, 1, read * width)
    if not is_original:  # heads of speculators have embeddings of their own
        tensors["embed_tokens.weight"] = torch.randn(vocabulary, width)
    tokens = torch.randperm(vocabulary)[:size].sort().values
    tensors["d2t"] = tokens - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    layer = {
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": vocabulary, "hidden_size": width,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE,
        "rms_norm_eps": EPSILON, "rope_theta": THETA,
    } | {name: changed.pop(name) for name in _OF_LAYER if name in changed}  # fmt: skip
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size} | changed
    config |= layer if is_original else {"transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


@torch.no_grad()
def eagle_by_hand(
    model: PreTrainedModel,
    settings: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    layers: list[int],
    text: torch.Tensor,
    drafted: torch.Tensor,
) -> torch.Tensor:
    """The logits ``[n, r]`` of a head after a text ``[s]`` and none, one, ... of the drafted tokens ``[n]``, by the
    papers' definitions, without caches."""
    weights = {
        name.replace("midlayer.", "layers.0.").removesuffix(".weight").replace("self_attn.", ""): value
        for name, value in tensors.items()
    }
    table, width = weights.get("embed_tokens", model.get_input_embeddings().weight), model.config.hidden_size

    def fused(known: torch.Tensor) -> torch.Tensor:
        if "input_norm" in weights:
            known = normed(weights["input_norm"], known)
        if "fc_norm.0" in weights:
            parts = enumerate(known.split(width, dim=-1))
            known = torch.cat([normed(weights[f"fc_norm.{number}"], part) for number, part in parts], dim=-1)
        return known @ weights["fc"].T

    def run(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number in range(settings.get("num_hidden_layers", 1)):
            of, s = {name.removeprefix(f"layers.{number}."): value for name, value in weights.items()}, len(states)
            entered = normed(of["input_layernorm"], states if number else table[tokens])
            if number == 0:
                before = normed(of["hidden_norm"], states)
                entered = torch.cat([entered, before], dim=-1)
                states = before if settings.get("norm_before_residual") else states
            q, k, v = ((entered @ of[f"{name}_proj"].T).view(s, -1, SIZE).transpose(0, 1) for name in "qkv")
            if "q_norm" in of:
                q, k = normed(of["q_norm"], q), normed(of["k_norm"], k)
            q, k = turned(q, torch.arange(s)), turned(k, torch.arange(s))
            k, v = (values.repeat_interleave(HEADS // KV_HEADS, 0) for values in (k, v))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(s, -1)
            states = states + attended @ of["o_proj"].T
            inner = normed(of["post_attention_layernorm"], states)
            gate = silu(inner @ of["mlp.gate_proj"].T) * (inner @ of["mlp.up_proj"].T)
            states = states + gate @ of["mlp.down_proj"].T
        return states

    states, tokens, count = fused(context_of(model, text, layers)), text[1:], len(drafted)
    if "mask_hidden" in weights:
        mask = settings.get("mask_token_id", settings.get("ptd_token_id"))
        tokens = torch.cat([tokens, torch.full((count - 1,), mask)])
        left = run(torch.cat([states, fused(weights["mask_hidden"][0]).expand(count - 1, -1)]), tokens)[-count:]
        return normed(weights["norm"], left) @ weights["lm_head"].T
    found = []
    for depth in range(count):
        left = run(states, torch.cat([tokens, drafted[:depth]]))[-1:]
        last = normed(weights["norm"], left)
        found.append(last @ weights["lm_head"].T)
        states = torch.cat([states, last if settings.get("norm_output") else left])
    return torch.cat(found)


@pytest.mark.every_run("norms.*-one row|(original, residual|original, parallel|parallel)-batch")
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("name", EAGLES)
def test_drafts_of_eagle_are_what_the_definition_predicts(name: str, inputs: Any, tmp_path: Path) -> None:
    """Also after a save in our own format."""
    model, settings = tiny_llama(8, factor=0.5), EAGLES[name]
    layers = [1, 2, 6] if name == "original, residual" else settings.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
    tensors = published_eagle(tmp_path, model, **settings)
    if name == "original, output":  # with embeddings of its own, and a file of the older kind
        tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, model.config.hidden_size)
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    tokens = torch.arange(40) + tensors["d2t"]

    def predict(text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        return eagle_by_hand(model, settings, tensors, layers, text, drafted)

    source = MTP.from_eagle3(tmp_path, layers if layers == [1, 2, 6] else ())
    source.module.save_pretrained(tmp_path / "saved")
    for each in (source, MTP(tmp_path / "saved")):
        check_logits(model, each, inputs, predict, tokens, 0 if "parallel" in name else 3)


# Keys of one head, twice as wide, in full attention.
_WIDE = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_TOKENS = "masked_embedding.token_ordering"
_ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}


# In a batch the lowest logits of an order are those of all rows.
@pytest.mark.parametrize(
    ("kind", "settings", "inputs"),
    [("gemma4", {}, BATCH), ("gemma4_unified", {}, ROW), ("gemma4", _ORDERED, ROW)],
    ids=["batch", "unified", "ordered"],
)
def test_assistants_are_those_of_transformers(kind: str, settings: Any, inputs: Any, tmp_path: Path) -> None:
    """What its generator of candidates computes of a text, given what its cache holds of verified tokens."""
    model = build("gemma4_text", model_type=f"{kind}_text", vocab_size=96, vocab_size_per_layer_input=96, **_WIDE)
    theirs, generation = published_assistant(tmp_path, model, **settings), GenerationConfig(max_length=100)

    @torch.no_grad()
    def predict(text: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        known, cache = text[None, :-1], DynamicCache(config=model.config)
        # Cut to the window, as the cache is behind each round.
        state = model(known, None, None, cache, output_hidden_states=True).hidden_states[-1][:, -1:]
        layers = zip(model.config.layer_types, cache.layers, strict=False)  # the last ones of each kind with keys count
        keys = {kind: (layer.keys, layer.values) for kind, layer in layers if layer.keys is not None}
        theirs.generation_config.num_assistant_tokens = len(drafted)
        generator = model._get_candidate_generator(generation, text[None], None, [], {}, theirs)
        outputs = ModelOutput(hidden_states=[state], shared_kv_states=keys)
        found: torch.Tensor = generator.get_candidates(text[None], {}, outputs, False, 0)[1][0]
        return found

    check_logits(model, MTP(tmp_path), inputs, predict, torch.arange(96), 3)


# Heads of each kind for a model with few layers, by their folder.
OF_ANY_MODEL: dict[str, Callable[[Path, PreTrainedModel], Any]] = {
    "EAGLE-3": lambda folder, model: published_eagle(folder, model, **_STATES | EAGLES["norm before fc"]),
    "P-EAGLE": lambda folder, model: published_eagle(folder, model, **EAGLES["parallel"] | _STATES),
    **{
        name: lambda folder, model, name=name: published(folder, model, layers=(1, 2), **CONFIGS[name])  # type: ignore[misc]  # a default of a lambda
        for name in ("dflash2", "z-lab window", "z-lab dflash2")
    },
}


_MODELS = ["llama", "qwen3_next", "falcon_h1", "gemma3_text", "mixtral"]


@pytest.mark.every_run("(llama|qwen3_next|gemma4_text)-.*|(gemma3_text|mixtral)-(P-EAGLE|dflash2)")
@pytest.mark.parametrize(("name", "kind"), [*product(_MODELS, OF_ANY_MODEL), ("gemma4_text", "assistant")])
def test_ids_are_plain(name: str, kind: str, tmp_path: Path) -> None:
    """With heads that were drawn, and with drafts that are right up to any place."""
    model, options = build(name), {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    OF_ANY_MODEL.get(kind, published_assistant)(tmp_path, model)
    load_head(model, tmp_path)
    row, chance = {key: value[1:2] for key, value in BATCH.items()}, random.Random(0)
    for inputs in (row,) if name in ("qwen3_next", "falcon_h1") else (BATCH, row):  # plain serves batches of states
        plain = model.generate(**inputs, **options)

        def right(text: Text, draft: Draft, plain: torch.Tensor = plain) -> None:
            for row, length in enumerate(draft.lengths):
                follow = plain[row, text.lengths[row] :][: chance.randint(0, length)]
                draft.tokens[row, : len(follow)] = follow

        head = attached_head(model)
        assert head is not None
        for spec in (SelfSpec(source_of(head)), SelfSpec(watched(source_of(head), right))):
            with unchanged(model):
                assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
            assert spec.stats is not None
            assert spec.stats.drafted > 0
        assert spec.stats.acceptance_rate > 0.2


def test_tokens_that_an_assistant_draws_have_the_models_distribution(tmp_path: Path) -> None:
    model = build("gemma4_text", vocab_size=5, vocab_size_per_layer_input=5)
    published_assistant(tmp_path, model)
    spec = SelfSpec(MTP(tmp_path), FixedLength(3))
    check_exact(sample(spec, model), exact_joint(model, []))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"ptd_token_id": 3, "num_hidden_layers": 2}], ids=["EAGLE-3", "P-EAGLE"])
def test_drawn_tokens_have_the_models_distribution(settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_vocabulary()
    published_eagle(tmp_path, model, size=model.config.vocab_size - 1, **settings)
    changed_weights(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(0.1))  # else few are accepted
    spec = SelfSpec(MTP.from_eagle3(tmp_path, [1, 2, 3]), FixedLength(3))
    check_exact(sample(spec, model), exact_joint(model, []))


def changed_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


_LAYER = "transformer_layer_config"
# What writes a head of each kind, what reads it, and what of its config is not served.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Path], Any], list[tuple[dict[str, Any], str]]]] = {
    "block": (
        published,
        Block,
        [
            ({"speculators_model_type": "dflash3"}, "not served: dflash3"),
            ({"speculators_model_type": "dflash2"}, "not served: a selector with a reduced vocabulary"),
            ({"speculators_model_type": "dspark", "markov_head_type": "lstm"}, "served: a Markov head of type lstm"),
            ({_LAYER: {"model_type": "gemma2"}}, "not served: layers of gemma2"),
            ({_LAYER: {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "positions of type dynamic"),
            ({_LAYER: {"intermediate_size": 32}, "block_size": 5}, "size mismatch"),
            ({"target_hidden_size": 32}, "not served: target_hidden_size"),
            ({"mask_token_id": None}, "has no mask_token_id"),
            ({"aux_hidden_state_layer_ids": None}, "holds no block head, or one whose"),
            ({"block_size": 1}, "block_size must be"),
        ],
    ),
    "EAGLE-3": (
        published_eagle,
        MTP.from_eagle3,
        [
            ({"model_type": "gemma2"}, "not served: layers of gemma2"),
            ({"fc_norm": True, "norm_before_fc": True}, "not served: norm_before_fc and fc_norm together"),
            ({"parallel_drafting": True}, "not served: parallel drafts without a mask token"),
            ({"layer_types": ["sliding_attention"]}, "not served: sliding attention"),
            ({"partial_rotary_factor": 0.5}, r"not served: partial_rotary_factor 0\.5"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
                r"not served: partial_rotary_factor 0\.5",
            ),
            (
                {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
                "not served: sliding attention",
            ),
            ({"state_layers": [1, 3, 4, 5]}, r"size mismatch for fuse\.weight"),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, "in two ways"),
            ({"hidden_size": 32}, "size mismatch"),
            ({"hidden_size": "wide"}, "holds no MTP head"),
        ],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_served_is_refused(kind: str, tmp_path: Path) -> None:
    (write, read, configs), model = KINDS[kind], tiny_llama(8)
    for change, message in configs:
        write(tmp_path, model)
        config = json.loads((tmp_path / "config.json").read_text())
        of_layer = {_LAYER: config[_LAYER] | change[_LAYER]} if _LAYER in change else {}
        (tmp_path / "config.json").write_text(json.dumps(config | change | of_layer))
        with pytest.raises(SettingError, match=message):
            read(tmp_path)
    for damage, message in DAMAGED.values():
        write(tmp_path, model)
        changed_weights(tmp_path, damage)
        with pytest.raises(SettingError, match=message):
            read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(SettingError, match="cut short"):
        read(tmp_path)


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    """Before a mask token is looked up, which on a GPU would be the end of the process."""
    outside = [
        (f"the mask token {token}, and a vocabulary of 97", {"mask_token_id": token}, tiny_llama())
        for token in (-1, 97)
    ]
    for message, settings, model in (
        ("a vocabulary of 97", {}, tiny_llama(vocabulary=90)),
        (r"before layers \[1, 3, 5\], and the model has 5", {"layers": (1, 3, 5)}, tiny_llama(5)),
        ("width 64, and the model has 32", {}, build("llama", num_hidden_layers=8)),
        (r"before layers \[-1, 3, 5\], and the model has 6", {"layers": (-1, 3, 5)}, tiny_llama()),
        *outside,
    ):
        spec = SelfSpec(Block(block_of(tiny_llama(), **settings)))
        with unchanged(model), pytest.raises(SettingError, match=message):
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, assistant=spec)


def test_assistants_of_other_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published_assistant(tmp_path, build("gemma4_text"))
    for message, model in (
        ("width 32, and the model has 64", tiny_llama()),
        (r"\(2, 8\)}, and the model shares {} between", build("llama")),
        (r"and the model shares .*'full_attention': \(1, 16\)", build("gemma4_text", **_WIDE)),
    ):
        with pytest.raises(SettingError, match=message):
            load_head(model, tmp_path)
        with unchanged(model), pytest.raises(SettingError, match=message):
            model.generate(**ROW, max_new_tokens=4, assistant=SelfSpec(MTP(tmp_path)))
    monkeypatch.setattr(Session, "is_tensor_parallel", True)
    with pytest.raises(UnsupportedModelError, match="tensor-parallel processes"):
        build("gemma4_text").generate(**ROW, max_new_tokens=4, assistant=SelfSpec(MTP(tmp_path)))


def test_assistants_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    for message, settings, change in (
        ("post_projection.weight is missing", {}, lambda tensors: tensors.pop("post_projection.weight")),
        ("extra is missing, or not known", {}, lambda tensors: tensors.update(extra=torch.ones(1))),
        ("token_ordering has not each token once", _ORDERED, lambda tensors: tensors[_TOKENS].fill_(1)),
        ("holds no MTP head", _ORDERED | {"centroid_intermediate_top_k": 13}, lambda tensors: None),
    ):
        published_assistant(tmp_path, build("gemma4_text", vocab_size=96, vocab_size_per_layer_input=96), **settings)
        changed_weights(tmp_path, change)
        with pytest.raises(SettingError, match=message):
            MTP(tmp_path)


_BLOCK = "2 layers of width 64, reads the states before the layers 1, 2, 4"
# What is told of heads from their configs alone.
TOLD: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    **{
        f"EAGLE-3, {name}": (
            published_eagle,
            {"architectures": [name]},
            "EAGLE-3 head, 1 layer of width 64, drafts 40 of 97 tokens",
        )
        for name in ("LlamaForCausalLM", "LlamaForCausalLMEagle3")
    },
    "P-EAGLE": (
        published_eagle,
        EAGLES["parallel"],
        "P-EAGLE head (5 tokens at once), 2 layers of width 64, reads the states before the layers 1, 3, 4, 6, drafts "
        "40 of 97 tokens, made for a/b",
    ),
    "DFlash": (published, CONFIGS["dflash"], f"DFlash head (blocks of 4 tokens), {_BLOCK}, drafts 96 of 97 tokens"),
    "ours": (
        lambda folder, model: mtp_of(model, 2).save_pretrained(folder),
        {},
        "MTP head, 2 layers of width 64, drafts all tokens",
    ),
    "assistant": (
        published_assistant,
        {},
        "assistant that reads the model's keys and values, 2 layers of width 24, drafts all 97 tokens, made for a "
        "Gemma 4 of width 32",
    ),
    "shipped": (
        lambda folder, model: DeepseekV3Config().save_pretrained(folder),
        {},
        "MTP head, 1 layer, made for the deepseek_v3 that it ships with",
    ),
}


@pytest.mark.parametrize("kind", TOLD)
def test_what_a_head_is_can_be_told(kind: str, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    """From its config alone, and when it is attached to a model."""
    (write, settings, told), model = TOLD[kind], build("gemma4_text") if kind == "assistant" else tiny_llama(8)
    write(tmp_path, model, **settings)
    if kind != "shipped":
        with caplog.at_level("INFO", "hf_selfspec"):
            assert str(load_head(model, tmp_path)) == told
        assert [record.message for record in caplog.records] == [f"{tmp_path}: {told}"]
        (tmp_path / "model.safetensors").unlink()
    assert main(["inspect", "--head", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{told}\n"


def test_what_holds_no_head_is_told(tmp_path: Path, capsys: Any) -> None:
    for config, words in (
        ("{}", "holds no (head|part)"),
        ('{"speculators_model_type": "xpress"}', "not served: xpress"),
        ('{"model_type": "gemma9_assistant"}', "holds no (head|part)"),
    ):
        (tmp_path / "config.json").write_text(config)
        assert main(["inspect", "--head", str(tmp_path)]) == 2
        assert re.search(words, capsys.readouterr().err)
        with pytest.raises(SettingError, match=words):
            load_head(tiny_llama(), tmp_path)
    assert main(["inspect"]) == 2
    assert "inspect needs --model or --head" in capsys.readouterr().err
