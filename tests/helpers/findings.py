"""What tests of findings that last share: calls, settings, and what the first draft of a call is made with."""

import warnings
from dataclasses import replace
from typing import Any

import torch

from helpers.searches import generated as generate
from helpers.searches import prompt
from hf_selfspec import OnTheFlySearch, SelfSpec

FILE = "selfspec.json"
LAYERS = 6

SEARCHES = {
    "begun": SelfSpec.swift(search=OnTheFlySearch(8, bayes_interval=4, target_matchness=1.0, budget=1.0)),
    "over": SelfSpec.swift(search=OnTheFlySearch(8, max_steps=3, target_matchness=1.0, budget=1.0)),
    "ratio given": SelfSpec.swift(0.3, OnTheFlySearch(8, max_steps=6, budget=1.0)),
}


def fresh(spec: SelfSpec, **changes: Any) -> SelfSpec:
    """The same settings, nothing learned."""
    return replace(spec, **changes)


def assert_lossless(model: Any, spec: SelfSpec, tokens: int = 12, rows: int = 1) -> None:
    ids = prompt(rows)
    assert torch.equal(generate(model, ids, tokens, assistant=spec), generate(model, ids, tokens))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert all("forward" not in module.__dict__ for module in inner.modules())


def begins_with(model: Any, spec: SelfSpec, rows: int = 1) -> tuple[Any, str]:
    """What a call drafts with before it has learned anything, and whether it goes on searching."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text is too short for a search
        generate(model, prompt(rows), 2, assistant=spec)
    assert spec.stats is not None
    return spec.choice(model), spec.stats.phase
