"""Prefills: the whole model over the prompts of one call."""

import copy
from time import perf_counter

import torch

from ..errors import UnsupportedOptionError, unsupported
from .attention.interface import at_positions
from .cache.handover import take_in
from .forward_pass import ForwardPass, obeying
from .inputs import DecodeInputs, Inputs
from .internals import prefill as prefill_plainly
from .prompt import given_cache, tokens_in
from .target import Target

# Numbers in the mask of a forward over a prompt, 64 MiB in 16 bits, and the least tokens that are worth a forward.
_MASK, _LEAST = 1 << 25, 128


def prefill(target: Target, inputs: Inputs) -> torch.Tensor:
    """Runs the whole model over the prompts, and returns the logits ``[b, v]`` of each row's last token."""
    logits = _prefill_text(target, inputs) if inputs.is_text else _prefill_by_model(target, inputs)
    if not target.cache.is_filled:
        raise unsupported(
            f"{target.anatomy.model_name} does not write to the cache that it gets, so each forward would have to run "
            "over the whole text"
        )
    return logits


def _prefill_text(target: Target, inputs: Inputs) -> torch.Tensor:
    prompt, past = inputs.prompt, given_cache(inputs.arguments)
    if past_tokens := tokens_in(past):
        take_in(target.cache, past, prompt.past_columns(past_tokens), prompt.cursors)
    logits = None
    width, start = prompt.tokens.shape[1], 0
    while start < width:
        slots = [cursor + start for cursor in prompt.cursors]
        chunk = inputs.config.prefill_chunk_size or width
        if not target.needs_no_mask(slots, prompt.lengths):  # that of texts that continue stays small
            chunk = min(chunk, max(_LEAST, _MASK // (len(slots) * (max(prompt.cursors) + width))))
        tokens = prompt.tokens[:, start : start + chunk]
        lengths = [min(max(length - start, 0), tokens.shape[1]) for length in prompt.lengths]
        piece = target.prefill(tokens, slots, lengths)
        ends_here = [start < length <= start + chunk for length in prompt.lengths]
        chosen = torch.tensor(ends_here, device=piece.device)[:, None]
        logits = piece if logits is None else torch.where(chosen, piece, logits)
        start += chunk
    assert logits is not None
    return logits


def _prefill_by_model(target: Target, inputs: Inputs) -> torch.Tensor:
    """Prompts with images, sound or own positions: the model fills transformers' cache, bit for bit as ``generate``."""
    model, prompt, observer = target.model, inputs.prompt, target.prefill_observer
    past = copy.deepcopy(given_cache(inputs.arguments))
    arguments = inputs.arguments | {target.cache_name: past}
    run = ForwardPass(target.full_plan, capture=target.observed_layers)
    if observer is not None:  # it needs the states of all tokens, the head those of the last column
        run.ends = [-1] * len(prompt.lengths)
        arguments.pop("logits_to_keep", None)
    begun = perf_counter()
    target.install()
    with obeying(run), at_positions(None):
        target.forwards += 1
        output = prefill_plainly(model, inputs.input_ids, inputs.config, dict(arguments))
    target.forward_seconds += perf_counter() - begun
    target.autocast = run.autocast
    if past.get_seq_length() != prompt.width:
        raise UnsupportedOptionError(
            f"{target.anatomy.model_name} has turned a prompt of {prompt.width} tokens into "
            f"{past.get_seq_length()}. Pass a prompt with one placeholder for each token of an image or sound, as "
            "the model's current processor makes it, or call generate without `assistant`."
        )
    take_in(target.cache, past, prompt.past_columns(prompt.width), prompt.ends())
    target.cache.was_given = False  # it was a copy
    if observer is not None:
        assert run.captured is not None
        observer(prompt.aligned(run.captured), prompt.cursors, prompt.lengths)
    target.following = DecodeInputs.of(model, inputs.input_ids, arguments, prompt.ends(), output)
    logits: torch.Tensor = output.logits[:, -1]
    return logits
