"""Tiny random models of many architectures, built from configs."""

import copy
import warnings
from typing import Any
from unittest import SkipTest

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_selfspec.model.anatomy import Anatomy

VOCABULARY = 97

# Types of models that differ in what this package touches: ids of the parameters that each run has.
EVERY_RUN = (
    "bamba|bloom|cohere2|deepseek_v3|falcon|gemma2|gemma3_text|glm_moe_dsa|gpt2|gpt_neox|gpt_oss|llama|mamba2|mixtral|"
    "opt|phi3|qwen3_next|zamba2"
)

# What nearly every config understands; entries below add to it, replace it, or (with None) take away from it.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_GPT: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None}
_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "head_dim": None, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip
_WINDOW: dict[str, Any] = {"sliding_window": 8}
# So many heads that scores of 0, which no order decides, are rare.
_INDEXED: dict[str, Any] = _MLA | {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in (
        "apertus", "arcee", "bitnet", "diffllama", "doge", "ernie4_5", "gemma", "helium", "hunyuan_v1_dense", "jais2",
        "llama", "nemotron", "olmo", "olmo2", "phi", "qwen3", "seed_oss", "smollm3", "stablelm",
    )},
    **dict.fromkeys(("mistral", "olmo3", "phi3", "starcoder2"), _WINDOW),
    **dict.fromkeys(("granitemoe", "olmoe", "qwen3_moe"), _MOE),
    **dict.fromkeys(("gpt_oss", "mixtral", "phimoe"), _MOE | _WINDOW),
    "persimmon": _GPT,
    "deepseek_v32": _INDEXED,
    "deepseek_v3": _MLA,
    "biogpt": _GPT | {"scale_embedding": False},
    "bloom": _GPT | {"n_layer": 4, "n_head": 4},
    "codegen": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 4, "n_ctx": 128},
    "cohere": {"logit_scale": 0.25},
    "cohere2": _WINDOW | {"logit_scale": 0.25},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": _MLA | {"topk_method": "greedy"},
    "dots1": _MLA | {"num_key_value_heads": 2, "head_dim": 8},
    "exaone4": _WINDOW | {"sliding_window_pattern": 2},
    "falcon": _GPT | {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "falcon-alibi": _GPT | {"model_type": "falcon", "alibi": True, "new_decoder_architecture": False},
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "gemma3_text": _WINDOW | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gemma3n_text": _WINDOW | {
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 5, "num_hidden_layers": 5,
        "intermediate_size": [48] * 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": _MLA | {"num_key_value_heads": 2, "head_dim": 8},
    "glm_moe_dsa": _INDEXED | {"indexer_types": ["full", "shared", "full", "full"]},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gpt_neo": {
        "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8,
        "num_attention_heads": None, "num_hidden_layers": None,
    },
    "gpt_neox": _GPT | {"rotary_pct": 0.5},
    "gptj": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "hy_v4": _INDEXED | {"indexer_types": ["full", "shared", "full", "full"]},
    "llama4_text": _MOE | {
        "attention_chunk_size": 8, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
        "attn_temperature_tuning": False,
    },
    "ministral": _WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "modernbert-decoder": _WINDOW | {"local_attention": 16, "global_attn_every_n_layers": 2},
    "mpt": {"use_cache": True, "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128, "expansion_ratio": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32} | _GPT,
    "opt-350m": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False} | _GPT,
    "qwen2": _WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 16},
    "vaultgemma": _WINDOW | {"query_pre_attn_scalar": 8},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4},
}  # fmt: skip

_STATE_SPACE: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
_PURE: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "expand": 2, "use_associative_scan": False}
_GATED: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_KIMI: dict[str, Any] = _MLA | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "num_local_experts": 4,
}
_INKLING: dict[str, Any] = _MOE | {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 8,
    "d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": VOCABULARY, "n_routed_experts": 4, "n_shared_experts": 1,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2, "rope_parameters": None,
}  # fmt: skip

# Whose code after the last layer takes one batch alone, and whose later layers read what earlier ones have stored.
NO_EXITS = ("gpt_bigcode", "hy_v4", "inkling2_text", "qwen4_exp_text")
SHARING = ("gemma3n_text", "gemma4_text", "glm_moe_dsa", "hy_v4")

# Models with recurrent states.
STATEFUL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _KIMI | {"q_lora_rank": None, "head_dim": 8, "short_conv_kernel_size": 4, "layer_group_size": 2},
    "bamba": _STATE_SPACE | {"attn_layer_indices": [1, 3]},
    "falcon_h1": _STATE_SPACE | {"mamba_d_ssm": 64},
    "falcon_mamba": _PURE,
    "granitemoehybrid": _STATE_SPACE | _MOE | {
        "shared_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "inkling2_text": _INKLING | {"n_layers_per_attn_res_block": 2},
    "inkling_text": _INKLING,
    "jamba": _MOE | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_associative_scan": False, "use_mamba_kernels": False,
    },
    "kimi_linear": _KIMI | {"q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
    "lara_mini": _MOE,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": _MOE | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "sliding_window": 8},
    "mamba": _PURE,
    "mamba2": _PURE | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp", "mamba", "attention"], "num_hidden_layers": None,
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
    },
    "olmo_hybrid": _GATED | {"linear_num_key_heads": 4},
    "qwen3_5_moe_text": _GATED | _MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _GATED,
    "qwen3_next": _GATED | _MOE | {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": _GATED | _MOE | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "shared_expert_intermediate_size": 16,
        "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 8,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "attention_head_dim": 16,
        "num_key_value_heads": 4, "use_associative_scan": False,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 8,
        "num_key_value_heads": 4, "adapter_rank": 4,
    },
}  # fmt: skip
# In this order, since which drafts a test has goes by place.
ARCHITECTURES = dict(sorted(ARCHITECTURES.items())) | STATEFUL
ARCHITECTURES["gemma4_text"] = _WINDOW | {
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "num_global_key_value_heads": 2, "global_head_dim": 8, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip

# Types that the oldest transformers we support does not have.
_NEWER = ("bailing_hybrid", "inkling2_text", "lara_mini", "lfm3", "sarvam_mla", "sarvam_moe")
# And those whose states are kept there in a way that is refused.
_REFUSED_IN_OLDEST = ("nemotron_h", "qwen4_exp_text")

_EAGER_ONLY = ("gpt_oss", "gemma2", "vaultgemma")

# Architectures that normalise what a block adds: damping its weights alone would change nothing.
_POST_NORM = ("olmo2", "olmo3", "exaone4", "glm4", "gemma2", "gemma3_text", "gemma3n_text")

# Seed and damping with which every draft of the tests is partly accepted and partly rejected.
_CHOSEN: dict[str, tuple[int, float]] = {
    "ctrl": (1, 0.5),
    "glm4": (0, 0.35),
    **dict.fromkeys(("olmoe", "persimmon", "zamba"), (0, 1.0)),
    **dict.fromkeys(("starcoder2", "granitemoe", "granite", "gpt_bigcode", "jais2", "mpt", "qwen2"), (0, 0.7)),
    **dict.fromkeys(("vaultgemma", "falcon_mamba", "jamba", "mamba"), (0, 0.7)),
}


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model of the architecture."""
    entry = ARCHITECTURES[name] | changes
    model_type = entry.pop("model_type", name)
    if model_type in _NEWER and model_type not in CONFIG_MAPPING:
        raise SkipTest(f"transformers {transformers.__version__} has no {model_type} yet")
    skip_if_refused(model_type)
    settings = {key: value for key, value in (COMMON | entry).items() if value is not None}
    config = AutoConfig.for_model(model_type, **copy.deepcopy(settings))  # configs write into what they are given
    if model_type in _EAGER_ONLY:
        config._attn_implementation = "eager"
    return config


def build(name: str, seed: int | None = None, factor: float | None = None, **changes: Any) -> PreTrainedModel:
    """A random model of the architecture whose layers from 1 on are damped, so that drafts are right now and then."""
    chosen_seed, chosen_factor = _CHOSEN.get(name, (0, 0.5))
    config = config_of(name, **changes)
    torch.manual_seed(chosen_seed if seed is None else seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config).eval()
    return draftable(model, chosen_factor if factor is None else factor)


def skip_if_refused(model_type: str) -> None:
    if model_type in _REFUSED_IN_OLDEST and transformers.__version__.startswith("5.17."):
        raise SkipTest(f"the {model_type} of transformers {transformers.__version__} is refused")


def draftable(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """The model with wide random weights, layers from 1 on damped by ``factor``, and no end-of-text token."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    _spread(model)
    post_norm = model.config.get_text_config(decoder=True).model_type in _POST_NORM
    with torch.no_grad():
        for layer in Anatomy.of(model).layers[1:]:
            for parameter in layer.parameters():
                if parameter.dim() > 1 or post_norm:
                    parameter.mul_(factor)
    return model


def _spread(model: PreTrainedModel) -> None:
    """Random weights wide enough that the text is not one token over and over."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif not torch.isfinite(parameter).all() or parameter.abs().max() == 0:
                parameter.normal_(0.0, 0.02)
        model.get_input_embeddings().weight.normal_(0.0, 0.5)
