"""From settings to the draft that runs in one generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.generation.candidate_generator import CandidateGenerator

from .decoding import RunningDraft
from .draft.adapter import AdapterDraft, EarlyExitAdapter
from .draft.candidates import CandidateDraft, one_for_each_row
from .draft.early_exit import EarlyExit, EarlyExitOnly, NoDraft
from .draft.exit_heads import DynamicExit, HeadsDraft
from .draft.partial import Limits, PartialDraft
from .draft.probe import ProbeSettings, ProbingDraft
from .draft.searching import SearchingDraft
from .draft.skip_layers import SkipLayers
from .errors import SettingError, UnsupportedModelError, UnsupportedOptionError
from .learned import Learned
from .model.exits import Exits
from .model.partial import LayerPlan
from .model.target import Target
from .notices import say_once
from .parts.probe import LinearProbe
from .search.exit_study import ExitStudy, exits_to_try
from .search.on_the_fly import Search, usual_ratio
from .search.replay import Rule, can_replay, rules
from .search.skip_search import SkipSearch
from .search.skip_space import SkipSpace
from .stop.adaptive import AdaptiveThreshold
from .stop.rules import StopRule
from .verify.scoring import Scorer


@dataclass(frozen=True)
class Drafting:
    """What is asked of drafts, and what is known already.

    Attributes:
        draft, stop, max_draft: see ``SelfSpec``.
        learned: from earlier calls.
        cache_dir, task: where it lasts, see ``SelfSpec``.
        settings: what is written beside it.
    """

    draft: EarlyExit | SkipLayers | EarlyExitAdapter | DynamicExit | EarlyExitOnly | CandidateGenerator
    stop: StopRule | None
    max_draft: int
    learned: Learned
    cache_dir: Path | None
    task: str
    settings: Mapping[str, Any]

    def running(self, target: Target, plan: LayerPlan | None, limits: Limits, scorer: Scorer) -> RunningDraft:
        """The draft for one generation.

        Args:
            target: the model and its cache.
            plan: the blocks that run, where that is known.
            limits: of a draft; the stop rule is that until one is chosen.
            scorer: logits processors.

        Raises:
            SelfSpecError: the model cannot be probed or searched.
        """
        if (probe := _probe_of(self.stop)) is not None:
            probe.check(lambda: self.learned.fingerprint(target.model))
            _check_probe_of_stop(probe, plan, self.draft, scorer.do_sample)
        if isinstance(self.draft, CandidateGenerator):
            rows = len(target.roots)
            return CandidateDraft(
                generators=one_for_each_row(self.draft, rows),
                first_slots=[0] * rows if target.padding is None else target.padding.argmax(1).tolist(),
                vocabulary=target.model.get_input_embeddings().num_embeddings,
                longest=self.max_draft,
                scorer=scorer,
            )
        if isinstance(self.draft, EarlyExitOnly):
            return NoDraft(target.full_plan)
        if isinstance(self.draft, SkipLayers) and self.draft.search is not None:
            assert plan is not None
            return self._searching(target, plan, limits, scorer, self.draft.search, self.draft.ratio)
        if isinstance(self.draft, EarlyExit) and (plan is None or self.stop is None):
            return self._probing(target, limits, scorer, self.draft.layer)
        assert plan is not None
        if isinstance(self.draft, (EarlyExitAdapter, DynamicExit)):
            self.draft.module.check(lambda: self.learned.fingerprint(target.model))
        if isinstance(self.draft, EarlyExitAdapter):
            return AdapterDraft(target, plan, limits, scorer, self.draft.module)
        if isinstance(self.draft, DynamicExit):
            return HeadsDraft(target, plan, limits, scorer, self.draft)
        return PartialDraft(target, plan, limits, scorer)

    def _probing(self, target: Target, limits: Limits, scorer: Scorer, layer: int | None) -> PartialDraft:
        _check_probe(target)
        settings = ProbeSettings(
            layers=exits_to_try(target.anatomy.num_layers) if layer is None else (layer,),
            rules=self._rules(),
            stop=self.stop,
        )
        layers = target.anatomy.num_layers
        study = self.learned.of(
            target.model, self._kind(target, scorer), lambda _: ExitStudy(layers), self._cache(target), self.settings
        )
        return ProbingDraft(target, limits, scorer, settings, Exits(target.model), study)

    def _searching(
        self, target: Target, start: LayerPlan, limits: Limits, scorer: Scorer, search: Search, ratio: Any
    ) -> PartialDraft:
        space = SkipSpace.of(target.anatomy)
        why = ""
        if target.padding is not None or not target.anatomy.tree:
            why = f"{target.anatomy.model_name} cannot look at its text a second time beside it (no mask of its own)"
        elif _is_tensor_parallel(target):
            why = "a search goes by timings, which differ between the processes of a tensor-parallel model"
        if why:
            say_once(f"{why}, so there is no search for blocks to skip, and the set that it would start from drafts.")
            return PartialDraft(target, start, limits, scorer)
        auto = ratio == "auto"
        share = usual_ratio(target.model.num_parameters()) if auto else ratio

        def make(other: SkipSearch | None) -> SkipSearch:
            best = start if other is None else other.best
            return SkipSearch(search, space, share, best, auto, self._rules(), self.max_draft)

        found = self.learned.of(target.model, self._kind(target, scorer), make, self._cache(target), self.settings)
        return SearchingDraft(target, limits, scorer, found, self.stop)

    def _rules(self) -> list[Rule]:
        return [self.stop] if can_replay(self.stop) else rules(self.max_draft)

    def _kind(self, target: Target, scorer: Scorer) -> tuple[bool, bool]:
        return scorer.do_sample, len(target.roots) > 1

    def _cache(self, target: Target) -> Path | None:
        if self.cache_dir is None:
            return None
        return self.learned.cache_file(self.cache_dir, self.task, target.model, self.settings)


def _check_probe(target: Target) -> None:
    anatomy, name = target.anatomy, target.anatomy.model_name
    instead = "Give SelfSpec.layerskip an exit_layer and a num_draft."
    if anatomy.num_layers < 2:
        raise SettingError(f"{name} has one layer, so there is no exit before the last. Call generate without us.")
    if not anatomy.exits:
        raise UnsupportedModelError(
            f"{name} fixes the batch after its last layer, so a probe cannot ask its exits together. {instead}"
        )
    if _is_tensor_parallel(target):
        raise UnsupportedOptionError(
            f"a probe goes by timings, which differ between the processes of a tensor-parallel model. {instead}"
        )


def _probe_of(stop: StopRule | None) -> LinearProbe | None:
    """The probe that a stop rule asks, if there is one."""
    rule = stop.rule if isinstance(stop, AdaptiveThreshold) else stop
    found = getattr(rule, "confidence", None)
    return found if isinstance(found, LinearProbe) else None


def _check_probe_of_stop(probe: LinearProbe, plan: LayerPlan | None, draft: Any, do_sample: bool) -> None:
    if plan is None or plan != LayerPlan.early_exit(plan.num_layers, probe.exit_layer):
        raise SettingError(
            f"the probe was fitted to the states of exit layer {probe.exit_layer}, but {draft!r} drafts from others. "
            f"Draft with EarlyExit({probe.exit_layer}), or fit another probe."
        )
    if probe.do_sample != do_sample:
        modes = {True: "drawn tokens", False: "greedy text"}
        say_once(
            f"the probe was fitted for {modes[probe.do_sample]} and is asked for {modes[do_sample]}: it may mislead."
        )


def _is_tensor_parallel(target: Target) -> bool:
    return (getattr(target.model, "_tp_size", None) or 1) > 1
