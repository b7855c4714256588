"""Probation: an unknown model is compared with its own one-token steps before drafts are verified with it.

Plain ``generate`` makes a few tokens of the call. Ours then makes the same ones by way of drafts that are partly wrong,
with all that verification relies on: several tokens at once, siblings, rows that accept different numbers of tokens,
states from which a forward starts, and slots that are written again. The logits of both have to be equal but for
rounding. That takes at most 16 forwards, three of them over the whole prompt, once a process for a model, a kind of
call and each power of two of the prompt's length.
"""

from __future__ import annotations

import copy
import math
import random
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..drafts.scripted import NeverCalledError, Scripted
from ..drafts.source import DraftSource
from ..errors import brief, muted
from ..model.anatomy import Anatomy
from ..model.forks import new_lock
from ..model.inputs import has_tensors
from ..model.internals import attention_implementation, sample
from ..model.patching import InstanceForwards, without_checkpointing
from ..model.prompt import CACHE_NAMES, given_cache
from ..settings import Settings
from .contents import Contents
from .unseen import UNKNOWN, Unseen

# Tokens that plain generate makes for one row and for several, each by a forward, and again where these have changed
# something. Another forward shows its rounding. Ours takes a prefill, a draft with two right tokens (up to three
# forwards), a round with a short draft and one without; where that fails, three more without states and siblings.
TOKENS, _TOKENS_OF_ROWS, _TOKENS_IN_LINE = 6, 5, 4
# How far logits may differ, as a multiple of how far they move where the last bits of the embeddings change, in float32
# and in 16 bits. Of 14 tiny architectures, the demo model and SmolLM2-135M, one row and three, the furthest are at 2.2
# in float32 and at 2.8 in 16 bits (SmolLM2, bfloat16; an Intel Xeon).
_TIMES, _TIMES_16 = 16.0, 4.0
# Never more than this, in standard deviations of the logits; and how much further single logits may be apart.
_MOST, _MOST_16, _PEAK = 1e-3, 0.5, 10.0
# How many outcomes are kept for a model.
_KEPT = 64
# How far where the embeddings cannot be changed: in standard deviations of the logits and rounding errors of the dtype.
_ROUNDINGS = 16.0


@dataclass(frozen=True)
class Outcome:
    """What a comparison has shown.

    Attributes:
        why_plain: why plain ``generate`` has to serve such calls; empty where they can be drafted.
        lines_in_step: whether only lines are verified, of one row and never from stored states.
    """

    why_plain: str = ""
    lines_in_step: bool = False

    def applied(self, anatomy: Anatomy) -> Anatomy:
        """The parts of the model with what they support by this outcome."""
        return replace(anatomy, tree=False, by_slot=False, replay=False) if self.lines_in_step else anatomy


# For each model its outcomes, by what was compared, or by the reasons to compare where they decide.
_outcomes: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Outcome]] = weakref.WeakKeyDictionary()
_lock = new_lock()

# Decodes a call with the drafts of a source, and returns its logits, for each new token ``[b, v]``.
Decode = Callable[[Any, DraftSource], tuple[torch.Tensor, ...]]


def compare(call: Any, unseen: Unseen, decode: Decode) -> Outcome:
    """Returns whether a call of a model that was not seen can be drafted, and compares what was not compared before."""
    dropouts = (module for module in call.anatomy.view.modules if isinstance(module, nn.modules.dropout._DropoutNd))
    if any(module.training and module.p for module in dropouts):
        return Outcome()  # with dropout, plain generate has other logits each time
    outcomes = _outcomes.setdefault(call.model, {})
    if outcome := outcomes.get(reasons := (unseen.own, unseen.attached)):
        return outcome
    arguments = {name: value for name, value in call.model_kwargs.items() if name not in CACHE_NAMES}
    tensors = {name for name, value in arguments.items() if has_tensors(value)}
    others = {name: value for name, value in arguments.items() if name not in tensors}
    holds = Contents([*unseen.holders, others], briefly=True)
    if holds.why_opaque:
        return Outcome(holds.why_opaque)
    key = (
        reasons,
        holds.key,
        len(call.input_ids) > 1,
        call.input_ids.shape[1].bit_length(),
        frozenset(tensors),
        _is_used(given_cache(call.model_kwargs)),
        (call.model.dtype, call.model.device.type, torch.is_autocast_enabled(call.input_ids.device.type)),
        (call.model.training, attention_implementation(call.model.config.get_text_config(decoder=True))),
    )
    if outcome := outcomes.get(key):
        return outcome
    with _lock:
        if outcome := outcomes.get(reasons) or outcomes.get(key):  # by now
            return outcome
        outcome = _compared(call, unseen, decode)
        if len(outcomes) >= _KEPT:  # the oldest goes
            del outcomes[next(iter(outcomes))]
        outcomes[reasons if outcome is _KEEPS else key] = outcome
        return outcome


def _compared(call: Any, unseen: Unseen, decode: Decode) -> Outcome:
    """Compares a call, and leaves everything as it was before."""
    # Code of others may also write to modules that were seen.
    before, device = Contents([*unseen.holders, *call.anatomy.view.modules]), call.input_ids.device
    if before.why_opaque:
        return Outcome(before.why_opaque)
    states = random.getstate(), np.random.get_state()
    try:
        before.keep()
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type), muted():
            return _outcome(call, decode, before)
    finally:
        before.restore()
        random.setstate(states[0])
        np.random.set_state(states[1])


def _outcome(call: Any, decode: Decode, before: Contents) -> Outcome:
    count = TOKENS if len(call.input_ids) == 1 else _TOKENS_OF_ROWS
    try:
        short = _short(call, count)
        chosen, expected = _by_plain(short)
    except Exception as error:  # of the user's cache, or what plain generate raises, too, unless it stops before
        return Outcome(f"its own steps cannot be taken beforehand ({brief(repr(error))})")
    if not _is_used(given_cache(short.model_kwargs)):
        return Outcome("its forwards leave the cache empty, so each has to run over the whole text")
    if before.have_changed():
        later = Contents(before.holders)
        later.keep()
        with suppress(Exception):  # another number of tokens, which shows what is counted anew in each call
            _by_plain(_short(call, count - 1))
        if later.have_changed():
            return _KEEPS
        return Outcome("it has made something in its first forward, so a later call is compared")
    allowed = _allowed(_short(call, 1), expected[0])
    ways = ((False, count), (True, _TOKENS_IN_LINE))
    for lines_in_step, number in ways if len(call.input_ids) == 1 else ways[:1]:
        before.restore()
        outcome = Outcome(lines_in_step=lines_in_step)
        try:
            forced = replace(_short(call, number, chosen), anatomy=outcome.applied(call.anatomy))
            logits = decode(forced, Scripted(chosen.tolist(), lines_in_step))
        except Exception as error:  # whatever a model of others raises is a reason not to draft with it
            why = brief(error)
            if isinstance(error, NeverCalledError):
                break
            continue
        if (apart := _apart(expected[: len(logits)], logits)) <= allowed:
            return outcome
        times = f"{apart / allowed:.2g} times what rounding may explain"
        why = f"its logits for several tokens at once differ from those of single ones by {times}"
    return Outcome(why)


def _is_used(cache: Any) -> bool:
    """Whether a cache holds something."""
    layers = [] if cache is None else cache.layers
    states = [getattr(layer, "has_previous_state", False) for layer in layers]
    has_states = any(any(state.values()) if isinstance(state, dict) else state for state in states)
    return has_states or any(getattr(layer, "is_initialized", False) for layer in layers)


_KEEPS = Outcome("it keeps something from forward to forward, which drafts would change")


def _short(call: Any, count: int, forced: torch.Tensor | None = None) -> Any:
    """The call with a few greedy tokens, or those of ``forced`` ``[b, n]`` and their logits, a cache of its own, and
    without anything that the user sees."""
    config, processors = copy.copy(call.generation_config), LogitsProcessorList()
    config.do_sample, config.output_scores = False, False
    config.return_dict_in_generate = config.output_logits = forced is not None
    config.compile_config = None
    if forced is not None:
        rows, width = forced.tolist(), call.input_ids.shape[1]

        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            return [rows[row][len(ids) - width]]

        vars(allowed)["is_stateless"] = True  # rows advance at their own pace, which is compared, too
        processors.append(PrefixConstrainedLogitsProcessor(allowed, num_beams=1))
    return replace(
        call,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(call.input_ids.shape[1] + count)]),
        generation_config=config,
        streamer=None,
        model_kwargs={
            name: copy.deepcopy(value) if name in CACHE_NAMES else value for name, value in call.model_kwargs.items()
        },
    )


def _allowed(single: Any, expected: torch.Tensor) -> float:
    """How far logits may be apart, by how far those of the prompts ``[b, v]`` move where embeddings change a little."""
    device = single.input_ids.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else single.model.dtype
    rounding, noise, was_used, thread = torch.finfo(dtype).eps, None, False, threading.get_ident()

    def perturb_embeddings(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        nonlocal was_used
        if threading.get_ident() != thread:
            return embedded
        was_used, generator = True, torch.Generator("cpu").manual_seed(0)
        signs = torch.randint(2, embedded.shape[1:], generator=generator, device="cpu", dtype=torch.int8) * 2 - 1
        return embedded * (1 + signs * rounding).to(embedded.device, embedded.dtype)

    changes = InstanceForwards()
    with suppress(Exception):  # an embedding of others may return, or need, something else
        try:
            changes.hook(single.model.get_input_embeddings().register_forward_hook, perturb_embeddings)
            noise = _apart([expected], _by_plain(single)[1])
        finally:
            changes.close()
    times, most = (_TIMES, _MOST) if dtype.itemsize > 2 else (_TIMES_16, _MOST_16)
    if noise is None or not was_used:
        return _ROUNDINGS * rounding
    return min(most, times * max(noise, rounding))


def _by_plain(short: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The tokens ``[b, n]`` of plain ``generate``, and the logits ``[b, v]`` of each."""
    logits: list[torch.Tensor] = []

    def record(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits.append(scores.clone())
        return scores

    with without_checkpointing(short.model, short.anatomy.view.modules):
        ids = sample(
            short.model,
            short.input_ids,
            stopping_criteria=short.stopping_criteria,
            generation_config=short.generation_config,
            logits_processor=LogitsProcessorList([record]),
            **short.model_kwargs,
        )
    return ids[:, -len(logits) :], logits


def _apart(expected: Sequence[torch.Tensor], drafted: Sequence[torch.Tensor]) -> float:
    """How far logits ``[b, v]`` are apart, in standard deviations of them: the root mean square, or more where single
    ones are far beyond it; infinite where other tokens are ruled out."""
    largest = 0.0
    for plain, ours in zip(expected, drafted, strict=True):
        ours = ours.to(plain)
        # Tokens that a model never generates may have infinite logits, or nearly so.
        most = torch.finfo(torch.float16).max
        are_usual = plain.abs() < most
        if not torch.equal(are_usual, ours.abs() < most):
            return math.inf
        spread = torch.where(are_usual, plain, 0.0).std(-1, keepdim=True)
        apart = torch.where(are_usual, (plain - ours).abs() / spread, 0.0)
        mean, peak = apart.square().mean(-1).sqrt().max(), apart.max() / _PEAK
        largest = max(largest, float(torch.maximum(mean, peak).nan_to_num(math.inf)))
    return largest


def decoded_logits(call: Any, source: DraftSource, lay_out: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """The logits ``[b, v]`` of each token of a call that is decoded with the drafts of ``source`` alone."""
    settings = Settings(draft=source)
    decoder = lay_out(replace(call, default_of="probation"), settings, settings._knowledge_of(call.model), UNKNOWN)
    try:
        with decoder.target.prepared():
            logits: tuple[torch.Tensor, ...] = decoder.output.returned(decoder.run(), None).logits
    finally:
        decoder.target.cache.free()
    return logits
