"""What is refused by name, before any work: options, prompts and models of a call."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import SettingError, UnsupportedOptionError, unsupported
from ..model.anatomy import Anatomy
from ..model.attention.exact import reduced_precision
from ..model.attention.interface import served_attention
from ..model.attention.invariance import differing_part
from ..model.inputs import Inputs
from ..model.internals import attention_implementation
from ..model.module_tools import ModelView, is_tensor_parallel
from ..model.prompt import check_cache, given_cache
from ..validation import check_count

# Options of the generation config, the values that leave them off, and what to do instead.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_beams", (None, 1), "beam search follows several texts at once; use num_beams=1"),
    ("num_beam_groups", (None, 1), "beam search follows several texts at once; leave it out"),
    ("penalty_alpha", (None, 0), "contrastive search re-ranks with its own forwards; leave it out"),
    ("constraints", (None,), "constrained beam search is not supported; use prefix_allowed_tokens_fn"),
    ("force_words_ids", (None,), "constrained beam search is not supported; use prefix_allowed_tokens_fn"),
    ("dola_layers", (None,), "DoLa contrasts layers that drafts skip; leave it out"),
    ("prompt_lookup_num_tokens", (None,), "it is another way of drafting; choose one of the two"),
    ("assistant_early_exit", (None,), "it is another way of drafting; use SelfSpec(draft=EarlyExit(layer))"),
    ("use_mtp", (None, False), "it is another way of drafting; choose one of the two"),
    ("cache_implementation", (None, "dynamic", "static"), "only a dynamic or static cache is supported; leave it out"),
    ("token_healing", (None, False), "it rewrites the end of the prompt; leave it out"),
    ("output_attentions", (None, False), "drafted tokens do not have the attentions of single steps; leave it out"),
    ("output_hidden_states", (None, False), "drafting skips layers, whose states do not exist; leave it out"),
)


def check_options(model: PreTrainedModel, config: Any) -> None:
    """Refuses unsupported options (attributes of ``config``); ``use_cache=False`` in the model's config is allowed."""
    if config.prefill_chunk_size is not None:
        check_count("generate(prefill_chunk_size)", config.prefill_chunk_size)
    for name, off, advice in _REFUSED:
        value = getattr(config, name, None)
        if value not in off:
            raise UnsupportedOptionError(
                f"generate({name}={value!r}) cannot be combined with self-speculative decoding: {advice}."
            )
    if config.use_cache is False and model.generation_config.use_cache is not False:
        raise UnsupportedOptionError(
            "generate(use_cache=False) cannot be combined with self-speculative decoding: drafting needs the KV "
            "cache; leave it out."
        )


def check_call(
    anatomy: Anatomy, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]
) -> None:
    """Checks what can be checked of a call, besides its options, before its prompts are laid out."""
    _check_adapters(anatomy.view)
    check_cache(given_cache(model_kwargs), anatomy)
    implementation = attention_implementation(model.config.get_text_config(decoder=True))
    if implementation and implementation not in served_attention():
        raise UnsupportedOptionError(
            f"the attention implementation {implementation!r} cannot be combined with self-speculative decoding. Load "
            f"the model with attn_implementation set to one of {', '.join(served_attention())}."
        )
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise SettingError(
            "the prompt is empty. Pass at least one token to continue from, e.g. the tokenizer's bos token."
        )


def check_exact(model: PreTrainedModel, inputs: Inputs, config: Any, reasons: Mapping[str, bool]) -> None:
    """Refuses ``exact=True`` where results are not those of plain ``generate``, bit for bit; ``reasons`` are further
    ones of the call, and whether they hold."""
    prompt, name, implementation = inputs.prompt, inputs.anatomy.model_name, attention_implementation(model.config)
    is_whole = prompt.valid is None
    is_text = inputs.is_text and prompt.tokens.dim() == 2
    precision = reduced_precision(model.device) if model.dtype is torch.float32 else ""
    dtype = str(model.dtype).removeprefix("torch.")
    reasons = {
        **reasons,
        f"matrices of float32 may be multiplied in {precision} (torch.set_float32_matmul_precision and flags of "
        "torch.backends)": bool(precision),
        f"in {dtype} rounding may depend on the place of a number in a forward": model.dtype is not torch.bfloat16,
        "it serves one prompt of ids, without masked columns": len(prompt.lengths) > 1 or not is_whole or not is_text,
        "prefill_chunk_size is set": config.prefill_chunk_size is not None,
        "use_cache is False": config.use_cache is False,
        "a static cache is asked for": config.compile_config is not None or config.cache_implementation == "static",
        "the model is spread over several processes": is_tensor_parallel(model),
        f"{name} cannot take a tree mask": not inputs.anatomy.tree,
        f"the recurrent states of {name} are computed for several tokens together": inputs.anatomy.is_recurrent,
        f"attn_implementation={implementation!r} is not 'sdpa'": implementation != "sdpa",
    }
    why = next((why for why, holds in reasons.items() if holds), "")
    if not why and (part := differing_part(model, inputs.anatomy)):
        why = f"{part} of {name} has other results for several tokens than for one at a time here"
    if why:
        raise UnsupportedOptionError(
            f"SelfSpec(exact=True): {why}. Leave `exact` out for ids that may differ where logits are nearly equal, or "
            "load the model in float32, multiplied in full precision."
        )


def check_length(model: PreTrainedModel, inputs: Inputs, max_length: int | None) -> None:
    """Checks that the model has positions for the prompt, and one set of rotary frequencies for the whole text."""
    anatomy, prompt = inputs.anatomy, inputs.prompt
    config = model.config.get_text_config(decoder=True)
    first = max(prompt.ends())
    name, limit = anatomy.model_name, anatomy.max_positions
    if anatomy.position_limit is not None and first > anatomy.position_limit:
        raise SettingError(
            f"the prompt has {first} tokens, but {name} has {limit} positions (max_position_embeddings) and no more. "
            "Shorten the prompt, e.g. with truncation in the tokenizer."
        )
    last = None if max_length is None else first + max_length - inputs.input_ids.shape[1]
    parameters = getattr(config, "rope_parameters", None) or {}
    # Some models have parameters for each type of layers.
    has_types = all(isinstance(value, dict) for value in parameters.values())
    in_config = getattr(config, "original_max_position_embeddings", None) or limit
    for rotary in parameters.values() if has_types else [parameters]:
        edge, rope = rotary.get("original_max_position_embeddings") or in_config, rotary.get("rope_type")
        if edge is None or (last is not None and last <= edge):
            continue
        if rope == "dynamic" or (rope == "longrope" and first <= edge):
            raise unsupported(
                f"{name} changes its rotary frequencies ({rope}) beyond {edge} tokens, and this call may reach "
                f"{'any length' if last is None else last}",
                f"Keep the text within {edge} tokens with max_new_tokens",
            )


def _check_adapters(view: ModelView) -> None:
    model = view.model
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    peft_config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if peft_config is not None and getattr(peft_config, "is_prompt_learning", False):
        raise UnsupportedOptionError(
            f"PEFT's {peft_config.peft_type} puts virtual tokens in front of the prompt, which self-speculative "
            "decoding does not know about. LoRA and other adapters inside the layers work."
        )
    adapters = getattr(model, "peft_config", {}).values()
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters) and any(
        "alora_offsets" in getattr(hook, "keywords", ()) for _, hook in view.hooks
    ):
        raise UnsupportedOptionError(
            "PEFT's aLoRA (alora_invocation_tokens) adapts a number of tokens at the end of each forward, but a "
            "forward of self-speculative decoding ends with drafts. Call generate without `assistant`; LoRA and "
            "other adapters that apply to all tokens work."
        )
