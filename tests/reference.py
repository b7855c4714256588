"""Speculative decoding with a line of drafted tokens, as on a whiteboard: what ``Decoder`` does, without its machinery.

A model is a function from tokens to the distributions ``p(next token)`` after each of them. Greedy decoding is the case
in which all probabilities are 0 or 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Distribution = Sequence[float]
Model = Callable[[Sequence[int]], Sequence[Distribution]]
Draw = Callable[[Distribution], int]
Result = TypeVar("Result")


def generate(target: Model, draft: Model, tokens: list[int], count: int, length: int, draw: Draw) -> list[bool]:
    """Appends ``count`` tokens distributed as the target's own, and tells of each whether it was drafted.

    Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1, with drafts of ``length`` tokens.
    """
    end = len(tokens) + count
    tokens.append(draw(target(tokens)[-1]))
    from_draft = [False]
    while len(tokens) < end:
        drafted: list[int] = []
        qs: list[Distribution] = []
        for _ in range(min(length, end - len(tokens) - 1)):  # verification adds one token itself
            qs.append(draft(tokens + drafted)[-1])
            drafted.append(draw(qs[-1]))
        *ps, p_after = target(tokens + drafted)[len(tokens) - 1 :]  # one forward for all of them
        for token, p, q in zip(drafted, ps, qs, strict=True):
            accepted = min(1.0, p[token] / q[token])
            if not draw([1.0 - accepted, accepted]):
                # The rest of p, so that each token x comes with min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x).
                p_after = [max(0.0, p_x - q_x) for p_x, q_x in zip(p, q, strict=True)]
                break
            tokens.append(token)
            from_draft.append(True)
        tokens.append(draw(p_after))
        from_draft.append(False)
    return from_draft


def outcomes(run: Callable[[Draw], Result]) -> Iterator[tuple[Result, float]]:
    """Every result of a function that draws, with its probability: all that could be drawn is drawn in turn."""
    untried: list[list[int]] = [[]]
    while untried:
        told, drawn, chances = untried.pop(), list[int](), list[float]()

        def draw(weights: Distribution, told=told, drawn=drawn, chances=chances) -> int:
            possible = [index for index, weight in enumerate(weights) if weight > 0.0]
            if len(drawn) == len(told):
                untried.extend([*drawn, other] for other in possible[1:])
                told.append(possible[0])
            drawn.append(told[len(drawn)])
            chances.append(weights[drawn[-1]] / sum(weights))
            return drawn[-1]

        yield run(draw), math.prod(chances)
