"""One call of ``generate``: from what transformers has prepared to the decoded text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .checks import check_call, check_length, check_lossy
from .decoding import Decoder, Record
from .draft.early_exit import EarlyExit, EarlyExitOnly
from .draft.exit_heads import DynamicExit
from .draft.partial import Limits
from .draft.skip_layers import SkipLayers
from .drafting import Drafting
from .errors import SettingError, UnsupportedOptionError
from .model.anatomy import Anatomy
from .model.arguments import extra_arguments
from .model.cache import SpeculativeCache
from .model.checkpointing import checkpoints
from .model.linear import are_faster
from .model.prompt import Prompt, is_right_padded
from .model.target import Target
from .notices import say_once
from .plain import decode_plainly
from .saving import Kind
from .search.on_the_fly import OnTheFlySearch, Search
from .stop.rules import ConfidenceThreshold, FixedLength, StopRule
from .types import Text
from .verify.scoring import Scorer
from .verify.stopping import Stopper
from .verify.tree import Tree

# Slots to begin with where it is not known how long the text will be.
FIRST_SLOTS = 1024
# Why a call is left to plain ``generate``.
_NO_DRAFT_PAYS, _PADDED_ON_THE_RIGHT = "no draft pays", "its prompts are padded on the right"


@dataclass(frozen=True)
class Call:
    """Decodes what ``generate`` asks for.

    Attributes:
        drafting: what drafts.
        tree: siblings at each depth, ``None`` for a line.
        checks_logits: see :class:`Decoder`.
    """

    drafting: Drafting
    tree: Tree | None
    checks_logits: bool = True

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
        has_cache = model_kwargs.get("use_cache") is not False
        if not has_cache:
            model_kwargs = _with_cache(model, model_kwargs)
        check_call(model, input_ids, generation_config, synced_gpus, model_kwargs)
        extra = extra_arguments(model, model_kwargs)
        _warn_of_checkpointing(model)
        kind = bool(generation_config.do_sample), len(input_ids) > 1
        cut = isinstance(self.drafting.draft, EarlyExitOnly)
        lossless = getattr(self.drafting.draft, "lossless", True)
        why = "" if not lossless else self._left_to_generate(model, kind, input_ids, model_kwargs.get("attention_mask"))
        if why:
            options: dict[str, Any] = {
                "logits_processor": logits_processor,
                "stopping_criteria": stopping_criteria,
                "generation_config": generation_config,
                "synced_gpus": synced_gpus,
                "streamer": streamer,
            }
            return partial(self._plain, why, model, kind, input_ids, options | model_kwargs)
        plan = None if isinstance(self.drafting.draft, CandidateGenerator) else self.drafting.draft.plan(anatomy)
        past = model_kwargs["past_key_values"]
        own_cache = bool(getattr(past, "_is_user_defined", False))
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
        check_length(model, anatomy, prompt, generation_config.max_length, width)
        scorer = Scorer(logits_processor, batch_size, bool(generation_config.do_sample))
        stopper = Stopper(stopping_criteria)
        record = Record.of(generation_config, batch_size, bool(scorer.stateful or stopper.stateful))
        if isinstance(self.drafting.draft, DynamicExit) and not self.drafting.draft.lossless:
            check_lossy([*logits_processor, *stopping_criteria])
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
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ahead = limits.room(new_tokens, vocabulary), min(self._window, new_tokens), anatomy.num_layers
        room = new_tokens + max(ahead)
        target = Target(
            model,
            anatomy,
            SpeculativeCache(len(past.layers), batch_size, prompt.width + room),
            prompt.padding,
            prompt.holes,
            None if stopper.max_length is None else [stopper.max_length + base - 1 for base in prompt.base],
            extra,
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
            checks_logits=self.checks_logits,
        )
        if seen := past.get_seq_length():
            target.cache.take_in(past, prompt.past_columns(seen))
        returned = bool(generation_config.return_dict_in_generate)
        cache = past if not cut and (has_cache or own_cache) else None
        return partial(self._decode, decoder, cache, returned, own_cache)

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
        _remind_of_length(decoder.stopper.criteria, ids)
        return decoder.output(ids, cache) if returned else ids

    def _left_to_generate(
        self, model: PreTrainedModel, kind: Kind, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> str:
        """Why the call is left to transformers' own loop, empty where it is not.

        Where no draft pays ours is as fast, and faster where linear layers are (float32 on a CPU).
        """
        known = self.drafting.learned.known(model, kind)
        if known is not None and known.is_idle and not are_faster(model.modules(), len(input_ids)):
            return _NO_DRAFT_PAYS
        if attention_mask is None or not is_right_padded(attention_mask):
            return ""
        say_once(
            "the prompts are padded on the right, so this call is left to transformers' own loop, which goes on from "
            "the padding: nothing is drafted. For correct and faster results set the tokenizer's padding_side='left'."
        )
        return _PADDED_ON_THE_RIGHT

    def _plain(
        self, why: str, model: PreTrainedModel, kind: Kind, input_ids: torch.Tensor, options: dict[str, Any]
    ) -> Any:
        """The loop of transformers, without any part of ours; what is known of the model learns of the call."""
        output, stats = decode_plainly(model, input_ids, options)
        stats.left_to_generate = why
        known = self.drafting.learned.known(model, kind)
        if known is not None and known.is_idle:
            known.add_idle_call(stats.tokens, stats.total_seconds)
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


def _with_cache(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments where the model's own configuration does not switch the cache off: the ids are the same."""
    given = model_kwargs.get("past_key_values")
    cache = DynamicCache(config=model.config.get_text_config(decoder=True)) if given is None else given
    return model_kwargs | {"past_key_values": cache, "use_cache": True}


def _remind_of_length(criteria: StoppingCriteriaList, ids: torch.Tensor) -> None:
    """Transformers' reminder, where it has one, that the text is longer than the model was made for."""
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            criterion(ids[:, :-1], None)


def _warn_of_checkpointing(model: PreTrainedModel) -> None:
    if checkpoints(model):
        say_once(
            f"{type(model).__name__} is in training mode with gradient checkpointing, where its layers drop the KV "
            "cache and generate alone sees only the last token. With `assistant` checkpointing is suspended meanwhile, "
            "so the tokens are those of generate(use_cache=False). Call model.eval() before you generate."
        )


def _pad_token(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
