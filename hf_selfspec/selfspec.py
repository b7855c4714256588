"""``SelfSpec``: what the user configures."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from .checks import check_call, check_length
from .decoding import Decoder, Record, RunningDraft
from .draft.candidates import CandidateDraft
from .draft.early_exit import EarlyExit
from .draft.partial import Limits, PartialDraft
from .draft.skip_layers import SkipLayers
from .errors import SettingTypeError
from .model.anatomy import Anatomy
from .model.cache import SpeculativeCache
from .model.partial import LayerPlan
from .model.prompt import Prompt, extra_arguments
from .model.target import Target
from .notices import say_once
from .settings import check_count
from .stop.rules import ConfidenceThreshold, StopRule
from .types import GenerationStats, Text
from .verify.scoring import Scorer
from .verify.stopping import Stopper
from .verify.tree import TopKTree

_FIRST_SLOTS = 1024
_lock = threading.Lock()


@dataclass
class _Learned:
    """What changes from call to call, shared by threads."""

    stats: GenerationStats | None = None


@dataclass(frozen=True)
class SelfSpec:
    """Self-speculative decoding: part of a model drafts, the whole model verifies.

    ``model.generate(**inputs, assistant=SelfSpec())`` gives the tokens of plain ``generate``, faster. A ``SelfSpec``
    holds settings and can be used again, with other models and by several threads.

    Args:
        draft: which part of the model drafts, :class:`EarlyExit` or :class:`SkipLayers`, or any
            ``CandidateGenerator`` of transformers. By default every second layer is skipped.
        stop: when a draft ends, :class:`FixedLength`, :class:`ConfidenceThreshold` or any function of
            ``(input_ids [b, s], logits [b, v], hidden_states [b, d])`` that returns a ``BoolTensor [b]``.
        tree: sibling tokens at each depth of the draft, or ``None`` for a line.
        max_draft: most tokens in a draft.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    draft: EarlyExit | SkipLayers | CandidateGenerator = field(default_factory=SkipLayers)
    stop: StopRule = field(default_factory=ConfidenceThreshold)
    tree: TopKTree | None = None
    max_draft: int = 25
    _learned: _Learned = field(default_factory=_Learned, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.draft, (EarlyExit, SkipLayers, CandidateGenerator)):
            raise SettingTypeError(
                f"SelfSpec(draft) must be EarlyExit(layer), SkipLayers(...) or a CandidateGenerator, "
                f"got {self.draft!r}."
            )
        if not callable(self.stop) or isinstance(self.stop, type):
            raise SettingTypeError(
                "SelfSpec(stop) must be FixedLength(n), ConfidenceThreshold(p) or a function of (input_ids, logits, "
                f"hidden_states), got {self.stop!r}."
            )
        if self.tree is not None and not isinstance(self.tree, TopKTree):
            raise SettingTypeError(f"SelfSpec(tree) must be a TopKTree or None, got {self.tree!r}.")
        check_count("SelfSpec(max_draft)", self.max_draft)

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics of the last finished call, ``None`` before the first."""
        with _lock:
            return self._learned.stats

    def candidate_generator(
        self,
        model: PreTrainedModel,
        logits_processor: LogitsProcessorList | None = None,
        do_sample: bool = False,
    ) -> PartialDraft:
        """The draft as a ``CandidateGenerator`` for transformers' own assisted generation (one row).

        Args:
            model: the model to draft with.
            logits_processor: processors of the generation.
            do_sample: whether tokens are drawn.

        Raises:
            SettingTypeError: the draft is not an early exit; others need the full model's cache.
        """
        if not isinstance(self.draft, EarlyExit):
            raise SettingTypeError(
                f"only EarlyExit can draft on its own outside this package's loop, got {self.draft!r}: other drafts "
                "read keys and values that only the full model writes."
            )
        anatomy = Anatomy.of(model)
        target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, 1, _FIRST_SLOTS))
        scorer = Scorer(logits_processor or LogitsProcessorList(), 1, do_sample)
        return PartialDraft(target, self.draft.plan(anatomy), Limits(self.stop, self.max_draft), scorer)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes; called by ``generate`` with everything prepared (``custom_generate``)."""
        anatomy = Anatomy.of(model)
        check_call(model, input_ids, logits_processor, generation_config, synced_gpus, model_kwargs)
        plan = None if isinstance(self.draft, CandidateGenerator) else self.draft.plan(anatomy)
        past = model_kwargs["past_key_values"]
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
        new_tokens = _FIRST_SLOTS if stopper.max_length is None else min(stopper.max_length - width, _FIRST_SLOTS)
        limits = Limits(self.stop, self.max_draft, self._usable_tree(anatomy, prompt), stopper.eos_tokens)
        room = new_tokens + limits.most_nodes
        target = Target(
            model,
            anatomy,
            SpeculativeCache(len(past.layers), batch_size, prompt.width + room),
            prompt.padding,
            prompt.holes,
            None if stopper.max_length is None else [stopper.max_length + base - 1 for base in prompt.base],
            extra_arguments(model_kwargs),
        )
        decoder = Decoder(
            target=target,
            prompt=prompt,
            text=Text.of(input_ids, prompt.base, room),
            draft=self._running(target, plan, limits, scorer),
            scorer=scorer,
            stopper=stopper,
            record=record,
            pad_token=_pad_token(generation_config),
            streamer=streamer,
            prefill_chunk=generation_config.prefill_chunk_size,
            stats=GenerationStats(plan="" if plan is None else plan.picture()),
        )
        if seen := past.get_seq_length():
            target.cache.take_in(past, prompt.past_columns(seen))
        returned = generation_config.return_dict_in_generate
        with target.prepared():
            ids = decoder.run()
            if returned or getattr(past, "_is_user_defined", False):
                decoder.hand_back(past, ids)
        with _lock:
            self._learned.stats = decoder.stats
        return decoder.output(ids, past) if returned else ids

    def _running(self, target: Target, plan: LayerPlan | None, limits: Limits, scorer: Scorer) -> RunningDraft:
        if plan is not None:
            return PartialDraft(target, plan, limits, scorer)
        assert isinstance(self.draft, CandidateGenerator)
        vocabulary = target.model.get_input_embeddings().num_embeddings
        return CandidateDraft(self.draft, vocabulary, self.max_draft, scorer.do_sample)

    def _usable_tree(self, anatomy: Anatomy, prompt: Prompt) -> TopKTree | None:
        if prompt.padding is not None:
            say_once(
                f"{anatomy.model_name} cannot take rows at different lengths: all rows of a batch advance by the "
                "shortest acceptance. The output is exact; small batches are faster."
            )
        if self.tree is None or (anatomy.tree and prompt.padding is None):
            return self.tree
        say_once(
            f"{anatomy.model_name} cannot take a tree mask, so TopKTree is not used and drafts are linear. The output "
            "is exact all the same."
        )
        return None


def _pad_token(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
