"""Tiny random models that take images or sound beside text, built from configs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from architectures import draftable
from transformers import AutoConfig, PreTrainedModel

IMAGE, VIDEO = 90, 91
VOCABULARY = 97

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
}
_AUDIO: dict[str, Any] = {
    "model_type": "qwen2_audio_encoder",
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "max_source_positions": 16,
}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
_CHUNKS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
    "attn_temperature_tuning": False,
}
_GEMMA3: dict[str, Any] = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}
_PROJECTED: dict[str, Any] = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}


def _text(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type} | _TEXT | settings


# Class, and configs; the tokens of images have the ids above.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", {"text_config": _text("llama"), "vision_config": _CLIP}),
    "llava_next": ("LlavaNextForConditionalGeneration", {"text_config": _text("llama"), "vision_config": _CLIP}),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {"text_config": _text("gemma"), "vision_config": _SIGLIP, "projection_dim": 32},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {"text_config": _text("llama"), "vision_config": _VISION, "scale_factor": 1},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"text_config": _text("llama"), "vision_config": _VISION, "scale_factor": 1},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {"text_config": _text("qwen2"), "vision_config": _VISION | {"image_size": [8, 8], "patch_size": [4, 4]}},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {"text_config": _text("llama4_text", **_CHUNKS), "vision_config": _VISION | _PROJECTED},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": _text("gemma3_text", **_GEMMA3), "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": _text("qwen2_vl_text", **_MROPE), "vision_config": _QWEN_VISION | {"hidden_size": 32}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _text("qwen2_5_vl_text", **_MROPE),
            "vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": _text("qwen3_vl_text", **_MROPE),
            "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {"text_config": _text("glm4v_text", **_MROPE), "vision_config": _QWEN_VISION | {"image_size": 8}},
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {"text_config": _text("qwen2"), "audio_config": _AUDIO, "audio_token_index": IMAGE},
    ),
}


def build(name: str) -> PreTrainedModel:
    """A random model of the type, whose layers are damped so that drafts are right now and then."""
    class_name, settings = MODELS[name]
    ids = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(name, tie_word_embeddings=False, **(ids | settings))
        model = getattr(transformers, class_name)(config).eval()
    return draftable(model, 0.7)
