"""Pictures of what a ``SelfSpec`` did."""

import sys
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes

from helpers.models import tiny_llama
from hf_selfspec import GenerationStats, OnTheFlySearch, SelfSpec, SkipLayers
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.skip_search import SkipSearch
from hf_selfspec.search.skip_space import SkipSpace
from hf_selfspec.tools import figures as pictures

LAYERS = 8

pytestmark = pytest.mark.usefixtures("no_grad")


def spans(axes: Axes) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """For each layer and block the spans of steps in which it is drawn as skipped."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
            layer = int(low)
            name = "attention" if low - layer < 0.2 else "mlp"
            assert high - low == pytest.approx(0.4)
            assert high < layer + 1
            found.setdefault((layer, name), []).append((float(left), float(right)))
    return found


def test_sets_are_drawn_at_their_steps() -> None:
    """From the step at which a set was found to the next one's, or the last step."""
    space = SkipSpace(LAYERS, tuple((layer, name) for layer in range(1, 7) for name in ("attention", "mlp")))
    start = LayerPlan(LAYERS, frozenset([1]), frozenset([1, 2]))
    better = LayerPlan(LAYERS, frozenset([3]), frozenset([2]))
    search = SkipSearch(OnTheFlySearch(), space, 0.2, start)
    for plan, matchness in ((start, 0.3), (start, 0.3), (better, 0.9), (start, 0.2), (better, 0.8)):
        search.register(plan, matchness)
    assert list(search.best_sets) == [(0, start), (3, better)]
    figure = pictures.plot([GenerationStats(tokens=5, total_seconds=1.0, timeline=[(5, 1.0)])], search)
    axes = figure.axes[0]
    assert spans(axes) == {
        (1, "attention"): [(0.0, 3.0)],
        (1, "mlp"): [(0.0, 3.0)],
        (2, "mlp"): [(0.0, 3.0), (3.0, 5.0)],
        (3, "attention"): [(3.0, 5.0)],
    }
    assert axes.get_ylim() == (0, LAYERS)
    assert axes.get_xlim() == (0, 5)


def test_a_search_is_drawn(tmp_path: Path) -> None:
    model, spec = tiny_llama(6, factor=0.6), SelfSpec(SkipLayers(search=OnTheFlySearch(8, budget=1.0), ratio=0.4))
    model.generate(torch.tensor([[3, 5, 2]]), max_new_tokens=40, do_sample=False, pad_token_id=0, assistant=spec)
    figure = spec.plot(tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    sets, speed, time, matchness = figure.axes
    assert (sets.get_ylabel(), speed.get_ylabel(), time.get_xlabel()) == ("layer", "tokens per second", "share of time")
    assert sets.collections
    (points,) = matchness.lines
    assert len(points.get_ydata()) > 0
    with pytest.raises(SettingTypeError, match=r"SelfSpec\.plot takes a causal LM"):
        spec.plot(model="llama")


def test_speed_and_time_by_hand() -> None:
    """Tokens per second over 64 tokens or what is left of a call, and the shares of the parts of all calls."""
    first = GenerationStats(
        tokens=100, prefill_seconds=1.0, draft_seconds=2.0, verify_seconds=4.0, search_seconds=1.0, total_seconds=10.0
    )
    first.timeline = [(30, 3.0), (70, 7.0), (99, 9.5)]
    second = GenerationStats(tokens=10, verify_seconds=2.0, total_seconds=10.0, timeline=[(10, 9.0)])
    speed, time = pictures.plot([first, second], None).axes
    (line,) = speed.lines
    assert list(line.get_xdata()) == [70, 100, 110]
    assert list(line.get_ydata()) == pytest.approx([10.0, 10.0, 1.0])
    assert [label.get_text() for label in time.get_yticklabels()] == ["prefill", "draft", "verify", "search", "other"]
    assert [bar.get_width() for bar in time.patches] == pytest.approx([0.05, 0.1, 0.3, 0.05, 0.5])


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="nothing to draw yet: generate something"):
        SelfSpec().plot(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
    figure = pictures.new_figure("SelfSpec.plot", 4, 3)
    with pytest.raises(SettingError, match="'doc' is not supported"):
        pictures.saved("SelfSpec.plot", figure, tmp_path / "a.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match=r"SelfSpec\.plot draws with matplotlib.*pip install matplotlib"):
        pictures.plot([GenerationStats()], None)
