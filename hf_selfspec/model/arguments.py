"""Arguments of ``generate`` for the model's forward: which of them self-speculative decoding can pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedOptionError

# Arguments that are laid out anew for every forward.
PREPARED = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep",
    "output_attentions", "output_hidden_states", "cache_position", "cache_params",
}  # fmt: skip
# Which tokens stand for images or sound; zero for text.
MARKS = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


def extra_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the forward arguments that are not laid out anew: the user's own, and input besides the text.

    Args:
        model: the model.
        arguments: what was passed to ``generate`` for the model, or what it has prepared.

    Raises:
        UnsupportedOptionError: the model takes text only, and an argument is a tensor, which would have to grow with
            the text.
    """
    extra = {
        name: value
        for name, value in arguments.items()
        if name not in PREPARED and not is_nothing(value) and not _marks_text_only(model, name, value)
    }
    if has_tensors(extra) and takes_text_only(model):
        names = ", ".join(f"`{name}`" for name, value in extra.items() if has_tensors(value))
        raise UnsupportedOptionError(
            f"the tensor argument {names} is not supported with self-speculative decoding, which feeds the model "
            "tokens in blocks of its own. Leave it out, or call generate without `assistant`."
        )
    return extra


def check_inputs(model: PreTrainedModel, inputs: Any, arguments: Mapping[str, Any]) -> None:
    """Checks that a text-only model gets nothing but text.

    Args:
        model: the model.
        inputs: the first argument of ``generate``.
        arguments: the arguments of ``generate`` for the model.

    Raises:
        UnsupportedOptionError: see :func:`extra_arguments`.
    """
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        arguments = {**arguments, model.main_input_name: inputs, "inputs": inputs}
    extra_arguments(model, arguments)


def takes_text_only(model: PreTrainedModel) -> bool:
    """Returns whether text is the model's only input."""
    modalities = getattr(model, "input_modalities", "text")
    named = set([modalities] if isinstance(modalities, str) else modalities)
    # Some classes name no other inputs, though their configs have a part for the text besides others.
    return named <= {"text"} and model.config.get_text_config(decoder=True) is model.config


def is_nothing(value: Any) -> bool:
    """Returns whether an argument is ``None``, or holds nothing but ``None``."""
    return value is None or (isinstance(value, (dict, list, tuple)) and all(is_nothing(part) for part in _parts(value)))


def has_tensors(value: Any) -> bool:
    """Returns whether an argument is a tensor, or holds one."""
    if isinstance(value, (dict, list, tuple)):
        return any(has_tensors(part) for part in _parts(value))
    return isinstance(value, torch.Tensor)


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _marks_text_only(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument only marks all tokens as text, as processors do for prompts without images.

    ``token_type_ids`` have other meanings, too. They are such marks if the model does not take them after the prefill,
    with generated tokens.
    """
    if name not in MARKS or not isinstance(value, torch.Tensor) or value.any():
        return False
    if name != "token_type_ids":
        return True
    last = value[:, -1:]
    later = model.prepare_inputs_for_generation(last, token_type_ids=last, use_cache=True, is_first_iteration=False)
    return later.get("token_type_ids") is None
