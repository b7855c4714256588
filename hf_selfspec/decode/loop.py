"""Transformers' own decode loop in the middle of a call, where rounds without a draft would take longer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..model.inputs import MARKS, Inputs
from ..model.internals import LOOP_METHODS, is_of_user, next_arguments, sample, set_mask_length
from ..model.module_tools import forward_parameters, is_tensor_parallel
from ..model.prompt import cache_name, given_cache
from ..model.target import Target

# Called with all ids ``[b, s]``, for each new step the rows ``[b]`` that end with it, and the seconds of these steps
# except for the first one of a run. Returns after how many steps it is to be called again, 0 to end the loop.
Watch = Callable[[torch.Tensor, list[torch.Tensor], list[float]], int]


@dataclass
class Loop:
    """What ``generate`` has prepared for its own loop in one call; ``seconds`` is the time of the last run's steps,
    including what was learned from them."""

    model: PreTrainedModel
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    inputs: Inputs
    seconds: float = 0.0

    def is_possible(self, target: Target) -> bool:
        """Whether the loop can go on in the middle of the call: a step depends only on the ids, their keys and values,
        and what processors and criteria keep, and only its ids are returned."""
        config, model, inputs = self.config, self.model, self.inputs
        return (
            all(getattr(type(model), name) is getattr(GenerationMixin, name) for name in LOOP_METHODS)
            and not vars(model).keys() & {*LOOP_METHODS}
            and type(self.criteria) is StoppingCriteriaList
            and not (config.return_dict_in_generate and (config.output_scores or config.output_logits))
            and not (config.prefill_chunk_size or config.is_assistant)
            and config.cache_implementation in (None, "dynamic")
            and not is_of_user(given_cache(inputs.arguments))
            and inputs.prompt.width == inputs.input_ids.shape[1]
            and inputs.is_text
            and inputs.following.offsets is None
            and not any(inputs.arguments.get(name) is not None for name in ("inputs_embeds", *MARKS))
            and target.takes_any_rows
            and target.graphs is None
            and target.prefill_observer is None
            and not target.anatomy.is_recurrent
            and target.cache.window is None
            and not is_tensor_parallel(model)
            and inputs.input_ids.device.type in ("cpu", "cuda")  # elsewhere the loop may stop a step late
            # The first step takes in one token of a longer text, for which transformers needs the length of a mask.
            and (inputs.arguments.get("attention_mask") is not None or "attention_mask" in forward_parameters(model))
        )

    def run(self, ids: torch.Tensor, cache: DynamicCache, steps: int, watch: Watch) -> None:
        """Goes on after ``ids`` ``[b, s]`` with the keys and values of all but the last; see :data:`Watch`."""
        config = copy.copy(self.config)
        config.return_dict_in_generate = False
        kwargs = dict(self.inputs.arguments)
        if kwargs.get("attention_mask") is None and not set_mask_length(config, ids.shape[1]):
            kwargs["attention_mask"] = torch.ones_like(self.inputs.input_ids)
        added = ids.shape[1] - self.inputs.input_ids.shape[1]
        # Of a forward's output, only what models with further states return is read.
        kwargs = next_arguments(self.model, {}, kwargs, num_new_tokens=added)
        watched = _Watched(self.criteria, watch, steps)
        ids = sample(
            self.model,
            ids,
            logits_processor=self.processors,
            stopping_criteria=watched,
            generation_config=config,
            streamer=None if self.streamer is None else _Unended(self.streamer),
            **kwargs | {cache_name(self.model): cache},
        )
        if watched.ended:
            watched.report(ids)
        self.seconds = watched.total


class _Watched(StoppingCriteriaList):
    """The criteria of a call, which end the loop where ``watch`` wants that."""

    def __init__(self, criteria: StoppingCriteriaList, watch: Watch, steps: int) -> None:
        super().__init__(criteria)
        self._watch, self._steps = watch, steps
        self._since: float | None = None
        self.ended, self._seconds, self.total = list[torch.Tensor](), list[float](), 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        ended = super().__call__(input_ids, scores, **kwargs)
        if self._since is not None:  # the first step prepares the loop
            self._seconds.append(perf_counter() - self._since)
        self.ended.append(ended)
        if len(self.ended) >= self._steps and not self.report(input_ids):
            return torch.ones_like(ended)
        self._since = perf_counter()
        return ended

    def report(self, ids: torch.Tensor) -> int:
        begun = perf_counter()
        self.total += sum(self._seconds) / max(len(self._seconds), 1) * len(self.ended)
        self._steps = self._watch(ids, self.ended, self._seconds)
        self.total += perf_counter() - begun
        self.ended, self._seconds = [], []
        return self._steps


class _Unended(BaseStreamer):
    """Passes on tokens, none of which is drafted, but not the end, which the call itself tells."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer: Any = streamer

    def put(self, value: torch.Tensor) -> None:
        if hasattr(self._streamer, "from_draft"):
            self._streamer.from_draft = [False] * len(value)
        self._streamer.put(value)

    def end(self) -> None:
        """Nothing ends yet."""
