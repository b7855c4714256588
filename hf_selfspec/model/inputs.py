"""The inputs of one call of ``generate``: its prompts laid out, how they are prefilled, and what follows them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..errors import UnsupportedOptionError
from .anatomy import Anatomy
from .arguments import extra_arguments, has_tensors, takes_text_only
from .following import Following
from .given_cache import given_cache, tokens_in
from .prefill import OwnPrefill, Prefill, TextPrefill
from .prompt import Prompt


@dataclass(frozen=True)
class Inputs:
    """The input of one call.

    Attributes:
        anatomy: the model's parts, with what they support in this call.
        prompt: the prompts.
        prefill: puts them into the cache.
        following: the inputs after them. An :class:`OwnPrefill` replaces it.
        fixed: see :class:`Text`.
    """

    anatomy: Anatomy
    prompt: Prompt
    prefill: Prefill
    following: Following
    fixed: list[int] | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        anatomy: Anatomy,
        input_ids: torch.Tensor,
        arguments: dict[str, Any],
        config: GenerationConfig,
    ) -> Inputs:
        """Lays out the prompts.

        Args:
            model: the model.
            anatomy: its parts.
            input_ids: ``[b, s]`` the prompts.
            arguments: arguments that ``generate`` has prepared for the model's forward.
            config: generation config of the call.

        Raises:
            SelfSpecError: an input is not supported; the message names it.
        """
        extra = extra_arguments(model, arguments)
        prompt = _prompt(input_ids, arguments, config, anatomy.ragged)
        if anatomy.is_recurrent and prompt.holes is not None:
            raise UnsupportedOptionError(
                f"{anatomy.model_name} has recurrent states, which masked columns inside a prompt would change: "
                "padding between the turns of a batched chat, for example. Pass prompts that are padded only on the "
                "left, or call generate without `assistant`."
            )
        text = TextPrefill(given_cache(arguments), config.prefill_chunk_size)
        if takes_text_only(model):
            return cls(anatomy, prompt, text, Following(extra=extra))
        following = Following.of(model, input_ids, arguments, prompt.tokens_of_rows())
        if not has_tensors(extra) and not prompt.own_positions:
            # The cache may hold more than text.
            return cls(anatomy, prompt, text, Following(following.offsets, extra=extra), prompt.cursors)
        if not following.has_positions:
            anatomy = replace(anatomy, takes_positions=False, tree=False, ragged=False)
            prompt = _prompt(input_ids, arguments, config, ragged=False)
        own = OwnPrefill(input_ids, config, arguments)
        return cls(anatomy, prompt, own, following, prompt.ends())


def _prompt(input_ids: torch.Tensor, arguments: dict[str, Any], config: GenerationConfig, ragged: bool) -> Prompt:
    past = given_cache(arguments)
    return Prompt.of(
        input_ids,
        arguments.get("inputs_embeds"),
        arguments.get("attention_mask"),
        arguments.get("position_ids"),
        past if tokens_in(past) else DynamicCache(),
        getattr(config, "_mask_length", None),
        ragged,
    )
