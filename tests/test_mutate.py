"""The tool that breaks files line by line."""

from __future__ import annotations

import pytest

from helpers.mutate import mutants

SOURCE = '''
@decorated(1)
def f(a: int = 3, *, b: bool = True) -> int:
    """Has 7 words."""
    if a < 2 and not b:
        raise ValueError(5)
    call(a)
    return -a + 1
'''


def test_each_mutant_differs_in_one_line() -> None:
    found = [(line, before, after) for line, before, after, _ in mutants(SOURCE)]
    assert {line for line, _, _ in found} == {3, 5, 7, 8}
    assert ("if a < 2 and (not b):", "if a <= 2 and (not b):") in [changed[1:] for changed in found]
    assert ("call(a)", "None") in [changed[1:] for changed in found]
    texts = [text for *_, text in mutants(SOURCE)]
    assert len(set(texts)) == len(texts) == 11
    for text in texts:
        compile(text, "mutant", "exec")


@pytest.mark.parametrize("kept", ["@decorated(1)", "a: int", "-> int", "raise ValueError(5)", "Has 7 words."])
def test_what_no_behaviour_follows_from_is_kept(kept: str) -> None:
    assert all(kept in text for *_, text in mutants(SOURCE))
