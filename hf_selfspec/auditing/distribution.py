"""Whether sampled tokens have the distribution of plain ``generate``: a chi-squared test of the first few of them.

The probability of every continuation that is likely enough to be counted is computed exactly, by plain ``generate``
with all its processors and warpers, one token after each likely beginning at a time; the others are pooled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

# A cell counts by itself if this many draws are expected in it, as is usual for the chi-squared test.
_LEAST = 5.0
# Rows of a forward.
_ROWS = 64
Beginning = tuple[int, ...]


@dataclass(frozen=True)
class ChiSquared:
    """A test of counts against their expectations; the sum of two is the test of both together.

    Attributes:
        statistic: Pearson's chi-squared statistic.
        freedom: degrees of freedom.
        draws: number of draws.
        impossible: number of draws of continuations whose probability is 0.
    """

    statistic: float = 0.0
    freedom: int = 0
    draws: int = 0
    impossible: int = 0

    @classmethod
    def of(cls, observed: Iterable[int], expected: Iterable[float], impossible: int) -> ChiSquared:
        """The test of the observed counts of all cells against the expected ones."""
        counts, means = list(observed), list(expected)
        statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, means, strict=True))
        return cls(statistic, len(counts) - 1, sum(counts) + impossible, impossible)

    def __add__(self, other: ChiSquared) -> ChiSquared:
        return ChiSquared(
            self.statistic + other.statistic,
            self.freedom + other.freedom,
            self.draws + other.draws,
            self.impossible + other.impossible,
        )

    @property
    def p_value(self) -> float:
        """How often draws from the expected distribution differ as much; 0 if an impossible one was drawn."""
        if self.impossible:
            return 0.0
        if not self.freedom:
            return 1.0
        half = torch.tensor([self.freedom, self.statistic], dtype=torch.float64, device="cpu") / 2
        return float(torch.special.gammaincc(half[0], half[1]))


@dataclass(frozen=True)
class Expected:
    """The exact probabilities of what may follow a prompt.

    Attributes:
        cells: probability of each likely continuation.
        known: for each beginning that was looked at, the probabilities ``[v]`` of its next token.
    """

    cells: dict[Beginning, float]
    known: dict[Beginning, torch.Tensor]

    @classmethod
    def of(
        cls, model: PreTrainedModel, ids: torch.Tensor, steps: int, draws: int, ends: frozenset[int], options: Any
    ) -> Expected:
        """Computes the probabilities of all continuations that are expected to be drawn often enough.

        Args:
            model: the model.
            ids: ``[1, s]`` the prompt.
            steps: tokens of a continuation.
            draws: number of draws to expect.
            ends: tokens that end a text.
            options: sampling options of ``generate``.
        """
        alive: dict[Beginning, float] = {(): 1.0}
        cells: dict[Beginning, float] = {}
        known: dict[Beginning, torch.Tensor] = {}
        for step in range(steps):
            following: dict[Beginning, float] = {}
            for begun, shares in _next_tokens(model, ids, list(alive), options):
                known[begun] = shares
                likely = (shares * alive[begun] * draws >= _LEAST).nonzero()[:, 0].tolist()
                following |= {(*begun, token): alive[begun] * float(shares[token]) for token in likely}
            ended = {begun for begun in following if step == steps - 1 or begun[-1] in ends}
            cells |= {begun: following[begun] for begun in ended}
            alive = {begun: share for begun, share in following.items() if begun not in ended}
        return cls(cells, known)

    def test(self, drawn: Iterable[Beginning]) -> ChiSquared:
        """Tests drawn continuations; those without a cell of their own are counted in one common cell."""
        counts = Counter(drawn)
        total = counts.total()
        impossible = sum(count for text, count in counts.items() if self._is_impossible(text))
        others = sum(count for text, count in counts.items() if text not in self.cells) - impossible
        pairs = sorted((share * total, counts[text]) for text, share in self.cells.items())
        left = max(0.0, total - sum(mean for mean, _ in pairs))
        pairs.insert(0, (left, others))
        # A common cell that is too small is merged with the smallest of the rest.
        while len(pairs) > 1 and pairs[0][0] < _LEAST:
            (mean, count), (next_mean, next_count), *rest = pairs
            pairs = [(mean + next_mean, count + next_count), *rest]
        return ChiSquared.of((count for _, count in pairs), (mean for mean, _ in pairs), impossible)

    def _is_impossible(self, text: Beginning) -> bool:
        places = ((text[:index], token) for index, token in enumerate(text))
        return any(begun in self.known and not self.known[begun][token] for begun, token in places)


def _next_tokens(
    model: PreTrainedModel, ids: torch.Tensor, begun: list[Beginning], options: Any
) -> Iterable[tuple[Beginning, torch.Tensor]]:
    """The probabilities ``[v]`` with which plain ``generate`` samples the next token of each of ``begun``.

    All beginnings have the same length.
    """
    for start in range(0, len(begun), _ROWS):
        some = begun[start : start + _ROWS]
        rows = torch.cat([ids.expand(len(some), -1), torch.tensor(some, dtype=ids.dtype, device=ids.device)], dim=1)
        output = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            **options,
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            assistant=False,
        )
        yield from zip(some, output.scores[0].double().softmax(-1).cpu(), strict=True)


def draw(
    model: PreTrainedModel,
    ids: torch.Tensor,
    steps: int,
    draws: int,
    ends: frozenset[int],
    options: Any,
    after_call: Callable[[], None],
) -> list[Beginning]:
    """Samples continuations of a prompt with ``options``, up to their end.

    Args:
        model, ids, steps, draws, ends: see :meth:`Expected.of`.
        options: options of ``generate``, including the assistant.
        after_call: called after each ``generate``.
    """
    found: list[Beginning] = []
    while len(found) < draws:
        rows = min(_ROWS, draws - len(found))
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **options,
            max_new_tokens=steps,
            num_return_sequences=rows,
        )
        after_call()
        found += [_until(ends, row) for row in output[:, ids.shape[1] :].tolist()]
    return found


def _until(ends: frozenset[int], tokens: list[int]) -> Beginning:
    """The tokens up to the first that ends a text."""
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tuple(tokens[: last + 1])
