"""The papers' methods as settings, which ``SelfSpec`` and its subclasses inherit."""

import pytest

from hf_selfspec import AdaptiveThreshold, ConfidenceThreshold, EarlyExit, FixedLength, ProductThreshold, SelfSpec
from hf_selfspec.draft import EarlyExitOnly, SkipLayers
from hf_selfspec.search.proposers import OnTheFlySearch


@pytest.mark.parametrize("kind", [SelfSpec, type("Custom", (SelfSpec,), {})])
def test_a_preset_returns_the_class_that_it_was_called_on(kind: type[SelfSpec]) -> None:
    adaptive = AdaptiveThreshold(ProductThreshold(0.8))
    assert kind.layerskip(3, 14) == kind(EarlyExit(3), FixedLength(14), max_draft=14)
    assert kind.swift(0.4) == kind(SkipLayers(search=OnTheFlySearch(), ratio=0.4), ConfidenceThreshold())
    assert kind.adaspeed(3) == kind(EarlyExit(3), adaptive, max_draft=12)
    assert kind.early_exit_only(3) == kind(EarlyExitOnly(3))
