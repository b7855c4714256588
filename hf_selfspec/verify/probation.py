"""Probation: a model that was not seen is compared with its own one-token steps before drafts are verified with it.

Plain ``generate`` makes a few tokens of the call. Ours then makes the same ones by way of drafts that are partly wrong,
with all that verification relies on: several tokens at once, siblings, rows that accept different numbers of tokens,
states from which a forward starts, and slots that are written again. The logits of both have to be equal but for
rounding. That takes at most 16 forwards, once a process for a model and kind of call.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor, PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..batch import Draft, Text
from ..draft.source import DraftSource, FixedDrafter, Session
from ..errors import UnsupportedModelError, brief, muted
from ..model.anatomy import Anatomy
from ..model.inputs import has_tensors
from ..model.partial import ForwardPass
from ..model.patching import without_checkpointing
from ..model.prompt import CACHE_NAMES, given_cache
from ..model.target import Target
from ..model.unseen import Unseen

# Tokens that plain generate makes, each by a forward, and another one for its rounding. Ours takes a prefill, a draft
# of two tokens (up to three forwards) and at most two rounds without one; where that fails, four forwards without
# states and siblings. That is 16 at most.
TOKENS = 5
_DRAFTED = 2
# How far logits may differ, as a multiple of how far they move where the last bits of the embeddings change, in float32
# and in 16 bits. Of 14 tiny architectures, the demo model and SmolLM2-135M, one row and three, the furthest are at 2.2
# in float32 and at 2.8 in 16 bits (SmolLM2, bfloat16; an Intel Xeon).
_TIMES, _TIMES_16 = 16.0, 4.0
# Where that cannot be told: in standard deviations of the logits and rounding errors of the dtype.
_ROUNDINGS = 16.0


@dataclass(frozen=True)
class Outcome:
    """What a comparison has shown.

    Attributes:
        why_plain: why plain ``generate`` has to serve such calls; empty where they can be drafted.
        is_simple: whether only lines are verified, with rows in step and never from stored states.
    """

    why_plain: str = ""
    is_simple: bool = False

    def applied(self, anatomy: Anatomy) -> Anatomy:
        """The parts of the model with what they support by this outcome."""
        return replace(anatomy, tree=False, ragged=False, replay=False) if self.is_simple else anatomy


_outcomes: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Outcome]] = weakref.WeakKeyDictionary()


def outcomes_of(model: PreTrainedModel) -> list[Outcome]:
    """Returns what comparisons of this process have shown of a model."""
    return list(_outcomes.get(model, {}).values())


# Decodes a call with the drafts of a source, and returns its logits, for each new token ``[b, v]``.
Decode = Callable[[Any, DraftSource], tuple[torch.Tensor, ...]]


def on_probation(call: Any, unseen: Unseen, decode: Decode) -> Outcome:
    """Returns whether a call of a model that was not seen can be drafted, and compares what was not compared before."""
    outcomes = _outcomes.setdefault(call.model, {})
    given = {name for name, value in call.model_kwargs.items() if name not in CACHE_NAMES and has_tensors(value)}
    cache = given_cache(call.model_kwargs)
    kind = (
        unseen.state,
        len(call.input_ids) > 1,
        frozenset(given),
        cache is not None and any(getattr(layer, "is_initialized", False) for layer in cache.layers),
        (call.model.dtype, call.model.device.type, torch.is_autocast_enabled(call.model.device.type)),
    )
    if kind not in outcomes:
        outcomes[kind] = _compared(call, decode)
    return outcomes[kind]


def _compared(call: Any, decode: Decode) -> Outcome:
    device = call.input_ids.device
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type), muted():
        try:
            chosen, expected, is_filled = _by_plain(call)
        except Exception as error:
            raise PlainError(brief(error)) from error
        if not is_filled:
            return Outcome("its forwards leave the cache empty, so each has to run over the whole text")
        allowed = _allowed(call, expected[0])
        reasons = []
        for is_simple in (False, True):
            outcome = Outcome(is_simple=is_simple)
            script = Scripted(tuple(map(tuple, chosen.tolist())), is_simple)
            simple = replace(call, anatomy=outcome.applied(call.anatomy))
            try:
                logits = decode(_short(simple, chosen), script)
            except Exception as error:  # whatever a model of others raises is a reason not to draft with it
                reasons.append(brief(error))
                if isinstance(error, _NeverCalledError):
                    break
                continue
            if (apart := _apart(expected, logits)) <= allowed:
                return outcome
            reasons.append(
                "its logits for several tokens at once differ from those of single ones by "
                f"{apart / allowed:.2g} times what rounding may explain"
            )
    return Outcome(reasons[-1])


class PlainError(Exception):
    """Plain ``generate`` raises an error, the cause of this one."""


class _NeverCalledError(UnsupportedModelError):
    """No decoder layer ran in a forward."""


def _short(call: Any, chosen: torch.Tensor | None = None, count: int = TOKENS) -> Any:
    """The call with a few greedy tokens, given ones if they are ``chosen``, and without anything that the user sees."""
    config = copy.copy(call.generation_config)
    config.do_sample, config.output_scores = False, False
    config.return_dict_in_generate = config.output_logits = chosen is not None
    config.compile_config = None
    width = call.input_ids.shape[1]
    processors: list[LogitsProcessor] = []
    if chosen is not None:
        rows = chosen.tolist()
        processors = [PrefixConstrainedLogitsProcessor(lambda row, ids: [rows[row][len(ids) - width]], num_beams=1)]
    return replace(
        call,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(width + count)]),
        generation_config=config,
        streamer=None,
        model_kwargs={
            name: copy.deepcopy(value) if name in CACHE_NAMES else value for name, value in call.model_kwargs.items()
        },
    )


def _allowed(call: Any, expected: torch.Tensor) -> float:
    """How far logits may be apart, by how far those of the prompts ``[b, v]`` move where embeddings change a little."""
    device, noise = call.input_ids.device.type, list[float]()
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else call.model.dtype
    rounding = torch.finfo(dtype).eps

    def shake(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, embedded.shape, generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
        noise.append(0.0)
        return embedded * (1 + signs * rounding).to(embedded.device, embedded.dtype)

    with suppress(NotImplementedError), call.model.get_input_embeddings().register_forward_hook(shake):
        noise.append(_apart([expected], _by_plain(call, 1)[1]))
    times = _TIMES if dtype.itemsize > 2 else _TIMES_16
    return times * max(noise[-1], rounding) if len(noise) > 1 else _ROUNDINGS * rounding


def _by_plain(call: Any, count: int = TOKENS) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
    """The tokens ``[b, n]`` of plain ``generate``, the logits ``[b, v]`` of each, and whether its cache was used."""
    short, logits = _short(call, None, count), list[torch.Tensor]()

    def record(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits.append(scores.clone())
        return scores

    with without_checkpointing(call.model):
        ids = type(call.model)._sample(
            call.model,
            short.input_ids,
            LogitsProcessorList([record]),
            short.stopping_criteria,
            short.generation_config,
            **short.model_kwargs,
        )
    cache = given_cache(short.model_kwargs)
    return ids[:, -count:], logits, cache is not None and any(layer.is_initialized for layer in cache.layers)


def _apart(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest difference between logits ``[b, v]``, its root mean square in standard deviations of them."""
    largest = 0.0
    for plain, ours in zip(expected, found, strict=True):
        ours = ours.to(plain)
        # Tokens that a model never generates may have infinite logits, or nearly so.
        are_usual = plain.abs() < torch.finfo(torch.float16).max
        spread = torch.where(are_usual, plain, 0.0).std(-1, keepdim=True)
        apart = torch.where(are_usual, (plain - ours) / spread, (plain != ours).float())
        largest = max(largest, float(apart.square().mean(-1).sqrt().max().nan_to_num(math.inf)))
    return largest


@dataclass(frozen=True)
class Scripted(DraftSource):
    """Drafts the ``tokens`` of each row once, with wrong ones beside them and, in every second row, at the end."""

    tokens: tuple[tuple[int, ...], ...]
    is_simple: bool

    takes_forwards = False

    def start(self, session: Session) -> FixedDrafter:
        session.target.cache.reserve(2 * _DRAFTED)
        return _ScriptedDrafter(self, session)


class _ScriptedDrafter(FixedDrafter):
    reads_logits = False

    def __init__(self, script: Scripted, session: Session) -> None:
        self._script, self._target, self._vocabulary = script, session.target, session.vocabulary
        self._is_tree = session.takes_trees and not script.is_simple
        self._drafted = False

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        if self._drafted:
            return Draft.none(text)
        self._drafted = True
        rows = []
        for row, (tokens, length) in enumerate(zip(self._script.tokens, text.lengths, strict=True)):
            first, second = tokens[length - text.prompt_width :][:_DRAFTED]
            # Without siblings, and in every second row, the draft ends with a token that is rejected.
            rows.append([first, self._wrong(second) if row % 2 or not self._is_tree else second])
        states, prefix = self._states(text)
        if not self._is_tree:
            return self._draft(rows, None, states, prefix)
        # Each token has a wrong sibling before it, so that accepted ones have to move.
        beside = [[node for token in row for node in (self._wrong(token), token)] for row in rows]
        parents = [depth for depth in range(0, 2 * _DRAFTED, 2) for _ in range(2)]
        return self._draft(beside, [parents] * len(rows), states, prefix)

    def _draft(
        self, rows: list[list[int]], parents: list[list[int]] | None, states: torch.Tensor | None, prefix: int
    ) -> Draft:
        tokens = torch.tensor(rows, device="cpu")
        return Draft(tokens, [_DRAFTED] * len(rows), parents, states=states, prefix=prefix, listed=rows)

    def _wrong(self, token: int) -> int:
        return (token + 1) % self._vocabulary

    def _states(self, text: Text) -> tuple[torch.Tensor | None, int]:
        """The states of each row's last token ``[b, 1, d]`` that enter a layer in the middle, and its number."""
        target: Target = self._target
        layer = target.anatomy.num_layers // 2
        if self._script.is_simple or not layer:
            return None, 0
        run = target.step(text.last_tokens(), text.last_slots(), ForwardPass(target.full_plan, stop=layer))
        if run.captured is None:
            raise _NeverCalledError(
                f"the forwards of the decoder layers of {target.anatomy.model_name} are never called, so no part of it "
                "can draft"
            )
        return (run.captured, layer) if target.anatomy.replay else (None, 0)
