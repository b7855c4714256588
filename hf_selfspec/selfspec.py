"""``SelfSpec``: what the user configures."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from .checks import check_call, check_length
from .decoding import Decoder, Record, RunningDraft
from .draft.candidates import CandidateDraft
from .draft.early_exit import EarlyExit, EarlyExitOnly, NoDraft
from .draft.partial import Limits, PartialDraft
from .draft.probe import ProbeSettings, ProbingDraft
from .draft.searching import SearchingDraft
from .draft.skip_layers import SkipLayers
from .errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from .model.anatomy import Anatomy, causal_lm
from .model.cache import SpeculativeCache
from .model.exits import Exits
from .model.partial import LayerPlan
from .model.prompt import Prompt, extra_arguments
from .model.target import Target
from .notices import say_once
from .search.exit_choice import Evidence, ExitChoice, exits_to_try
from .search.on_the_fly import OnTheFlySearch, Search, usual_ratio
from .search.replay import Rule, rules
from .search.skip_search import SkipSearch
from .search.skip_space import SkipSpace
from .settings import check_count
from .stop.rules import ConfidenceThreshold, FixedLength, StopRule
from .types import GenerationStats, Text
from .verify.scoring import Scorer
from .verify.stopping import Stopper
from .verify.tree import TopKTree

_FIRST_SLOTS = 1024
_STOP_UNTIL_CHOSEN = FixedLength(2)
_lock = threading.Lock()


@dataclass
class _Learned:
    """What changes from call to call, shared by threads."""

    stats: GenerationStats | None = None
    # For each model, by (do_sample, several rows), the kind of call that came last at the end.
    exits: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, bool], Evidence]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    searches: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, bool], SkipSearch]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __reduce__(self) -> Any:
        # Copies begin anew: what was learned is about models that are not copied with them.
        return _Learned, ()


@dataclass(frozen=True)
class SelfSpec:
    """Self-speculative decoding: part of a model drafts, the whole model verifies.

    ``model.generate(**inputs, assistant=SelfSpec())`` gives the tokens of plain ``generate``, faster. A ``SelfSpec``
    holds settings and can be used again, with other models and by several threads.

    Args:
        draft: which part of the model drafts, :class:`EarlyExit` or :class:`SkipLayers`, or any
            ``CandidateGenerator`` of transformers. By default every second layer is skipped. :class:`EarlyExitOnly`
            generates with the first layers alone, which changes the output (and returns no cache).
        stop: when a draft ends, :class:`FixedLength`, :class:`ConfidenceThreshold` or any function of
            ``(input_ids [b, s], logits [b, v], hidden_states [b, d])`` that returns a ``BoolTensor [b]``. With an
            early exit ``None`` lets a probe on the first text choose.
        tree: sibling tokens at each depth of the draft, or ``None`` for a line.
        max_draft: most tokens in a draft.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    draft: EarlyExit | SkipLayers | EarlyExitOnly | CandidateGenerator = field(default_factory=SkipLayers)
    stop: StopRule | None = field(default_factory=ConfidenceThreshold)
    tree: TopKTree | None = None
    max_draft: int = 25
    _learned: _Learned = field(default_factory=_Learned, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.draft, (EarlyExit, SkipLayers, EarlyExitOnly, CandidateGenerator)):
            raise SettingTypeError(
                f"SelfSpec(draft) must be EarlyExit(layer), SkipLayers(...) or a CandidateGenerator, "
                f"got {self.draft!r}."
            )
        probed = self.stop is None and self._chooses_stop
        if not probed and (not callable(self.stop) or isinstance(self.stop, type)):
            raise SettingTypeError(
                "SelfSpec(stop) must be FixedLength(n), ConfidenceThreshold(p) or a function of (input_ids, logits, "
                f"hidden_states), got {self.stop!r}; None goes with EarlyExit and with a search, which choose."
            )
        if self.tree is not None and not isinstance(self.tree, TopKTree):
            raise SettingTypeError(f"SelfSpec(tree) must be a TopKTree or None, got {self.tree!r}.")
        check_count("SelfSpec(max_draft)", self.max_draft)

    @classmethod
    def layerskip(
        cls,
        exit_layer: int | None = None,
        num_draft: int | None = None,
        stop: StopRule | None = None,
        max_draft: int = 12,
    ) -> SelfSpec:
        """LayerSkip's self-speculation, for models trained with :class:`EarlyExitLoss` and :class:`LayerDropout`.

        What is not given is chosen for each model by a measured probe on the first 1,024 tokens that it generates: the
        exit layer and the draft length or threshold with the most expected tokens per second (no draft at all where
        none pays). Greedy and sampled, single and batched calls choose for themselves. :meth:`choice` tells what was
        found.

        Args:
            exit_layer: the exit layer ``E``, from 1 to ``L-1``.
            num_draft: tokens in a draft (LayerSkip §4.3).
            stop: another stop rule, in the place of ``num_draft``.
            max_draft: most tokens in a draft (12 in the paper).

        Raises:
            SettingError, SettingTypeError: a setting is not allowed, or both ``num_draft`` and ``stop`` are given.
        """
        if num_draft is not None and stop is not None:
            raise SettingError(
                f"SelfSpec.layerskip(num_draft={num_draft!r}, stop={stop!r}): give one of the two; max_draft bounds "
                "the drafts of a stop rule."
            )
        check_count("SelfSpec.layerskip(max_draft)", max_draft)
        if num_draft is not None:
            stop = FixedLength(num_draft)
            max_draft = max(max_draft, num_draft)
        return cls(draft=EarlyExit(exit_layer), stop=stop, max_draft=max_draft)

    @classmethod
    def swift(
        cls,
        ratio: float | Literal["auto"] = "auto",
        search: Search | None = None,
        stop: StopRule | None = None,
        tree: TopKTree | None = None,
        max_draft: int = 25,
    ) -> SelfSpec:
        """SWIFT: nothing trained, nothing prepared; which blocks are skipped is found while text is generated.

        Args:
            ratio: share of the blocks that are skipped, see :class:`SkipLayers`.
            search: when sets are tried and when that ends, by default as in the paper, see :class:`OnTheFlySearch`;
                or :class:`ClosestLayers`.
            stop: when a draft ends, confidence below 0.8 by default.
            tree: siblings at each depth, the paper's widths by default.
            max_draft: most tokens in a draft (25 in the paper).

        Raises:
            SettingError, SettingTypeError: a setting is not allowed.
        """
        draft = SkipLayers(search=OnTheFlySearch() if search is None else search, ratio=ratio)
        return cls(draft, stop or ConfidenceThreshold(), TopKTree() if tree is None else tree, max_draft)

    @classmethod
    def early_exit_only(cls, layer: int) -> SelfSpec:
        """Generation with the first ``layer`` layers alone. **The output is not the model's own.**

        Papers compare with it (LayerSkip, Tables 1, 2 and 11); nothing is drafted or verified.

        Raises:
            SettingError, SettingTypeError: ``layer`` is not a whole number of at least 1.
        """
        return cls(draft=EarlyExitOnly(layer), stop=None)

    def choice(self, model: Any) -> ExitChoice | None:
        """What the probe of :meth:`layerskip` chose for the last kind of call of ``model``, ``None`` before that.

        A choice holds for a model object, whatever adapters are active: take a new ``SelfSpec`` after changing them.

        Args:
            model: a causal LM of transformers, or a PEFT model around one.

        Raises:
            SettingTypeError: it is neither.
        """
        inner = causal_lm(model, "SelfSpec.choice")
        with _lock:
            kinds = list(self._learned.exits.get(inner, {}).values())
        return kinds[-1].choice if kinds else None

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
        plan = self.draft.plan(anatomy := Anatomy.of(model)) if isinstance(self.draft, EarlyExit) else None
        if plan is None or self.stop is None:
            raise SettingTypeError(
                "only EarlyExit(layer) with a stop rule can draft on its own outside this package's loop, got "
                f"{self.draft!r} and {self.stop!r}: other drafts read keys and values that only the full model writes."
            )
        target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, 1, _FIRST_SLOTS))
        scorer = Scorer(logits_processor or LogitsProcessorList(), 1, do_sample)
        return PartialDraft(target, plan, Limits(self.stop, self.max_draft), scorer)

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
        own_cache = bool(getattr(past, "_is_user_defined", False))
        partial = isinstance(self.draft, EarlyExitOnly)
        if partial and own_cache:
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
        new_tokens = _FIRST_SLOTS if stopper.max_length is None else min(stopper.max_length - width, _FIRST_SLOTS)
        limits = Limits(
            self.stop or _STOP_UNTIL_CHOSEN, self.max_draft, self._usable_tree(anatomy, prompt), stopper.eos_tokens
        )
        room = new_tokens + max(limits.most_nodes, self._window)
        target = Target(
            model,
            anatomy,
            SpeculativeCache(len(past.layers), batch_size, prompt.width + room),
            prompt.padding,
            prompt.holes,
            None if stopper.max_length is None else [stopper.max_length + base - 1 for base in prompt.base],
            extra_arguments(model_kwargs),
            plan if partial else None,
        )
        draft = self._running(target, plan, limits, scorer, batch_size)
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
        returned = generation_config.return_dict_in_generate
        with target.prepared():
            ids = decoder.run()
            if (returned or own_cache) and not partial:
                decoder.hand_back(past, ids)
        with _lock:
            self._learned.stats = decoder.stats
        return decoder.output(ids, None if partial else past) if returned else ids

    def _running(
        self, target: Target, plan: LayerPlan | None, limits: Limits, scorer: Scorer, batch_size: int
    ) -> RunningDraft:
        if isinstance(self.draft, CandidateGenerator):
            vocabulary = target.model.get_input_embeddings().num_embeddings
            return CandidateDraft(self.draft, vocabulary, self.max_draft, scorer.do_sample)
        if isinstance(self.draft, EarlyExitOnly):
            return NoDraft(target.full_plan)
        if isinstance(self.draft, SkipLayers) and self.draft.search is not None:
            assert plan is not None
            return self._searching(target, plan, limits, scorer, self.draft.search)
        if plan is not None and self.stop is not None:
            return PartialDraft(target, plan, limits, scorer)
        assert isinstance(self.draft, EarlyExit)
        layer, stop = self.draft.layer, self.stop
        settings = ProbeSettings(
            layers=exits_to_try(target.anatomy.num_layers) if layer is None else (layer,),
            rules=[stop] if isinstance(stop, Rule) else rules(self.max_draft),
            stop=stop,
        )
        _check_probe(target)
        kind = (scorer.do_sample, batch_size > 1)
        with _lock:
            kinds = self._learned.exits.setdefault(target.model, {})
            evidence = kinds[kind] = kinds.pop(kind) if kind in kinds else Evidence()
        return ProbingDraft(target, limits, scorer, settings, Exits(target.model), evidence)

    @property
    def _window(self) -> int:
        """Slots beyond the text that a search needs."""
        search = self.draft.search if isinstance(self.draft, SkipLayers) else None
        return 0 if search is None else search.context_window

    @property
    def _chooses_stop(self) -> bool:
        if isinstance(self.draft, SkipLayers):
            return self.draft.search is not None and self.draft.ratio == "auto"
        return isinstance(self.draft, (EarlyExit, EarlyExitOnly))

    def _searching(
        self, target: Target, start: LayerPlan, limits: Limits, scorer: Scorer, settings: Search
    ) -> PartialDraft:
        assert isinstance(self.draft, SkipLayers)
        space = SkipSpace.of(target.anatomy)
        if target.padding is not None or not target.anatomy.tree:
            say_once(
                f"{target.anatomy.model_name} cannot look at its text a second time beside it (no mask of its own), so "
                "there is no search for blocks to skip, and the set that it would start from drafts."
            )
            return PartialDraft(target, start, limits, scorer)
        auto = self.draft.ratio == "auto"
        ratio = usual_ratio(target.model.num_parameters()) if self.draft.ratio == "auto" else self.draft.ratio
        kind = (scorer.do_sample, len(target.roots) > 1)
        with _lock:
            kinds = self._learned.searches.setdefault(target.model, {})
            if kind not in kinds:
                # What another kind of call found is a better start than none.
                best = next((search.best for search in kinds.values()), start)
                considered = [self.stop] if isinstance(self.stop, Rule) else rules(self.max_draft)
                kinds[kind] = SkipSearch(settings, space, ratio, best, auto, considered, self.max_draft)
            search = kinds[kind]
        return SearchingDraft(target, limits, scorer, search, self.stop)

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


def _check_probe(target: Target) -> None:
    anatomy, name = target.anatomy, target.anatomy.model_name
    instead = "Give SelfSpec.layerskip an exit_layer and a num_draft."
    if anatomy.num_layers < 2:
        raise SettingError(f"{name} has one layer, so there is no exit before the last. Call generate without us.")
    if not anatomy.exits:
        raise UnsupportedModelError(
            f"{name} fixes the batch after its last layer, so a probe cannot ask its exits together. {instead}"
        )
    if (getattr(target.model, "_tp_size", None) or 1) > 1:
        raise UnsupportedOptionError(
            f"a probe goes by timings, which differ between the processes of a tensor-parallel model. {instead}"
        )


def _pad_token(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
