"""Each token is drafted by the first of some exit heads that is sure enough (DSSD §3.3)."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, replace

import torch

from ..errors import SettingError, SettingTypeError, UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.partial import LayerPlan
from ..model.target import Target
from ..parts.heads import METRICS, ExitHeads
from ..parts.part import part_of
from ..settings import check_share
from ..types import Draft, GenerationStats, Text
from ..verify.scoring import Scorer
from .partial import DraftStep, Limits, PartialDraft


@dataclass(frozen=True)
class DynamicExit:
    """Drafts each token at the first exit head under its threshold, and ends where none is.

    Args:
        heads: exit heads with thresholds, or the folder or Hub repository that holds them, see ``fit_exit_heads``.
        epsilon: how often a head is to be right at its threshold.
        lossless: whether the whole model verifies. Where it does not, it speaks where no head is sure, and the output
            is **not** the model's own (DSSD §3.4.2).

    Raises:
        SettingError, SettingTypeError: there are none, or ``epsilon`` was not calibrated.
    """

    heads: ExitHeads | str | os.PathLike[str]
    epsilon: float = 0.9
    lossless: bool = True

    def __post_init__(self) -> None:
        check_share("DynamicExit(epsilon)", self.epsilon, zero=False, one=True)
        if not isinstance(self.lossless, bool):
            raise SettingTypeError(f"DynamicExit(lossless) must be True or False, got {self.lossless!r}.")
        kept, module = part_of("DynamicExit(heads)", self.heads, ExitHeads)
        module.thresholds(self.epsilon)
        object.__setattr__(self, "heads", kept)
        object.__setattr__(self, "_module", module)

    @property
    def module(self) -> ExitHeads:
        """The heads themselves."""
        found: ExitHeads = self.__dict__["_module"]
        return found

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for each token at least.

        Raises:
            SettingError: the model has too few layers.
            UnsupportedModelError: its layers cannot go on from stored states.
        """
        layers = self.module.layers
        if layers[-1] >= anatomy.num_layers:
            raise SettingError(
                f"these heads take the states of exit layer {layers[-1]}, but {anatomy.model_name} has "
                f"{anatomy.num_layers} layers. Use them with the model that they were fitted to."
            )
        if not anatomy.replay:
            raise UnsupportedModelError(
                f"{anatomy.model_name} has layers that read what earlier ones left behind, so none can be run later: "
                "exit heads cannot draft for it."
            )
        return LayerPlan.early_exit(anatomy.num_layers, layers[0])


class HeadsDraft(PartialDraft):
    """Drafts with exit heads.

    A token goes through as many layers as it takes until a head is sure. Where it goes further than earlier ones went,
    these are taken along: each stretch of layers runs once, over all tokens that have not been there. After an earlier
    token none has been deeper, so these are always the last ones.

    Args:
        target, plan, limits, scorer: see :class:`PartialDraft`.
        settings: heads and thresholds.
    """

    def __init__(self, target: Target, plan: LayerPlan, limits: Limits, scorer: Scorer, settings: DynamicExit) -> None:
        super().__init__(target, plan, limits, scorer)
        self.reuse_from = sys.maxsize
        self.heads = settings.module
        self._thresholds = settings.module.thresholds(settings.epsilon)
        self._sure = METRICS[settings.module.metric]
        self._bounds = (0, *settings.module.layers)
        self._trusted = not settings.lossless
        self._fed: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._levels: list[int] = []
        self.exits: Counter[int] = Counter()

    def propose(self, text: Text, room: list[int]) -> Draft:
        """As :meth:`PartialDraft.propose`; verification starts where the deepest token is."""
        self._fed, self._states, self._levels = [], [], []
        draft = super().propose(text, room)
        if not self._states:
            return draft
        deepest = self._levels[0]
        for level in range(min(self._levels) + 1, deepest + 1):
            self._raise(text, level)
        states = torch.cat(self._states, 1)
        return replace(draft, states=states, prefix=self._bounds[deepest], trusted=self._trusted)

    def report(self, stats: GenerationStats) -> None:
        """Adds where tokens were taken."""
        super().report(stats)
        stats.exit_layers = self.exits

    def _step(self, text: Text, feed: torch.Tensor, cursors: list[int], drafting: list[bool]) -> DraftStep:
        b = text.batch_size
        self._fed.append(feed)
        self._states.append(feed.new_empty(0))
        self._levels.append(0)
        decided = [not on for on in drafting]
        logits: torch.Tensor | None = None
        state = feed
        for level in range(1, len(self._bounds)):
            self._raise(text, level)
            here = self._states[-1][:, -1]
            said = self.heads.on(here.device).logits(level - 1, here).float()
            if logits is None:
                logits, state = said.clone(), here.clone()
            sure = (self._sure(said) >= self._thresholds[level - 1]).tolist()
            for row in range(b):
                if not decided[row] and sure[row]:
                    logits[row], state[row] = said[row].to(logits.device), here[row].to(state.device)
                    decided[row] = True
                    self.exits[self._bounds[level]] += 1
            if all(decided):
                break
        assert logits is not None
        return DraftStep(logits, state, self._states[-1], says=decided)

    def _raise(self, text: Text, level: int) -> None:
        """Takes all tokens that are at the level below through the next stretch of layers."""
        first = self._levels.index(level - 1)
        start, stop = self._bounds[level - 1], self._bounds[level]
        tokens = torch.cat(self._fed[first:], 1)
        before = None if start == 0 else torch.cat(self._states[first:], 1)
        cursors = [root + first for root in self.target.roots]
        after = self.target.run_layers(tokens, cursors, start, stop, before)
        self._states[first:] = after.split(1, 1)
        self._levels[first:] = [level] * (len(self._levels) - first)
