"""Whether sampled tokens have the distribution of plain ``generate``: a chi-squared test of the first few of them.

The probability of every continuation that is likely enough to be counted is computed exactly, by plain ``generate``
with all its processors and warpers, one token after each likely beginning at a time; the others are pooled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from scipy.special import chdtrc
from transformers import PreTrainedModel

# A cell counts by itself if this many draws are expected in it, as is usual for the chi-squared test.
_LEAST = 5.0
# Rows of a forward.
_ROWS = 64
Beginning = tuple[int, ...]


@dataclass(frozen=True)
class ChiSquared:
    """A test of counts, ``impossible`` ones being those of probability 0; the sum of two tests is their joint test."""

    statistic: float = 0.0
    degrees_of_freedom: int = 0
    draws: int = 0
    impossible: int = 0

    def __add__(self, other: ChiSquared) -> ChiSquared:
        return ChiSquared(*map(add, vars(self).values(), vars(other).values()))

    @property
    def p_value(self) -> float:
        """How often draws from the expected distribution differ as much; 0 if an impossible one was drawn."""
        if self.impossible:
            return 0.0
        return float(chdtrc(self.degrees_of_freedom, self.statistic)) if self.degrees_of_freedom else 1.0


@dataclass(frozen=True)
class Sampling:
    """How continuations of a prompt are sampled."""

    model: PreTrainedModel
    ids: torch.Tensor  # [1, s], the prompt
    steps: int  # the most tokens of a continuation
    draws: int
    options: dict[str, Any]  # of generate

    @property
    def ends(self) -> set[int]:
        config = self.model.generation_config
        eos = None if config is None else config.eos_token_id
        return {eos} if isinstance(eos, int) else set(eos or ())

    def expected(self) -> tuple[dict[Beginning, float], dict[Beginning, torch.Tensor]]:
        """The exact probabilities of all continuations that are expected to be drawn often enough, and those ``[v]`` of
        the next token after each beginning that was looked at."""
        alive: dict[Beginning, float] = {(): 1.0}
        cells: dict[Beginning, float] = {}
        next_shares: dict[Beginning, torch.Tensor] = {}
        for step in range(self.steps):
            following: dict[Beginning, float] = {}
            for begun, shares in self._next_tokens(list(alive)):
                next_shares[begun] = shares
                likely = (shares * alive[begun] * self.draws >= _LEAST).nonzero()[:, 0].tolist()
                following |= {(*begun, token): alive[begun] * float(shares[token]) for token in likely}
            ended = {begun for begun in following if step == self.steps - 1 or begun[-1] in self.ends}
            cells |= {begun: following[begun] for begun in ended}
            alive = {begun: share for begun, share in following.items() if begun not in ended}
        return cells, next_shares

    def _next_tokens(self, begun: list[Beginning]) -> Iterable[tuple[Beginning, torch.Tensor]]:
        """The probabilities ``[v]`` of the next token, by plain ``generate``, after beginnings of the same length."""
        for start in range(0, len(begun), _ROWS):
            batch = begun[start : start + _ROWS]
            after = torch.tensor(batch, dtype=self.ids.dtype, device=self.ids.device)
            rows = torch.cat([self.ids.expand(len(batch), -1), after], dim=1)
            returned = {"return_dict_in_generate": True, "output_scores": True}
            output = self._generate(rows, 1, assistant=False, **returned)
            yield from zip(batch, output.scores[0].double().softmax(-1).cpu(), strict=True)

    def _generate(self, ids: torch.Tensor, tokens: int, **options: Any) -> Any:
        mask = torch.ones_like(ids)
        return self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **self.options, **options)

    def draw(self, assistant: Any, after_call: Callable[[], None]) -> list[Beginning]:
        texts: list[Beginning] = []
        while len(texts) < self.draws:
            rows = min(_ROWS, self.draws - len(texts))
            output = self._generate(self.ids, self.steps, num_return_sequences=rows, assistant=assistant)
            after_call()
            for tokens in output[:, self.ids.shape[1] :].tolist():
                last = next((index for index, token in enumerate(tokens) if token in self.ends), len(tokens) - 1)
                texts.append(tuple(tokens[: last + 1]))
        return texts

    def test(self, assistant: Any, after_call: Callable[[], None]) -> ChiSquared:
        """Tests drawn continuations; those without a cell of their own are counted in one common cell."""
        cells, next_shares = self.expected()
        counts = Counter(self.draw(assistant, after_call))
        total = counts.total()

        def is_impossible(text: Beginning) -> bool:
            places = ((text[:index], token) for index, token in enumerate(text))
            return any(begun in next_shares and not next_shares[begun][token] for begun, token in places)

        impossible = sum(count for text, count in counts.items() if is_impossible(text))
        others = sum(count for text, count in counts.items() if text not in cells) - impossible
        pairs = sorted((share * total, counts[text]) for text, share in cells.items())
        left = max(0.0, total - sum(mean for mean, _ in pairs))
        pairs.insert(0, (left, others))
        # A common cell that is too small is merged with the smallest of the others.
        while len(pairs) > 1 and pairs[0][0] < _LEAST:
            (mean, count), (next_mean, next_count), *larger = pairs
            pairs = [(mean + next_mean, count + next_count), *larger]
        statistic = sum((count - mean) ** 2 / mean for mean, count in pairs)
        return ChiSquared(statistic, len(pairs) - 1, sum(count for _, count in pairs) + impossible, impossible)
