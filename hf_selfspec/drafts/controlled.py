"""The sources of a call under one controller, which lets nothing draft where nothing pays."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..batch import Draft, Text, Verdict
from ..errors import UnsupportedModelError, only_warned
from ..model.forks import new_lock
from ..model.linear import added_seconds
from ..model.logits import Logits, Tops
from ..model.module_tools import ModelView
from ..stats import GenerationStats
from .controller import FREE, LEAST_SPEEDUP, MATCHES, Arms, ArmStats, Controller, Curves
from .free.free import FreeDrafts
from .free.tree import TokenTree
from .source import Drafter, DraftSource, Session

# What rounds cost belongs to a model and a process, whichever SelfSpec has timed them.
_curves: weakref.WeakKeyDictionary[PreTrainedModel, Curves] = weakref.WeakKeyDictionary()
_lock = new_lock()


def controller_of(session: Session) -> Controller:
    """The controller of a generation."""
    target, device = session.target, session.target.model.device.type
    with _lock:
        curves = _curves.setdefault(target.model, Curves())
    is_parallel, kind = session.is_tensor_parallel, (target.model.dtype, target.is_exact, target.graphs is not None)
    return Controller(
        session.knowledge.of("rounds", lambda _: Arms(ArmStats)),
        curves,
        (device, torch.get_num_threads(), is_parallel, *kind),
        on_cpu=device == "cpu",
        is_frozen=is_parallel,
        priced=partial(_priced, weakref.ref(target.model)),  # a curve may outlive the call, and must not keep a model
    )


def _priced(model: Callable[[], PreTrainedModel | None]) -> Callable[[int], float] | None:
    with only_warned("timing a model's layers"):
        return added_seconds(ModelView(cast(PreTrainedModel, model())))
    return None


def drafter_of(source: DraftSource, session: Session) -> Drafter:
    """What drafts in a call: the arms of a source, under a controller if they make estimates, or there are grammars."""
    arms = source.arms(session.anatomy)
    is_one = arms[0] is source
    if session.is_tensor_parallel and not is_one:
        raise UnsupportedModelError(
            f"drafts of {source!r} are compared by timings, which differ between the processes of a tensor-parallel "
            "model. Name one, as EarlyExit(layer)."
        )
    drafters = {repr(arm): arm.start(session if is_one else replace(session, name=repr(arm))) for arm in arms}
    drafter = drafters[repr(arms[0])]
    always = is_one and (drafter.expected_speedup == math.inf or session.is_tensor_parallel)
    if isinstance(drafter, ControlledDrafter) or (always and not session.grammars):
        return drafter
    return ControlledDrafter(session, FreeDrafts(None, session, controller_of(session)), drafters)


class ControlledDrafter(Drafter):
    """Drafts with the source that is the fastest at present, with free drafts, or not at all."""

    def __init__(self, session: Session, free: FreeDrafts, others: dict[str, Drafter]) -> None:
        self.controller, self.free, self.others, self._session = free.controller, free, others, session
        # Without free drafts, what makes no estimates always drafts.
        always = (session.is_tensor_parallel or other.expected_speedup == math.inf for other in others.values())
        self._always = next(iter(others), None) if free.findings is None and any(always) else None
        self._unrepresentative = 0  # see :attr:`Target.unrepresentative_forwards`, before the round
        self._begun, self._now = 0.0, session.target.now
        # Who was asked in this round, and the draft if that was another source that had one.
        self._asked: str | None = None
        self._draft: Draft | None = None
        self._free_takes_part = False  # whether free drafts take part in this round, with what grammars force
        self._tops: Tops | None = None
        self.look = None if free.findings is None else self._look
        self._lengths, self._nodes = list[int](), 0  # before the round, and those of a row's tree in it
        self._variants: dict[str, Any] = {name: drafter.variant for name, drafter in others.items()}
        self._note()

    def _note(self) -> None:
        """Notes what the loop wants to know of all drafters."""
        self.steps = sum(drafter.steps for drafter in self.others.values())
        self.reads_logits = any(other.reads_logits for other in self.others.values())

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        self.free.read(text)
        controller, target = self.controller, self._session.target
        self._begun, self._unrepresentative = self._now(), target.unrepresentative_forwards
        self._lengths, active = list(text.lengths), target.active_rows
        controller.begin(max_new, text.batch_size if active is None else len(active.kept), max(text.lengths))
        for name, drafter in self.others.items():
            if drafter.variant != self._variants[name]:
                controller.begin_anew(name)
                self._variants[name] = drafter.variant
        self._asked, self._draft = self._free_arm(max_new), None
        self._free_takes_part, grammars = self._asked is not None, self._session.grammars
        trees = list[TokenTree]()
        if self._free_takes_part or grammars:
            trees = self.free.plan(text, max_new, self._free_takes_part)
        size = max(map(len, trees), default=0)
        drafting = [pair for pair in zip(trees, controller.worth, strict=False) if pair[1]]
        is_free = self._free_takes_part or size > 0
        free = controller.expected(size, sum(worth * tree.expected for tree, worth in drafting)) if is_free else 0.0
        # Where a grammar forces tokens in all rows, no other source is asked; else a draft is for the other rows, too.
        if self._free_takes_part or not size or not all(len(tree) for tree, _ in drafting):
            promised = {name: drafter.expected_speedup for name, drafter in self.others.items()}
            other = self._always or controller.choose(promised, free)
            if other is not None:
                self._asked = other
                drafter = self.others[other]
                whole = drafter.whole if self._session.stop is None else 0
                width = controller.width(other, whole) if whole else max(max_new)
                draft = drafter.propose(text, [min(count, width) for count in max_new])
                if draft.size:
                    if grammars and draft.listed is None:  # so that masks of all nodes can be made at once
                        draft = replace(draft, listed=draft.tokens.tolist())
                    self._draft, self._free_takes_part = draft, False
                    return draft
        if size and not self._free_takes_part:
            self._asked = None
        self._nodes = size
        return self.free.draft(text, trees) if trees else Draft.none(text)

    def _free_arm(self, max_new: list[int]) -> str | None:
        """Which of the free drafts take part in this round, if any."""
        if self.free.findings is None or not any(max_new) or self.controller.curve.wants_plain:
            return None
        if self.controller.speedup(FREE) >= LEAST_SPEEDUP:
            return FREE
        return MATCHES if self.free.promise(max_new) >= LEAST_SPEEDUP else None

    def _look(self, logits: Logits) -> Tops | None:
        self._tops = Tops(logits) if self._free_takes_part else None
        return self._tops

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        grown = zip(self.controller.worth, text.lengths, self._lengths, strict=True)
        new = sum(worth * (after - before) for worth, after, before in grown)
        self.free.learn(text, verdicts, self._tops)
        seconds = self._now() - self._begun
        is_usual = self._session.target.unrepresentative_forwards == self._unrepresentative
        draft = self._draft
        for name, drafter in self.others.items():
            if draft is not None and name == self._asked:
                drafter.update(text, verdicts, logits)
            elif drafter.observe is not None:
                drafter.observe(text, verdicts, logits)
        self._note()
        if not is_usual:
            return
        if draft is not None:
            lines = list(zip(draft.accepted(verdicts), draft.lengths, strict=True))
            self.controller.record(self._asked, 0, new, seconds, lines)
        else:
            nodes = self._nodes
            # A round in which only tokens were verified that a grammar forces costs as much as one of free drafts.
            self.controller.record(MATCHES if nodes and self._asked is None else self._asked, nodes, new, seconds)

    def finish(self, text: Text) -> None:
        self.free.finish(text)
        for drafter in self.others.values():
            drafter.finish(text)

    def report(self, stats: GenerationStats) -> None:
        for drafter in sorted(self.others.values(), key=lambda drafter: drafter.steps):  # the one in use is the last
            drafter.report(stats)
