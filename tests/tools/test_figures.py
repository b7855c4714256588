"""Figures of what a ``SelfSpec`` did."""

import sys
from pathlib import Path

import pytest
import torch

from helpers.models import tiny_llama
from hf_selfspec import GenerationStats, OnTheFlySearch, SelfSpec, SelfSpecError, SkipLayers
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.skip_search import SkipSearch, SkipSpace
from hf_selfspec.tools import figures


def test_sets_are_drawn_at_their_steps() -> None:
    """From the step at which a set was found to the next one's, or the last step; attention below the MLP."""
    space = SkipSpace(8, tuple((layer, name) for layer in range(1, 7) for name in ("attention", "mlp")))
    start = LayerPlan(8, frozenset([1]), frozenset([1, 2]))
    better = LayerPlan(8, frozenset([3]), frozenset([2]))
    search = SkipSearch(OnTheFlySearch(), space, 0.2, start)
    for plan, matchness in ((start, 0.3), (start, 0.3), (better, 0.9), (start, 0.2), (better, 0.8)):
        search.register(plan, matchness)
    axes = figures.plot([GenerationStats(tokens=5, total_seconds=1.0, timeline=[(5, 1.0)])], search).axes[0]
    boxes = [path.vertices for bars in axes.collections for path in bars.get_paths()]
    drawn = {(*box.min(0).round(2).tolist(), *box.max(0).round(2).tolist()) for box in boxes}
    assert drawn == {(0, 1, 3, 1.4), (0, 1.45, 3, 1.85), (0, 2.45, 3, 2.85), (3, 2.45, 5, 2.85), (3, 3, 5, 3.4)}
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 5), (0, 8))


def test_a_search_is_drawn(tmp_path: Path) -> None:
    model, spec = tiny_llama(6, factor=0.6), SelfSpec(SkipLayers(search=OnTheFlySearch(8, budget=1.0), ratio=0.4))
    model.generate(torch.tensor([[3, 5, 2]]), max_new_tokens=40, do_sample=False, pad_token_id=0, assistant=spec)
    sets, speed, time, matchness = spec.plot(tmp_path / "search.png").axes
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    assert (sets.get_ylabel(), speed.get_ylabel(), time.get_xlabel()) == ("layer", "tokens per second", "share of time")
    assert sets.collections
    assert len(matchness.lines[0].get_ydata()) > 0


def test_speed_and_time_by_hand() -> None:
    """Tokens per second over 64 tokens or what is left of a call, and the shares of the parts of all calls."""
    times = {"prefill_seconds": 1.0, "draft_seconds": 2.0, "verify_seconds": 4.0, "search_seconds": 1.0}
    first = GenerationStats(tokens=100, **times, total_seconds=10.0, timeline=[(30, 3.0), (70, 7.0), (99, 9.5)])
    second = GenerationStats(tokens=10, verify_seconds=2.0, total_seconds=10.0, timeline=[(10, 9.0)])
    speed, time = figures.plot([first, second], None).axes
    assert list(speed.lines[0].get_xdata()) == [70, 100, 110]
    assert list(speed.lines[0].get_ydata()) == pytest.approx([10.0, 10.0, 1.0])
    assert [label.get_text() for label in time.get_yticklabels()] == ["prefill", "draft", "verify", "search", "other"]
    assert [bar.get_width() for bar in time.patches] == pytest.approx([0.05, 0.1, 0.3, 0.05, 0.5])


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SelfSpecError, match="nothing to draw yet: generate something"):
        SelfSpec().plot(tmp_path / "a.png")
    with pytest.raises(SelfSpecError, match="'doc' is not supported"):
        figures.plot([GenerationStats()], None, tmp_path / "a.doc")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SelfSpecError, match=r"SelfSpec\.plot draws with matplotlib.*pip install matplotlib"):
        figures.plot([GenerationStats()], None)
