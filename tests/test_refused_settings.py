"""What no setting can be is refused by name where it is set: what was given, what is allowed, what to do."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_selfspec import (
    AdaptiveThreshold,
    CalibratedEntropy,
    Cascade,
    ConfidenceThreshold,
    DraftSource,
    EarlyExit,
    FixedLength,
    Lookup,
    OfflineSearch,
    OnTheFlySearch,
    SelfSpec,
    SelfSpecError,
    SettingError,
    SettingTypeError,
    SkipLayers,
    TopKTree,
)


@dataclass(frozen=True)
class Listed(DraftSource):
    fixed_because = "Listed drafts what is in its list"


# What no setting can be, with what the message has to name: the setting, what is allowed and what was given.
SETTINGS: list[tuple[Callable[[], Any], type[SelfSpecError], tuple[str, ...]]] = [
    (lambda: EarlyExit(0), SettingError, ("EarlyExit(layer)", "at least 1", "got 0")),
    (lambda: EarlyExit(10**12), SettingError, ("EarlyExit(layer)", "at most 4096", "got 1000000000000")),
    (lambda: SkipLayers(attention=[0]), SettingError, ("SkipLayers(attention=[0])", "layer 0 is never skipped")),
    (lambda: SkipLayers(ratio=0.4), SettingError, ("search=OnTheFlySearch",)),
    (lambda: SelfSpec.swift(ratio=1.0), SettingError, ("SkipLayers(ratio) must lie between 0 and 1",)),
    (lambda: SelfSpec.swift(search=32), SettingTypeError, ("OnTheFlySearch() or None, got 32",)),
    (lambda: OfflineSearch(0), SettingError, ("OfflineSearch(max_steps) must be at least 1",)),
    (lambda: OnTheFlySearch(budget=0.0), SettingError, ("OnTheFlySearch(budget) must",)),
    (lambda: ConfidenceThreshold(1), SettingError, ("ConfidenceThreshold(threshold)", "excluded", "got 1")),
    (lambda: ConfidenceThreshold(math.nan), SettingError, ("must lie between 0 and 1 (both excluded), got nan",)),
    (lambda: FixedLength(0), SettingError, ("FixedLength(num_tokens) must be at least 1, got 0",)),
    (lambda: CalibratedEntropy(1.0), SettingError, ("CalibratedEntropy(epsilon) must lie between 0 and 1",)),
    (lambda: SelfSpec.adaspeed(probe=0.5), SettingTypeError, ("ProductThreshold(confidence) must be a function",)),
    (lambda: AdaptiveThreshold(FixedLength(3)), SettingTypeError, ("AdaptiveThreshold(rule) must be",)),
    (lambda: AdaptiveThreshold(rate_memory=-0.1), SettingError, ("AdaptiveThreshold(rate_memory) must lie",)),
    (lambda: TopKTree(((0.8, 2), (0.5, 3), (1.0, 1))), SettingError, ("rise from above 0 to 1, got [0.8, 0.5, 1.0]",)),
    (lambda: TopKTree([(1.0, 3)]), SettingError, ("must be a tuple of (confidence, k) pairs",)),
    (lambda: TopKTree(((1.0, 0),)), SettingError, ("k must be at least 1, got 0",)),
    (lambda: TopKTree(((1.0, True),)), SettingTypeError, ("k must be a whole number of at least 1, got ",)),
    (lambda: Lookup(-1), SettingError, ("Lookup(stored_tokens) must be at least 0, got -1",)),
    (lambda: SelfSpec.lookup(1 << 30), SettingError, ("Lookup(stored_tokens) must be at most 1048576",)),
    (lambda: Lookup(2.0), SettingTypeError, ("Lookup(stored_tokens) must be a whole number",)),
    (lambda: Lookup(max_nodes=0), SettingError, ("Lookup(max_nodes) must be at least 1",)),
    (lambda: Lookup(max_nodes=32), SettingError, ("Lookup(max_nodes) must be at most 31",)),
    (lambda: SelfSpec(draft="exit"), SettingTypeError, ("SelfSpec(draft)", "EarlyExit(layer)", "'exit'")),
    (lambda: SelfSpec(stop=FixedLength), SettingTypeError, ("SelfSpec(stop) must be FixedLength(n), Confidence",)),
    (lambda: SelfSpec(tree=3), SettingTypeError, ("SelfSpec(tree)", "TopKTree or None", "3")),
    (lambda: SelfSpec(max_draft=0), SettingError, ("SelfSpec(max_draft)", "at least 1", "got 0")),
    (lambda: SelfSpec.layerskip(6, 2, FixedLength(2)), SettingError, ("give one of the two",)),
    (lambda: SelfSpec.layerskip(6, 2, max_draft="12"), SettingTypeError, ("(max_draft) must be a whole number",)),
    (lambda: Cascade([Listed()]), SettingError, ("Cascade(sources)",)),
    (lambda: Cascade([Lookup(), Lookup(5)]), SettingError, ("Cascade(sources)",)),
    (lambda: Cascade([Lookup(), EarlyExit(3), EarlyExit(3)]), SettingError, ("one Lookup and different others",)),
    (lambda: Cascade([Lookup(), Cascade([Lookup()])]), SettingError, ("Cascade(sources)",)),
    (
        lambda: Cascade([Lookup(), PromptLookupCandidateGenerator(max_length=9)]),
        SettingTypeError,
        ("Cascade(sources)",),
    ),
    (lambda: Cascade([]), SettingTypeError, ("Cascade(sources)",)),
    (lambda: Cascade(None), SettingTypeError, ("Cascade(sources)",)),
    *(
        (lambda make=make, number=number: make(number), SettingError, (words,))
        for number in (1025, 10**5000)
        for make, words in (
            (lambda number: SelfSpec.layerskip(max_draft=number), "layerskip(max_draft) must be at most 1024"),
            (FixedLength, "FixedLength(num_tokens) must be at most 1024"),
        )
    ),
    *(
        (lambda task=task: SelfSpec(cache_dir="cache", task=task), SettingError, ("(task) names a file: give letters",))
        for task in ("", "../a", "a" * 51, 3)
    ),
    (
        lambda: SelfSpec(graphs="inductor"),
        SettingTypeError,
        ("SelfSpec(graphs) must be True or False, got 'inductor'",),
    ),
    (lambda: SelfSpec(exact=1), SettingTypeError, ("SelfSpec(exact) must be True or False, got 1",)),
    (lambda: SelfSpec.kangaroo(5), SettingTypeError, ("must be Adapter or the path of a saved one",)),
    # What would have no effect.
    (
        lambda: SelfSpec(Listed(), FixedLength(3)),
        SettingError,
        ("SelfSpec(stop=", "no effect here: Listed drafts what"),
    ),
    (lambda: SelfSpec(Lookup(), FixedLength(3)), SettingError, ("SelfSpec(stop=", "no effect here: Lookup drafts")),
    (
        lambda: SelfSpec(PromptLookupCandidateGenerator(max_length=9), tree=TopKTree()),
        SettingError,
        ("tree=", "Generator drafts as many tokens as it ret"),
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), SETTINGS)
def test_what_is_refused(make: Callable[[], Any], error: type[SelfSpecError], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
