"""Drafting each token with the first of several exit heads that is sure enough (DSSD §3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...batch import Draft, Text
from ...errors import UnsupportedModelError
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.forward_pass import ForwardPass
from ...model.plan import LayerPlan
from ...model.transfer import RowNumbers, upload
from ...modules.heads import ExitHeads, confidence
from ...stats import GenerationStats
from ...validation import StrPath, check_share
from ..growing import DraftStep
from ..layers.early_exit import FittedExit
from ..layers.partial import PlanDrafter
from ..source import Drafter, Session
from ..stop import ConfidenceThreshold


@register
@dataclass(frozen=True)
class DynamicExit(FittedExit[ExitHeads]):
    """Drafts each token at the first exit head that is sure enough; the draft ends where none is.

    Args:
        heads: exit heads with thresholds, or the folder or Hub repository that holds them, see ``fit_exit_heads``.
        epsilon: the target share of drafted tokens that are accepted. (In DSSD it is how often each
            head has to be right; of a draft of several tokens less than that is accepted.)

    Raises:
        SettingError, SettingTypeError: there are no such heads, or they do not reach ``epsilon``.
    """

    heads: ExitHeads | StrPath
    epsilon: float = 0.9

    def __post_init__(self) -> None:
        check_share("DynamicExit(epsilon)", self.epsilon, zero=False, one=True)
        self._load("heads", ExitHeads)
        object.__setattr__(self, "_thresholds", self.module.draft_thresholds(self.epsilon))

    @property
    def thresholds(self) -> list[float]:
        """For each head the lowest confidence at which its token is drafted."""
        return list(self.__dict__["_thresholds"])

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for every token.

        Raises:
            SettingError: the model has too few layers.
            UnsupportedModelError: its layers cannot continue from stored states.
        """
        layers = self.module.layers
        self.exit_at(layers[-1], anatomy)
        if not anatomy.replay:
            raise UnsupportedModelError(
                f"{anatomy.model_name} has layers that read what earlier ones have stored, so none can be run later: "
                "exit heads cannot draft for it."
            )
        return LayerPlan.early_exit(anatomy.num_layers, layers[0])

    def start(self, session: Session) -> Drafter:
        plan = self.plan(session.anatomy)
        self.module.check(session.knowledge.fingerprint)
        return HeadsDraft(session.with_usual_stop(ConfidenceThreshold()), plan, self)


class HeadsDraft(PlanDrafter):
    """Drafts with exit heads: a token goes through layers until a head is sure, together with the tokens before it that
    have not been as deep."""

    def __init__(self, session: Session, plan: LayerPlan, settings: DynamicExit) -> None:
        super().__init__(session, plan)
        self._late = None  # which heads run depends on what each of them tells
        self.heads = settings.module
        self._thresholds = settings.thresholds
        self._bounds = (0, *settings.module.layers)
        self._level_of = {layer: level for level, layer in enumerate(self._bounds)}
        # For each token of the draft: ids [b, 1], the state that enters the layer it has reached, and that layer.
        self._fed: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._levels: list[int] = []
        self.exits: Counter[int] = Counter()

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """See :meth:`PlanDrafter.propose`; verification starts at the layer of the deepest token."""
        self._fed, self._states, self._levels = [], [], []
        draft = super().propose(text, max_new)
        if not self._states:
            return draft
        while self._levels[-1] < self._levels[0]:
            self._raise()
        return replace(draft, states=torch.cat(self._states, 1), prefix=self._bounds[self._levels[0]])

    @property
    def _prefix(self) -> int:
        return 0  # a draft's states are those that it has at its end

    def report(self, stats: GenerationStats) -> None:
        super().report(stats)
        stats.exit_layers = self.exits

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        self._fed.append(feed)
        self._states.append(feed.new_empty(0))
        self._levels.append(0)
        decided = [not on for on in drafting]
        # Of the first head that was sure, or of the last one.
        logits: torch.Tensor | None = None
        state: torch.Tensor | None = None

        def decide(level: int, here: torch.Tensor) -> bool:
            nonlocal decided, logits, state
            exit_logits = self.heads.on(here.device).logits(level - 1, here).float()
            if logits is None or state is None or not any(decided):
                logits, state = exit_logits, here
            else:
                stays = upload(decided, exit_logits.device)[:, None]
                logits = torch.where(stays, logits.to(exit_logits.device), exit_logits)
                state = torch.where(stays, state.to(here.device), here)
            sure = (confidence(exit_logits) >= self._thresholds[level - 1]).tolist()
            before, decided = decided, [now or earlier for now, earlier in zip(sure, decided, strict=True)]
            if fresh := sum(decided) - sum(before):
                self.exits[self._bounds[level]] += fresh
            return all(decided)

        while self._levels[-1] < len(self._bounds) - 1 and not all(decided):
            self._raise(decide)
        assert logits is not None
        assert state is not None
        return DraftStep(logits, state, self._states[-1], is_sure=decided)

    def _raise(self, decide: Callable[[int, torch.Tensor], bool] | None = None) -> None:
        """Runs the least deep tokens up to the layer of the others, or up to the first head at which all rows
        ``decide``, which is called with the head's number, from 1 on, and its input ``[b, d]`` for the last token."""
        level = self._levels[-1]
        first = self._levels.index(level)
        reached = self._levels[first - 1] if first else len(self._bounds) - 1

        def stop_fn(layer: int, states: torch.Tensor) -> bool:
            nonlocal reached
            at = self._level_of.get(layer)
            if at is None or decide is None or not decide(at, states[:, -1]):
                return False
            reached = at
            return True

        run = ForwardPass(
            self.target.full_plan,
            start=self._bounds[level],
            state=torch.cat(self._states[first:], 1) if level else None,
            stop=self._bounds[reached],
            stop_fn=stop_fn,
        )
        after = self.target.step(torch.cat(self._fed[first:], 1), self.target.roots.ahead(first), run).captured
        assert after is not None
        self._states[first:] = after.split(1, 1)
        self._levels[first:] = [reached] * (len(self._levels) - first)
