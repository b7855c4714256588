"""Verdicts of comparisons: what is called the fastest way, and whether it pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparing import DEMO
from conftest import tiny_llama
from transformers import AutoTokenizer

from hf_selfspec import SelfSpec, compare
from hf_selfspec.bench.comparison import results
from hf_selfspec.bench.comparison.protocol import Measured, ratios
from hf_selfspec.bench.comparison.tables import verdict


def condition(prompts: int = 12, **changed: Any) -> dict[str, Any]:
    """Two ways of which ours is faster."""

    def way(name: str, group: str, value: float, low: float | None, **more: Any) -> dict[str, Any]:
        means = {"value": value, "low": low, "high": None if low is None else value + 0.2}
        speed = {"value": 20 * value, "low": None, "high": None}
        equal = {"texts": 4, "equal": 4, "share": 1.0, "parted": []}
        found = {"name": name, "group": group, "call": f"assistant={name}", "whole": {"ratio_of_means": means}}
        found["is_lossless"] = True
        return found | {"output_token_throughput": speed, "equal_ids": equal} | more

    ours = {"value": 1.5, "low": 1.3} | changed
    ways = [way("plain", "plain", 1.0, None), way("SelfSpec()", "ours", ours.pop("value"), ours.pop("low"), **ours)]
    best = results._best(ways)
    return {
        "temperature": 0.0,
        "batch_size": 1,
        "prompts": prompts,
        "ways": ways,
        "best": best,
        "best_prompt_lookup": None,
    }


def test_verdicts() -> None:
    found = verdict(condition())
    assert found.headline == (
        "SelfSpec() is 1.50 times as fast as plain generate (95 % interval 1.30 to 1.70): 30.0 tokens per second "
        "instead of 20.0."
    )
    assert found.call == "assistant=SelfSpec()"
    assert found.details == ["The ids of SelfSpec() are plain generate's in 4 of 4 texts."]
    assert verdict(condition(low=0.9)).headline.startswith("No clear gain: the fastest, SelfSpec(), runs at 1.50 times")
    assert verdict(condition(value=0.8)).headline == "Nothing that was measured is faster than plain generate here."


def test_the_best_of_others_is_told_in_whole_sentences() -> None:
    slower = condition(value=0.8, low=0.7)
    assert verdict(slower).details[0] == (
        "The fastest SelfSpec, SelfSpec(), runs at 0.80 times the speed of plain generate."
    )


def test_other_text_than_the_models_is_never_the_best() -> None:
    parted = [{"prompt": 1, "row": 0, "position": 3, "margin": 0.5, "near_tie": False}]
    equal = {"texts": 4, "equal": 3, "share": 0.75, "parted": parted}
    wrong = condition(equal_ids=equal, is_lossless=False)
    assert wrong["best"] == "plain"
    found = verdict(wrong)
    assert found.headline == "No way that writes the model's own text is faster than plain generate here."
    assert found.call == ""
    assert found.details == [
        "SelfSpec() (1.50) does not count: it does not write the model's own text (the ids are the same in 3 of 4 "
        "texts)."
    ]
    drawn = verdict(condition(equal_ids=None, is_lossless=False))
    assert drawn.details == ["SelfSpec() (1.50) does not count: it does not write the model's own text."]
    tie = condition(equal_ids=equal | {"parted": [parted[0] | {"near_tie": True}]})
    assert "within rounding of the model's highest" in verdict(tie).details[-1]


def test_lossy_drafts_and_texts_that_part_are_not_lossless() -> None:
    """Also where nothing shows it: where tokens are drawn, or where the texts of a lossy draft are the same."""
    model, tokenizer = tiny_llama(vocabulary=4096), AutoTokenizer.from_pretrained(DEMO)
    methods = {"lossy": SelfSpec.early_exit_only(3), "free": SelfSpec.lookup()}
    texts = ["def read_text(path):", "class Stack:", "import os"]
    found = compare(model, tokenizer, texts, methods, max_new_tokens=8, temperature=[0, 0.7], progress=False)
    for one in found.results["conditions"]:
        assert {way["name"]: way["is_lossless"] for way in one["ways"]} == {"plain": True, "lossy": False, "free": True}
        assert one["best"] != "lossy"
    assert "lossy" in str(found)


@pytest.mark.parametrize(("count", "what"), [(1, "1 prompt counts"), (9, "9 prompts count")])
def test_no_gain_is_claimed_without_an_interval(count: int, what: str) -> None:
    found = verdict(condition(count, low=None))
    assert found.headline == (
        "Too few prompts to call it a gain: the fastest, SelfSpec(), runs at 1.50 times the speed of plain generate."
    )
    assert found.call == ""
    assert found.details[-1] == f"Only {what}, too few for an interval: give more."


def test_intervals_need_ten_prompts() -> None:
    """Those of fewer are too narrow."""
    speeds = np.arange(1.0, 11.0)
    for count in (9, 10):
        mine = Measured(1 / speeds[:count], np.ones(count))
        found = ratios(Measured(np.ones(count), np.ones(count)), mine)
        assert found is not None
        assert (found.ratio_of_means.low is None) == (count == 9)
