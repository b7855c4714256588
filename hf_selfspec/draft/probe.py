"""Early exit whose layer and draft length are found by a measured probe on the first text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from ..model.exits import Exits
from ..model.partial import LayerPlan
from ..model.target import Target
from ..search.exit_choice import Evidence, ExitChoice, ForwardCosts, Rule, trace
from ..stop.rules import confidence
from ..types import Draft, Text, Verdict
from ..verify.scoring import Scorer
from .partial import Limits, PartialDraft

_PROBES = 4
_TOKENS = 64
_LEAST_TOKENS = 32
_MANY = 8
_TIMINGS = 3


@dataclass(frozen=True)
class ProbeSettings:
    """What a probe may choose from.

    Attributes:
        layers: exit layers to compare.
        rules: stop rules to compare.
        stop: the user's own stop rule, which is used whatever the probe finds, or ``None``.
    """

    layers: Sequence[int]
    rules: Sequence[Rule]
    stop: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


class ProbingDraft(PartialDraft):
    """Drafts from a middle exit until there is text enough, then from the best one.

    Once 32 tokens of every row are there, one forward over the last tokens shows what every exit would have said after
    each of them, and a dozen forwards of one and of several tokens what they cost. The first four generations of a
    model do so, each choosing by all that was seen until then.

    Args:
        target, limits, scorer: see :class:`PartialDraft`.
        settings: what to choose from.
        exits: the model's exits, not attached.
        evidence: what earlier generations of this model showed; this one adds to it.
    """

    def __init__(
        self,
        target: Target,
        limits: Limits,
        scorer: Scorer,
        settings: ProbeSettings,
        exits: Exits,
        evidence: Evidence,
    ) -> None:
        middle = settings.layers[len(settings.layers) // 3]
        super().__init__(target, LayerPlan.early_exit(target.anatomy.num_layers, middle), limits, scorer)
        self.settings = settings
        self.exits = exits
        self.evidence = evidence
        self._wants_text = evidence.probes < _PROBES
        if evidence.choice is not None:
            self._use(evidence.choice)

    def propose(self, text: Text, room: list[int]) -> Draft:
        """As :meth:`PartialDraft.propose`; nothing where the probe found no draft that pays."""
        if not self.plan.skipped_layers:
            return Draft(text.ids[:, :0], [0] * text.batch_size)
        return super().propose(text, room)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Probes once there is text enough."""
        if self._wants_text and min(text.lengths) - text.prompt_width > _LEAST_TOKENS:
            self._wants_text = False
            self._use(self._probe(text))

    def _use(self, choice: ExitChoice) -> None:
        layers = self.target.anatomy.num_layers
        self.plan = LayerPlan(layers) if choice.layer is None else LayerPlan.early_exit(layers, choice.layer)
        self.limits = replace(self.limits, stop=self.settings.stop or choice.stop)

    @torch.no_grad()
    def _probe(self, text: Text) -> ExitChoice:
        generated = min(text.lengths) - text.prompt_width - 1
        n = min(generated, max(_LEAST_TOKENS, _TOKENS // text.batch_size))
        self.target.roots = text.roots()
        tokens, slots = _window(text, n)
        self.exits.attach()
        try:
            self.exits.chosen = tuple(self.settings.layers)
            logits = self.target.step(tokens, slots).logits
            assert logits is not None
            assert self.exits.states is not None
            scores = self._scores(logits)
            traces = {}
            for layer, states in zip(self.exits.chosen, self.exits.states, strict=True):
                said = self.exits.head(states.flatten(0, 1)).unflatten(0, states.shape[:2])
                traces[layer] = trace(self._scores(said), scores, confidence(said), self.scorer.do_sample)
        finally:
            self.exits.chosen = ()
            self.exits.detach()
        return self.evidence.add(traces, self.settings.rules, self._costs(text), self.limits.max_draft)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        # Processors that look at the prefix change draft and target alike; a choice does not need them.
        logits = logits.float()
        return self.scorer.everywhere(logits) if self.scorer.prefix_free else logits

    def _costs(self, text: Text) -> ForwardCosts:
        """Times forwards at the end of the text; what they write into the cache is what is there."""
        layers, early = self.target.anatomy.num_layers, self.settings.layers[len(self.settings.layers) // 3]
        plan = LayerPlan.early_exit(layers, early)
        last, roots = text.last_tokens(), text.roots()
        many, slots = _window(text, _MANY)
        steps, usual = self.steps, (self.plan, self.limits)
        self.plan, self.limits = plan, replace(self.limits, tree=None)
        runs: list[Callable[[], object]] = [
            lambda: self.target.step(last, roots, plan),
            lambda: self.target.step(last, roots),
            lambda: self.target.step(many, slots),
            lambda: PartialDraft.propose(self, text, [1] * text.batch_size),
        ]
        seconds: list[list[float]] = [[] for _ in runs]
        for turn in range(1 + _TIMINGS):
            for place, run in enumerate(runs):
                _wait(last)
                begun = perf_counter()
                run()
                _wait(last)
                if turn:
                    seconds[place].append(perf_counter() - begun)
        self.steps, (self.plan, self.limits) = steps, usual
        one, full, more, proposed = map(median, seconds)
        costs = ForwardCosts.fit(early, one, full, more, _MANY, layers)
        return replace(costs, step=max(proposed - one, 0.0))


def _window(text: Text, n: int) -> tuple[torch.Tensor, list[int]]:
    """``[b, n]`` the tokens before each row's last one, and the slot of each row's first of them."""
    columns = torch.tensor(text.lengths)[:, None] - 1 - n + torch.arange(n)
    return text.ids.gather(1, columns.to(text.ids.device)), [root - n for root in text.roots()]


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
