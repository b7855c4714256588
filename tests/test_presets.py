"""The papers' methods as settings, which ``SelfSpec`` and its subclasses inherit."""

import pytest

from hf_selfspec import AdaptiveThreshold, ConfidenceThreshold, EarlyExit, FixedLength, ProductThreshold, SelfSpec
from hf_selfspec.drafts import Cascade, Lookup, SkipLayers
from hf_selfspec.search.skip_search import OnTheFlySearch


@pytest.mark.parametrize("preset", [SelfSpec, type("Custom", (SelfSpec,), {})])
def test_a_preset_returns_the_class_that_it_was_called_on(preset: type[SelfSpec]) -> None:
    adaptive = AdaptiveThreshold(ProductThreshold(0.8))
    assert preset.layerskip(3, 14) == preset(EarlyExit(3), FixedLength(14), max_draft=14)
    assert preset().draft == Cascade((Lookup(),))
    assert preset.swift(0.4) == preset(SkipLayers(search=OnTheFlySearch(), ratio=0.4), ConfidenceThreshold())
    assert preset.adaspeed(3) == preset(EarlyExit(3), adaptive, max_draft=12)
