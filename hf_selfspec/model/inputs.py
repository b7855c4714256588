"""The inputs of one call of ``generate``: arguments of the model, prompts, and what follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PreTrainedModel

from ..errors import UnsupportedOptionError, unsupported
from .anatomy import Anatomy
from .internals import mask_length, next_arguments
from .prompt import CACHE_NAMES, Prompt, given_cache, tokens_in

# Arguments that are laid out anew for every forward, and labels (of ``Seq2SeqTrainer``), which ``generate`` drops.
PREPARED = {
    "input_ids", "attention_mask", "position_ids", *CACHE_NAMES, "inputs_embeds", "use_cache", "logits_to_keep",
    "output_attentions", "output_hidden_states", "cache_position", "labels",
}  # fmt: skip
# Arguments that tell what each token stands for: a segment of the text (GPT-2), images or sound, or zero for text.
MARKS = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


def extra_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The forward arguments that are not laid out anew: the user's own, and input besides the text."""
    extra = {
        name: value
        for name, value in arguments.items()
        if name not in PREPARED and not is_nothing(value) and not _marks_text_only(model, name, value)
    }
    tensors = [name for name, value in extra.items() if has_tensors(value) and name not in MARKS]
    if tensors and takes_text_only(model):
        names = ", ".join(f"`{name}`" for name in tensors)
        raise UnsupportedOptionError(
            f"the tensor argument {names} is not supported with self-speculative decoding, which feeds the model "
            "tokens in blocks of its own. Leave it out, or call generate without `assistant`."
        )
    return extra


def check_inputs(model: PreTrainedModel, inputs: Any) -> None:
    """Checks that a text-only model gets nothing but text as first argument of ``generate``."""
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        extra_arguments(model, {model.main_input_name: inputs, "inputs": inputs})


def takes_text_only(model: PreTrainedModel) -> bool:
    """Returns whether text is the model's only input."""
    modalities = getattr(model, "input_modalities", "text")
    named = set([modalities] if isinstance(modalities, str) else modalities)
    # Some classes name no other inputs, though their configs have a part for the text besides others.
    return named <= {"text"} and model.config.get_text_config(decoder=True) is model.config


def is_nothing(value: Any) -> bool:
    """Returns whether an argument is ``None``, or holds nothing but ``None``."""
    return all(leaf is None for leaf in tree_leaves(value))


def has_tensors(value: Any) -> bool:
    """Returns whether an argument is a tensor, or holds one."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def _marks_text_only(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument only marks all tokens as text, as ``token_type_ids`` do if only the prefill takes them."""
    if name not in MARKS or not isinstance(value, torch.Tensor) or value.any():
        return False
    if name != "token_type_ids":
        return True
    last = value[:, -1:]
    later = model.prepare_inputs_for_generation(last, token_type_ids=last, use_cache=True, is_first_iteration=False)
    return later.get("token_type_ids") is None


# The row's dimension in positions [*n, b, s] with any number of dimensions in front.
_ROW_DIM = -2


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of forwards after a prompt, taken from the model's own preparation of its next token."""

    offsets: torch.Tensor | None = None  # [*n, b, 1] position of a token minus its slot, None where all are 0
    marks: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [b, 1], equal for all tokens that follow
    extra: Mapping[str, Any] = field(default_factory=dict)  # other arguments, the same in every forward
    has_positions: bool = True  # whether the model takes positions instead of counting them itself

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        arguments: Mapping[str, Any],
        slots: Sequence[int],
        output: Mapping[str, Any] | None = None,
    ) -> DecodeInputs:
        """Prepares one more token, in ``slots``, as the model's own ``generate`` does, after a forward over the prompt
        (``output``, ``None`` before it) with ``arguments``, and keeps what we do not lay out ourselves."""
        output = _NoOutput() if output is None else output
        later = next_arguments(model, output, dict(arguments), is_encoder_decoder=False)
        text = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)
        prepared = model.prepare_inputs_for_generation(text, next_sequence_length=1, is_first_iteration=False, **later)
        marks: dict[str, torch.Tensor] = {}
        extra: dict[str, Any] = {}
        for name, value in prepared.items():
            if name in PREPARED or is_nothing(value):
                continue
            if name in MARKS and isinstance(value, torch.Tensor):
                marks[name] = value[:, -1:]
            elif not has_tensors(value) or _is_same(value, arguments.get(name)):
                extra[name] = value
            else:
                raise unsupported(
                    f"{type(model).__name__} takes a `{name}` of its own with every generated token, so that tokens "
                    "cannot be drafted after such a prompt"
                )
        positions, offsets = prepared.get("position_ids"), None
        if positions is not None:
            offsets = positions[..., -1:] - torch.tensor(slots, device=positions.device)[:, None]
            offsets = offsets if offsets.any() else None
        has_positions = positions is not None or arguments.get("position_ids") is None
        return cls(offsets, marks, extra, has_positions)

    def positions(self, slots: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        """Returns positions ``[*n, b, s]`` of the tokens in slots ``[b, s]`` of all rows, or of ``rows``."""
        if self.offsets is None:
            return slots
        offsets = self.offsets.to(slots.device)
        if rows is not None:
            offsets = offsets.index_select(_ROW_DIM, torch.tensor(rows, device=slots.device))
        return offsets + slots


class _NoOutput(dict[str, Any]):
    """Stands for a model's output before its first forward: every attribute is ``None``."""

    def __getattr__(self, name: str) -> None:
        return None


def _is_same(value: Any, other: Any) -> bool:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(value, other.to(value.device)) if are_tensors else value is other


@dataclass(frozen=True)
class Inputs:
    """The input of one call."""

    input_ids: torch.Tensor  # [b, s] as `generate` passes them
    arguments: dict[str, Any]  # what `generate` has prepared for the model's forward over them
    config: GenerationConfig
    anatomy: Anatomy  # the model's parts, with what they support in this call
    prompt: Prompt
    following: DecodeInputs  # where prompts are not text alone, their prefill replaces it
    is_text: bool = True  # whether prompts can be laid out by us: text only, without positions of their own

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        anatomy: Anatomy,
        input_ids: torch.Tensor,
        arguments: dict[str, Any],
        config: GenerationConfig,
    ) -> Inputs:
        """Lays out the prompts; an input that is not supported is an error that names it."""
        extra = extra_arguments(model, arguments)
        cached, length = tokens_in(given_cache(arguments)), mask_length(config)
        prompt = Prompt.of(input_ids, arguments, cached, length)
        if takes_text_only(model) and not has_tensors(extra):
            return cls(input_ids, arguments, config, anatomy, prompt, DecodeInputs(extra=extra))
        following = DecodeInputs.of(model, input_ids, arguments, prompt.ends())
        is_text = not has_tensors(extra) and not prompt.has_positions
        if not following.has_positions and (not is_text or prompt.valid is not None):  # padding counts, too
            anatomy = replace(anatomy, takes_positions=False, tree=False, by_slot=False)
        if is_text:
            following = DecodeInputs(following.offsets, extra=extra)
        return cls(input_ids, arguments, config, anatomy, prompt, following, is_text)
