"""Drafting with attention and MLP blocks skipped (Self-SD; SWIFT §3.1), which may be searched for meanwhile (§4.1)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from ...batch import Text, Verdict
from ...errors import SettingError, SettingTypeError, UnsupportedModelError, warn_once
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.forward_pass import ForwardPass
from ...model.layout import TreeLayout
from ...model.plan import LayerPlan, check_plan
from ...model.transfer import read, upload
from ...search.skip_search import OnTheFlySearch, SkipSearch, SkipSpace, usual_ratio
from ...stats import GenerationStats
from ...validation import check_share
from ..source import Drafter, DraftSource, Session
from ..stop import ConfidenceThreshold
from .partial import PlanDrafter

# Where the call has no stop rule (SWIFT §4.2).
_USUAL_STOP = ConfidenceThreshold()
# The time of a trial until one was timed, in one-token rounds. By the first guesses of what rounds cost, a forward over
# SWIFT's 32 tokens takes 1.15 to 3.2.
_FIRST_TRIAL = 4
# Fewer tokens of each row, behind the shortest prompts, are not worth a trial.
_LEAST = 8


@register
@dataclass(frozen=True)
class SkipLayers(DraftSource):
    """Drafts with some attention and MLP blocks left out.

    Args:
        attention: layers whose attention block is skipped.
        mlp: layers whose MLP block is skipped.
        search: looks for a better set while text is generated, starting from this one; ``None`` keeps this one.
        ratio: share of the blocks of all layers but the first and the last that the sets of the search skip;
            ``"auto"`` for SWIFT's: 0.4, 0.45 from 10 and 0.5 from 30 billion parameters on.

    If no blocks are given, both blocks of every second layer from 1 to ``L-2`` are skipped. The first and the last
    layer cannot be skipped (SWIFT always keeps them).

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    attention: tuple[int, ...] | None = None
    mlp: tuple[int, ...] | None = None
    search: OnTheFlySearch | None = None
    ratio: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.search is not None and not isinstance(self.search, OnTheFlySearch):
            raise SettingTypeError(f"SkipLayers(search) must be OnTheFlySearch() or None, got {self.search!r}.")
        if self.ratio != "auto":
            check_share("SkipLayers(ratio)", self.ratio, zero=False, one=False)
            if self.search is None:
                raise SettingError(
                    f"SkipLayers(ratio={self.ratio}) is the size of the sets that a search proposes: set "
                    "search=OnTheFlySearch() too, or name the blocks."
                )
        for name in ("attention", "mlp"):
            if (value := getattr(self, name)) is None:
                continue
            indices = tuple(value) if isinstance(value, Iterable) else (value,)
            if any(type(index) is not int for index in indices) or not isinstance(value, Iterable):
                raise SettingTypeError(f"SkipLayers({name}) must be a list of layer numbers, got {value!r}.")
            if min(indices, default=1) < 1:
                raise SettingError(
                    f"SkipLayers({name}={list(indices)}): layer numbers start at 0, and layer 0 is never skipped."
                )
            object.__setattr__(self, name, tuple(sorted(set(indices))))

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for this model.

        Raises:
            SettingError: a block does not exist or is in the last layer, or nothing would be skipped.
            UnsupportedModelError: a block was not found in the model.
        """
        count = anatomy.num_layers
        if self.attention is None and self.mlp is None:
            mlp = tuple(range(1, count - 1, 2))
            attention = tuple(index for index in mlp if index not in anatomy.kv_sources)
        else:
            attention, mlp = self.attention or (), self.mlp or ()
        for name, indices in (("attention", attention), ("mlp", mlp)):
            wrong = [index for index in indices if index > count - 2]
            if wrong:
                raise SettingError(
                    f"SkipLayers({name}) names layer {wrong[0]}, but {anatomy.model_name} has {count} layers, of "
                    f"which 1 to {count - 2} can be skipped (the first and the last are always kept)."
                )
        needed = sorted(anatomy.kv_sources.intersection(attention))
        if needed:
            raise SettingError(
                f"SkipLayers(attention) names layer {needed[0]}, whose keys and values later layers of "
                f"{anatomy.model_name} read. Leave its attention out of the set; its MLP can be skipped."
            )
        if not attention and not mlp:
            raise SettingError(
                f"SkipLayers() skips nothing in {anatomy.model_name} with its {count} layers, so the draft would be "
                "the whole model. Name at least one block, or use a model of at least 3 layers."
            )
        plan = LayerPlan(count, frozenset(attention), frozenset(mlp))
        check_plan(plan, anatomy)
        return plan

    def check(self, anatomy: Anatomy) -> None:
        self.plan(anatomy)

    def start(self, session: Session) -> Drafter:
        plan = self.plan(session.anatomy)
        if self.search is not None and session.is_tensor_parallel:
            raise UnsupportedModelError(
                "a search for blocks to skip goes by timings, which differ between the processes of a tensor-parallel "
                "model. Name the blocks: SkipLayers(attention=[...], mlp=[...])."
            )
        if self.search is not None and session.anatomy.tree:
            return SearchingDraft(session, plan, self.search, self.ratio)
        if self.search is not None:
            warn_once(
                f"{session.anatomy.model_name} cannot run over its text a second time (it cannot take a tree mask), so "
                "there is no search for blocks to skip, and its initial set drafts."
            )
        return PlanDrafter(session.with_usual_stop(_USUAL_STOP), plan)


class SearchingDraft(PlanDrafter):
    """Drafts with the best set of skipped blocks so far, and tries another one after each round, by a forward over the
    last generated tokens in slots beyond the text."""

    expected_speedup = None

    def __init__(self, session: Session, start: LayerPlan, search: OnTheFlySearch, ratio: float | str) -> None:
        super().__init__(session.with_usual_stop(_USUAL_STOP), start)
        self._window = search.context_window

        def make(other: SkipSearch | None) -> SkipSearch:
            share = usual_ratio(self.target.model.num_parameters()) if isinstance(ratio, str) else ratio
            return SkipSearch(search, SkipSpace.of(session.anatomy), share, start if other is None else other.best)

        self.search: SkipSearch = session.knowledge.of(f"skip search {session.name}".rstrip(), make)
        self._begun, self._spent = self.target.now(), 0.0  # seconds of trials in this call
        self.target.cache.reserve(min(self._window, session.new_tokens))
        self.target.cache.look_back(self._window)
        self._use_best()

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Reports the accepted tokens to the search, and tries a set if its budget allows that."""
        super().update(text, verdicts, logits)
        self._learn(text, sum(self._draft.lengths), sum(self._accepted))

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """As :meth:`update`, after a round in which another source drafted, or none."""
        self._learn(text, 0, 0)

    def report(self, stats: GenerationStats) -> None:
        self.search.report(stats)

    def _learn(self, text: Text, drafted: int, accepted: int) -> None:
        self.search.watch(self.plan, drafted, accepted)
        if not self.search.is_over:
            self._try(text)
        self._use_best()

    def _use_best(self) -> None:
        self.plan = self.variant = self.search.best

    def _try(self, text: Text) -> None:
        """Tries a set on the last tokens, if all of them were generated and there is time."""
        search, now = self.search, self.target.now
        begun, share = now(), search.settings.budget
        elapsed = begun - self._begun
        generated = max(text.lengths[row] for row in self.target.rows) - text.prompt_width
        window = min(self._window, *text.last_slots())
        expected = search.trial_seconds or _FIRST_TRIAL * elapsed / max(generated, 1)
        has_time = share >= 1.0 or self._spent + expected <= share * elapsed
        if generated <= self._window or window < min(_LEAST, self._window) or not has_time:
            return
        if (plan := search.propose()) is not None:
            proposed = now()
            search.register(plan, self.matchness(text, plan, window))
            search.trial_seconds = now() - proposed
        seconds = now() - begun
        self._spent += seconds
        search.search_seconds += seconds

    @torch.no_grad()
    def matchness(self, text: Text, plan: LayerPlan, window: int) -> float:
        """The share of the last ``window`` tokens of all rows that ``plan`` predicts after the text before them."""
        ends = torch.tensor(text.lengths, device="cpu")[:, None]
        columns = (ends - 1 - window + torch.arange(window + 1, device="cpu")).clamp(min=0)
        tokens = text.ids.gather(1, upload(columns.tolist(), text.device))
        step = self.target.step(tokens[:, :-1], text.last_slots(), ForwardPass(plan), TreeLayout.replay(window))
        assert step.logits is not None
        scores = self.scorer.roughly(step.logits.to(tokens.device, torch.float32))
        # In rows that ended early the window reaches into the prompt, which the model did not generate.
        own = [min(window, length - text.prompt_width) for length in text.lengths]
        own = [count if row in self.target.rows else 0 for row, count in enumerate(own)]
        last = torch.arange(window, 0, -1, device=tokens.device) <= upload(own, tokens.device)[:, None]
        return read(((scores.argmax(-1) == tokens[:, 1:]) & last).sum())[0] / sum(own)
