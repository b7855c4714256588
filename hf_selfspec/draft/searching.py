"""Skipped sub-layers that are searched for while the text is generated (SWIFT §4.1, CLaSp)."""

from __future__ import annotations

import torch

from ..model.partial import LayerPlan
from ..model.target import Nodes, Target
from ..search.clasp import closest_layers
from ..search.on_the_fly import ClosestLayers, SkipSearch
from ..types import Text, Verdict
from ..verify.scoring import Scorer
from .partial import Limits, PartialDraft


class SearchingDraft(PartialDraft):
    """Drafts with the best set of skipped blocks so far, and tries another one after each round.

    A try is one forward of that set over the last generated tokens, with the context's keys and values as they are. The
    window goes into slots beyond the text, whose own keys and values stay as they are.

    Args:
        target, limits, scorer: see :class:`PartialDraft`.
        search: what earlier generations of this model found; this one goes on with it.
    """

    def __init__(self, target: Target, limits: Limits, scorer: Scorer, search: SkipSearch) -> None:
        super().__init__(target, search.best, limits, scorer)
        self.search = search
        self._window_end = 0
        self._has_begun = bool(search.history)
        self._chosen = _FirstChoices() if scorer.do_sample else None

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Tries a set, once there are tokens enough and until the search is over."""
        if not self.search.is_over:
            self.target.roots = text.roots()
            if isinstance(self.search.settings, ClosestLayers) and not self._has_begun:
                self.search.begin(closest_layers(self.target, text, self.search.layers))
            self._has_begun = True
            if self._chosen is not None:
                self._chosen.add(text, verdicts, logits)
            window = self.search.settings.context_window
            if max(text.lengths) - text.prompt_width > window and min(text.roots()) >= window:
                self._try(text, window)
        self.plan = self.search.best

    def _try(self, text: Text, window: int) -> None:
        if max(text.lengths) >= self._window_end:
            self._window_end = max(text.lengths) + window
            self.search.begin_window()
        plan = self.search.propose(lambda count: closest_layers(self.target, text, count))
        if plan is not None:
            self.search.register(plan, self._matchness(text, plan, window))

    @torch.no_grad()
    def _matchness(self, text: Text, plan: LayerPlan, window: int) -> float:
        """Share of the last generated tokens that ``plan`` would have said after the text before them (SWIFT §4.1)."""
        ends = torch.tensor(text.lengths)[:, None]
        columns = (ends - 1 - window + torch.arange(window + 1)).to(text.ids.device)
        tokens = text.ids.gather(1, columns)
        said = self.target.step(tokens[:, :-1], text.roots(), plan, nodes=Nodes.again(window)).logits
        assert said is not None
        expected = tokens if self._chosen is None else self._chosen.ids.gather(1, columns)
        # In rows that ended early the window reaches into the prompt, which the model did not write.
        written = columns[:, 1:] >= text.prompt_width
        right = said.argmax(-1).to(tokens.device) == expected[:, 1:]
        return float((right & written).sum() / written.sum())


class _FirstChoices:
    """The full model's most probable token wherever one was drawn, which may be another.

    Attributes:
        ids: ``[b, columns]`` like the text's.
    """

    def __init__(self) -> None:
        self.ids = torch.empty(0)
        self._lengths: list[int] = []

    def add(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Takes in what the last verification said, ``[b, nodes, v]``, after its tokens were added to the text."""
        if not self._lengths:  # of the first token, which the prefill chose, only what was drawn is known
            self.ids = text.ids.clone()
            self._lengths = [text.prompt_width + 1] * text.batch_size
        missing = text.ids.shape[1] - self.ids.shape[1]
        if missing:
            self.ids = torch.cat([self.ids, text.ids[:, -missing:]], dim=1)
        chosen = logits.argmax(-1)
        for row, verdict in enumerate(verdicts):
            start, end = self._lengths[row], text.lengths[row]
            # Where all rows advance by the shortest acceptance, a verdict's first tokens are kept.
            sources = verdict.sources[: end - start]
            self.ids[row, start : start + len(sources)] = chosen[row, sources].to(self.ids.device)
        self._lengths = list(text.lengths)
