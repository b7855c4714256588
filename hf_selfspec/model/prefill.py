"""How prompts go through the model: as tokens that we have laid out, or as in the model's own ``generate``."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from ..errors import UnsupportedOptionError
from .following import Following
from .given_cache import tokens_in
from .masks import at_positions
from .partial import ForwardPass, obeying
from .prompt import Prompt
from .step import PrefillObserver
from .target import Target

# Numbers in the mask of a forward over a prompt, 64 MiB in 16 bits, and the least tokens that are worth a forward.
_MASK, _LEAST = 1 << 25, 128


class Prefill(Protocol):
    """Puts prompts into the cache."""

    def run(self, target: Target, prompt: Prompt) -> torch.Tensor:
        """Runs the whole model over the prompts and returns the logits ``[b, v]`` of each row's last token."""
        ...


@dataclass(frozen=True)
class TextPrefill:
    """Prompts of text only.

    Attributes:
        past: cache with their beginnings, possibly empty.
        chunk: maximum number of tokens in one forward, ``None`` for no limit.
    """

    past: Cache
    chunk: int | None = None

    def run(self, target: Target, prompt: Prompt) -> torch.Tensor:
        """See :meth:`Prefill.run`."""
        if seen := tokens_in(self.past):
            target.cache.take_in(self.past, prompt.past_columns(seen), prompt.cursors)
        logits = None
        width, start = prompt.tokens.shape[1], 0
        while start < width:
            chunk = min(self.chunk or width, _piece(target, prompt, start))
            tokens = prompt.tokens[:, start : start + chunk]
            lengths = [min(max(length - start, 0), tokens.shape[1]) for length in prompt.lengths]
            cursors = [cursor + start for cursor in prompt.cursors]
            piece = target.prefill(tokens, cursors, lengths)
            ends_here = [start < length <= start + chunk for length in prompt.lengths]
            chosen = torch.tensor(ends_here, device=piece.device)[:, None]
            logits = piece if logits is None else torch.where(chosen, piece, logits)
            start += chunk
        assert logits is not None
        return logits


def _piece(target: Target, prompt: Prompt, start: int) -> int:
    """The number of tokens that may go through together from ``start`` on, for the mask of texts that continue."""
    width = prompt.tokens.shape[1]
    if target.needs_no_mask([cursor + start for cursor in prompt.cursors], prompt.lengths):
        return width
    return max(_LEAST, _MASK // (len(prompt.cursors) * (max(prompt.cursors) + width)))


@dataclass(frozen=True)
class OwnPrefill:
    """Prompts with images or sound, or with positions of their own: bit for bit as in plain ``generate``.

    The model fills a cache of transformers, padding included; from there the tokens are copied to their slots.

    Attributes:
        input_ids: ``[b, s]`` as ``generate`` passes them.
        config: generation config of the call.
        arguments: arguments that ``generate`` has prepared for the model's forward, including the cache.
    """

    input_ids: torch.Tensor
    config: GenerationConfig
    arguments: dict[str, Any]

    def run(self, target: Target, prompt: Prompt) -> torch.Tensor:
        """See :meth:`Prefill.run`.

        Raises:
            UnsupportedOptionError: the model has replaced the prompt's tokens by another number of tokens.
            UnsupportedModelError: see :meth:`Following.of`.
        """
        model, past = target.model, copy.deepcopy(self.arguments["past_key_values"])
        arguments = self.arguments | {"past_key_values": past}
        states: list[torch.Tensor] = []
        begun = perf_counter()
        target.obey()
        with obeying(_watching(target, states)) as run, at_positions(None):
            target.forwards += 1
            output = model._prefill(self.input_ids, self.config, dict(arguments))
        target.forward_seconds += perf_counter() - begun
        target.autocast = run.autocast
        if past.get_seq_length() != prompt.width:
            raise UnsupportedOptionError(
                f"{target.anatomy.model_name} has turned a prompt of {prompt.width} tokens into "
                f"{past.get_seq_length()}. Pass a prompt with one placeholder for each token of an image or sound, as "
                "the model's current processor makes it, or call generate without `assistant`."
            )
        target.cache.take_in(past, prompt.past_columns(prompt.width), prompt.ends())
        if (observer := target.prefill_observer) is not None:
            observer.observe(prompt.aligned(torch.cat(states, dim=-2)), prompt.cursors, prompt.lengths)
        target.following = Following.of(model, self.input_ids, arguments, prompt.tokens_of_rows(), output)
        return output.logits[:, -1]


def _watching(target: Target, states: list[torch.Tensor]) -> ForwardPass:
    """A forward of the whole model that keeps the states for the target's observer."""
    observer: PrefillObserver | None = target.prefill_observer
    if observer is None:
        return ForwardPass(target.full_plan)
    watched = observer.layer

    def keep(layer: int, entered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        if layer == watched:
            states.append(entered)
        return left

    return ForwardPass(target.full_plan, after_layer=keep)
