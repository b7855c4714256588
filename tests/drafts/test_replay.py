"""The controller on known texts at known costs: never slower than nothing, and hardly slower than the best choice."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from helpers.replayed import TABLES, Replay, Stream
from hf_selfspec.drafts.controller import FREE, Controller

pytestmark = pytest.mark.times_decide

TOKENS = 2_000
# What a model predicts where it is as sure as for open text, and as text at a high temperature leaves it.
SURE, UNSURE = (0.45, 0.15, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01), (0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)


class Writer:
    """Writes text as a model would: after each pair of tokens one of eight likely ones, or any other."""

    def __init__(self, seed: int, vocabulary: int, shares: tuple[float, ...]) -> None:
        self.random, self.vocabulary, self.shares, self.seed = random.Random(seed), vocabulary, shares, seed

    def likely(self, text: list[int]) -> list[int]:
        return random.Random(hash((*text[-2:], self.seed))).sample(range(self.vocabulary), len(self.shares))

    def write(self, text: list[int], count: int, tops: list[tuple[list[int], list[float]]]) -> None:
        for _ in range(count):
            likely = self.likely(text)
            tops.append((likely, list(self.shares)))
            others = 1.0 - sum(self.shares)
            choices, weights = [*likely, self.random.randrange(self.vocabulary)], [*self.shares, others]
            text += self.random.choices(choices, weights)

    def repeat(self, text: list[int], count: int, tops: list[tuple[list[int], list[float]]]) -> None:
        """Writes what stands in the text already, some thirty tokens at a time."""
        while count > 0:
            start, length = self.random.randrange(len(text) - 40), min(self.random.randint(20, 40), count)
            for token in text[start : start + length]:
                tops.append(([token, *self.likely(text)[:7]], [0.8, *SURE[1:]]))
                text.append(token)
            count -= length


@cache
def stream(kind: str, count: int, seed: int) -> Stream:
    hot, usual = Writer(seed, 8192, UNSURE), Writer(seed, 150, SURE)
    text = [usual.random.randrange(150) for _ in range(60)]
    begun, tops = len(text), list[tuple[list[int], list[float]]]()
    pieces: dict[str, list[Callable[..., None]]] = {
        "nothing repeats": [hot.write],
        "open text": [usual.write],
        "repeats": [usual.repeat],
        "mixed": [usual.write, usual.repeat] * 5,
        "begins to repeat": [hot.write, usual.repeat],
        "ends to repeat": [usual.repeat, hot.write],
    }
    for write in pieces[kind]:
        write(text, count // len(pieces[kind]), tops)
    return Stream(text[:begun], text[begun:], tops)


KINDS = ("nothing repeats", "open text", "repeats", "mixed", "begins to repeat", "ends to repeat")


def always(monkeypatch: pytest.MonkeyPatch, arm: str) -> None:
    """Lets one arm draft in every round from now on, for comparison."""
    monkeypatch.setattr(Controller, "speedup", lambda self, name, promised=None: 2.0 * (name == arm))
    monkeypatch.setattr(Controller, "choose", lambda self, promised, free=0.0: arm if arm in promised else None)


@pytest.mark.every_run("EPYC-begins to repeat-8|Xeon-open text-1|bfloat16-repeats-8")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", TABLES)
def test_free_drafts(table: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [stream(kind, TOKENS if rows == 1 else TOKENS // 4, seed) for seed in range(rows)]
    ours = Replay(table).play(streams)
    always(monkeypatch, FREE)
    drafting = Replay(table).play(streams)
    assert ours >= 0.98
    # Rows that go on rest while others draft learn less of the text that they share.
    assert ours >= (0.97 if rows == 1 else 0.93) * drafting


# How often a source is right, and the share of the speed of drafting in every round that is reached.
RATES: dict[str, tuple[Callable[[int], float], float]] = {
    "bad": (lambda place: 0.1, 0.97),
    "good": (lambda place: 0.85, 0.97),
    "turns_good": (lambda place: 0.85 if place > TOKENS // 2 else 0.1, 0.97),
    "turns_bad": (lambda place: 0.1 if place > TOKENS // 2 else 0.85, 0.97),
    "hardly pays, then good": (lambda place: 0.9 if place > 300 else 0.55, 0.9),
}


@pytest.mark.every_run("Xeon-cascade-(good-None|turns_bad-3.0)|flat-alone-(turns_bad|hardly.*)-None")
@pytest.mark.parametrize("promised", [None, 3.0])
@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("free", [False, True], ids=["alone", "cascade"])
@pytest.mark.parametrize("table", ["Xeon", "flat"])
def test_drafts_of_layers(
    table: str, free: bool, kind: str, promised: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tokens for the price of 1.2, on text in which nothing repeats."""
    (rate, share), streams = RATES[kind], [stream("nothing repeats", TOKENS, 0)]
    source = ("layers", 4, rate, 1.2, promised)
    ours = Replay(table, sources=[source], free=free).play(streams)
    always(monkeypatch, "layers")
    drafting = Replay(table, sources=[source], free=free).play(streams)
    assert ours >= 0.98
    assert ours >= share * drafting


# How often each of 15 tokens is right, whether the first guess is that further tokens are dear, the mean width of
# drafts of 8 rows before a text's middle and behind it, and the share of the speed of whole ones that is reached.
WIDTHS: dict[str, tuple[Callable[[int], float], bool, tuple[float, float], tuple[float, float], float]] = {
    "sure": (lambda place: 0.98, False, (14.0, 15.0), (14.0, 15.0), 0.99),
    "unsure": (lambda place: 0.6, False, (3.0, 9.0), (3.0, 9.0), 1.03),
    "turns unsure": (lambda place: 0.6 if place > 150 else 0.98, False, (14.0, 15.0), (3.0, 9.0), 0.98),
    "turns sure": (lambda place: 0.98 if place > 150 else 0.6, False, (3.0, 9.0), (12.0, 15.0), 0.98),
    "dear at first": (lambda place: 0.8, True, (7.0, 15.0), (13.0, 15.0), 0.97),
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_blocks_are_verified_as_far_as_that_pays(kind: str) -> None:
    """By how often their tokens were right at each depth, and what rounds of each width took."""
    (rate, on_cpu, first, last, least), speeds = WIDTHS[kind], list[float]()
    for is_whole in (True, False):
        replay = Replay("flat", sources=[("block", 15, rate, 0.2, None)], free=False, on_cpu=on_cpu)
        replay.is_whole = is_whole
        speeds.append(replay.play([stream("nothing repeats", 300, seed) for seed in range(8)]))
        for (low, high), begin in ((first, 40), (last, 190)):
            widths = [width for place, width in replay.widths if begin <= place < begin + 60]
            assert low <= sum(widths) / len(widths) <= high or not is_whole, replay.widths
    assert speeds[0] >= least * speeds[1], speeds


@pytest.mark.parametrize(
    "sources",
    [
        {"slow": (0.95, 3.0), "fast": (0.7, 1.2)},
        {"slow": (0.95, 3.0), "slower": (0.97, 4.0), "fast": (0.6, 1.1), "bad": (0.1, 2.0)},
        {"bad": (0.1, 1.2), "worse": (0.3, 2.0)},
    ],
    ids=", ".join,
)
def test_the_fastest_source_drafts(sources: dict[str, tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """By how often each of four tokens is right, and their price."""
    given = [(name, 4, lambda _, right=right: right, price, None) for name, (right, price) in sources.items()]
    streams, best = [stream("nothing repeats", TOKENS, 0)], 1.0
    ours = Replay("flat", sources=given).play(streams)
    for name in sources:
        always(monkeypatch, name)
        best = max(best, Replay("flat", sources=given).play(streams))
    assert ours >= 0.95 * best


def test_promises_are_believed_until_tried() -> None:
    """One that is too dear is tried again some time, whatever disturbed the round that was timed."""
    streams = [stream("nothing repeats", TOKENS, 0)]

    def good(price: float, promised: float) -> tuple[str, int, Callable[[int], float], float, float]:
        return "one", 4, lambda place: 0.85, price, promised

    for promised in (0.0, 0.5):
        speeds = [Replay("flat", sources=of, free=False).play(streams) for of in ((), [good(1.2, promised)])]
        assert speeds[0] == speeds[1]
    replay = Replay("flat", sources=[good(10.0, 5.0)], free=False)
    assert replay.play(streams) >= 0.98
    replay.sources = [good(1.2, 5.0)]
    replay.play(streams)
    assert replay.play(streams) > 1.5


@pytest.mark.every_run("EPYC-repeats-3.6|bfloat16-mixed-1.4|EPYC-mixed-silent")
@pytest.mark.parametrize(
    "draft", [(4, 0.6, 1.4), (4, 0.93, 2.8), (4, 0.95, 3.6), (0, 0.0, 3.0)], ids=["1.4", "2.8", "3.6", "silent"]
)
@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("table", ["EPYC", "bfloat16"])
def test_dear_drafts_take_nothing_from_free_ones(table: str, kind: str, draft: tuple[int, float, float]) -> None:
    """Four tokens, as of a model whose head is most of its weights, or none; how often they are right, and a price."""
    (length, right, price), streams = draft, [stream(kind, 600, seed) for seed in range(3)]
    seconds = []
    for sources in ((), [("layers", length, lambda place: right, price, None)]):
        replay = Replay(table, sources=sources)
        seconds.append(sum(1.0 / replay.play([one]) for one in streams))
    assert seconds[1] <= seconds[0] / 0.95  # a source that was never timed takes two rounds


@pytest.mark.every_run("EPYC-repeats|flat-mixed")
@pytest.mark.parametrize("kind", ["repeats", "mixed"])
@pytest.mark.parametrize("table", TABLES)
def test_wrong_first_prices_are_found(table: str, kind: str) -> None:
    """After 20 rounds as fast as with prices that were measured before."""
    replay, streams = Replay(table, on_cpu=table == "flat"), [stream(kind, TOKENS, 0)]
    speeds = []
    for _ in range(2):
        replay.texts.forget()
        replay.play(streams)
        tokens, seconds = replay.timeline[20]
        speeds.append((replay.timeline[-1][0] - tokens) / (replay.timeline[-1][1] - seconds))
    assert speeds[0] >= 0.95 * speeds[1]


@pytest.mark.every_run("EPYC-2-free drafts|flat-3-layers")
@pytest.mark.parametrize("free", [False, True], ids=["layers", "free drafts"])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("table", ["EPYC", "flat"])
def test_one_disturbed_round_decides_nothing(table: str, number: int, free: bool) -> None:
    """Whatever kept the machine busy in one of the first rounds, what nothing costs is timed again."""
    replay = Replay(table, sources=() if free else [("layers", 4, lambda place: 0.1, 1.2, None)], free=free)
    for disturbed, least in (({number: 1.0}, 0.97), ({}, 0.98)):
        replay.disturbed = disturbed
        assert replay.play([stream("nothing repeats", TOKENS, 0)]) >= least


@pytest.mark.parametrize("rows", [1, 8])
def test_a_short_first_call_of_a_small_model(rows: int) -> None:
    """Planning and learning take a quarter of a round, which is noticed before twelve of them."""
    streams = [stream("nothing repeats", 48, seed) for seed in range(rows)]
    assert Replay("EPYC", awake=0.25).play(streams) >= 0.975


@pytest.mark.parametrize("table", TABLES)
def test_batches_after_single_rows(table: str) -> None:
    """What one row costs says little of eight, and eight little of one."""
    replay = Replay(table)
    one, *eight = (stream("nothing repeats", TOKENS // 4, seed) for seed in range(9))
    replay.play([one])
    assert replay.play(eight) >= 0.98
    assert replay.play([one]) >= 0.98


@pytest.mark.parametrize(("table", "rows"), [("Xeon", 4), ("flat", 8)])
def test_a_batch_takes_as_long_as_its_last_row(table: str, rows: int) -> None:
    """What the other rows gain is worth little where it makes each round longer."""
    streams = [stream("mixed" if seed else "nothing repeats", 96, seed) for seed in range(rows)]
    assert Replay(table).play(streams) >= 0.98


@pytest.mark.parametrize("count", [30, 47, 60])
@pytest.mark.parametrize("table", ["EPYC", "Xeon", "bfloat16"])
def test_short_calls_end_as_fast_as_they_go(table: str, count: int) -> None:
    """The pace of the longest drafts is out of reach for the last tokens, which shorter ones still make faster."""
    replay, circle = Replay(table), list(range(20))
    new = (3 * circle)[:count]
    calls = [replay.play([Stream(3 * circle, new, [([token], [0.95]) for token in new])]) for _ in range(8)]
    assert min(calls[2:]) > 0.8 * max(calls)
