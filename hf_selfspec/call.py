"""One call of ``generate``: from what transformers has prepared to the decoded text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from .checks import check_call, check_length, check_lossy
from .decoding import Decoder, Record
from .draft.early_exit import EarlyExit, EarlyExitOnly
from .draft.partial import Limits
from .draft.skip_layers import SkipLayers
from .drafting import Drafting
from .errors import SettingError, UnsupportedOptionError
from .learned import Findings
from .model.anatomy import Anatomy
from .model.cache import SpeculativeCache
from .model.partial import LayerPlan
from .model.prompt import Prompt, extra_arguments
from .model.target import Target
from .notices import say_once
from .search.on_the_fly import OnTheFlySearch, Search
from .stop.rules import ConfidenceThreshold, FixedLength, StopRule
from .types import GenerationStats, Text
from .verify.scoring import Scorer
from .verify.stopping import Stopper
from .verify.tree import Tree

# Slots to begin with where it is not known how long the text will be.
FIRST_SLOTS = 1024


@dataclass(frozen=True)
class Call:
    """Decodes what ``generate`` asks for.

    Attributes:
        drafting: what drafts.
        tree: siblings at each depth, ``None`` for a line.
    """

    drafting: Drafting
    tree: Tree | None

    def ready(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ) -> Callable[[], Any]:
        """Checks the call and prepares it; what is returned generates and returns what ``generate`` does.

        Arguments are those of a ``custom_generate`` callable.

        Raises:
            SelfSpecError: the call cannot be served. Nothing was generated yet, so another loop can do it.
        """
        anatomy = Anatomy.of(model)
        self.drafting.learned.check(model)
        check_call(model, input_ids, generation_config, synced_gpus, model_kwargs)
        kind = bool(generation_config.do_sample), len(input_ids) > 1
        known = self.drafting.learned.known(model, kind)
        if known is not None and known.rests:
            options: dict[str, Any] = {
                "logits_processor": logits_processor,
                "stopping_criteria": stopping_criteria,
                "generation_config": generation_config,
                "synced_gpus": synced_gpus,
                "streamer": streamer,
            }
            return partial(self._plain, known, model, input_ids, options | model_kwargs)
        plan = None if isinstance(self.drafting.draft, CandidateGenerator) else self.drafting.draft.plan(anatomy)
        past = model_kwargs["past_key_values"]
        own_cache = bool(getattr(past, "_is_user_defined", False))
        cut = isinstance(self.drafting.draft, EarlyExitOnly)
        if cut and own_cache:
            raise UnsupportedOptionError(
                "early_exit_only leaves the later layers' keys and values out, so a cache of your own could not be "
                "used again. Leave out `past_key_values`."
            )
        prompt = Prompt.of(
            input_ids,
            model_kwargs.get("inputs_embeds"),
            model_kwargs.get("attention_mask"),
            model_kwargs.get("position_ids"),
            past,
            getattr(generation_config, "_mask_length", None),
            anatomy.ragged,
        )
        batch_size, width = input_ids.shape
        check_length(model, prompt, generation_config.max_length, width)
        record = Record.of(generation_config, batch_size)
        scorer = Scorer(logits_processor, batch_size, bool(generation_config.do_sample))
        stopper = Stopper(stopping_criteria)
        if not getattr(self.drafting.draft, "lossless", True):
            check_lossy(logits_processor)
        new_tokens = FIRST_SLOTS if stopper.max_length is None else min(stopper.max_length - width, FIRST_SLOTS)
        if self._window:
            self._check_window(anatomy, None if stopper.max_length is None else stopper.max_length - width)
        limits = Limits(
            stop=self.drafting.stop or self._usual_stop,
            max_draft=self.drafting.max_draft,
            tree=self._usable_tree(anatomy, prompt),
            eos_tokens=stopper.eos_tokens,
            memory=self.drafting.learned.memory(model, kind),
        )
        room = new_tokens + max(limits.most_nodes, self._window, anatomy.num_layers)
        target = Target(
            model,
            anatomy,
            SpeculativeCache(len(past.layers), batch_size, prompt.width + room),
            prompt.padding,
            prompt.holes,
            None if stopper.max_length is None else [stopper.max_length + base - 1 for base in prompt.base],
            extra_arguments(model_kwargs),
            plan if cut else None,
        )
        draft = self.drafting.running(target, plan, limits, scorer.for_drafts)
        decoder = Decoder(
            target=target,
            prompt=prompt,
            text=Text.of(input_ids, prompt.base, room),
            draft=draft,
            scorer=scorer,
            stopper=stopper,
            record=record,
            pad_token=_pad_token(generation_config),
            streamer=streamer,
            prefill_chunk=generation_config.prefill_chunk_size,
        )
        if seen := past.get_seq_length():
            target.cache.take_in(past, prompt.past_columns(seen))
        returned = bool(generation_config.return_dict_in_generate)
        return partial(self._decode, decoder, None if cut else past, returned, own_cache)

    def _decode(self, decoder: Decoder, cache: Any, returned: bool, own_cache: bool) -> Any:
        """Generates.

        Args:
            decoder: the generation.
            cache: is filled where somebody will see it, ``None`` where there is nothing to fill it with.
            returned: whether the output is to hold more than ids.
            own_cache: ``cache`` is the caller's.
        """
        with decoder.target.prepared():
            ids = decoder.run()
            if (returned or own_cache) and cache is not None:
                decoder.hand_back(cache, ids)
        self.drafting.learned.add_call(decoder.stats)
        return decoder.output(ids, cache) if returned else ids

    def _plain(self, known: Findings, model: PreTrainedModel, input_ids: torch.Tensor, options: dict[str, Any]) -> Any:
        """The loop of transformers, which is faster without any part of ours; ``known`` learns of the call."""
        begun = perf_counter()
        output = type(model)._sample(model, input_ids, **options)
        seconds, eos_tokens = perf_counter() - begun, Stopper(options["stopping_criteria"]).eos_tokens
        ids, width = output if isinstance(output, torch.Tensor) else output.sequences, input_ids.shape[1]
        counts = []
        for row in ids[:, width:].tolist():
            ends = (index for index, token in enumerate(row, start=1) if token in eos_tokens)
            counts.append(next(ends, len(row)))
        tokens, rounds = sum(counts), sum(counts) - len(counts)
        known.rest(tokens, seconds)
        stats = GenerationStats(
            tokens=tokens,
            rounds=rounds,
            accepted_lengths=Counter({0: rounds}),
            total_seconds=seconds,
            from_draft=[[False] * count for count in counts],
            plan=LayerPlan(Anatomy.of(model).num_layers).picture(),
            timeline=[(tokens, seconds)],
        )
        known.report(stats)
        self.drafting.learned.add_call(stats)
        return output

    @property
    def _usual_stop(self) -> StopRule:
        """When drafts end where nothing was given and nothing chosen yet."""
        return FixedLength(2) if isinstance(self.drafting.draft, EarlyExit) else ConfidenceThreshold()

    @property
    def _search(self) -> Search | None:
        draft = self.drafting.draft
        return draft.search if isinstance(draft, SkipLayers) else None

    @property
    def _window(self) -> int:
        """Slots beyond the text that a search needs."""
        return 0 if self._search is None else self._search.context_window

    def _check_window(self, anatomy: Anatomy, new_tokens: int | None) -> None:
        """Refuses a window that no text of the model can have, and says so where this text is too short for it."""
        name = f"{type(self._search).__name__}(context_window={self._window})"
        if anatomy.max_positions is not None and self._window >= anatomy.max_positions:
            raise SettingError(
                f"{name} is longer than any text of {anatomy.model_name}, which has {anatomy.max_positions} positions. "
                "Give a shorter window; 32 is usual."
            )
        if isinstance(self._search, OnTheFlySearch) and new_tokens is not None and new_tokens <= self._window:
            say_once(
                f"{name} is longer than texts of {new_tokens} new tokens: no set of blocks is tried on them. Generate "
                "more, or give a shorter window."
            )

    def _usable_tree(self, anatomy: Anatomy, prompt: Prompt) -> Tree | None:
        if prompt.padding is not None:
            say_once(
                f"{anatomy.model_name} cannot take rows at different lengths: all rows of a batch advance by the "
                "shortest acceptance. The output is exact; small batches are faster."
            )
        if self.tree is None or (anatomy.tree and prompt.padding is None):
            return self.tree
        say_once(
            f"{anatomy.model_name} cannot take a tree mask, so siblings are not used and drafts are linear. The output "
            "is exact all the same."
        )
        return None


def _pad_token(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
