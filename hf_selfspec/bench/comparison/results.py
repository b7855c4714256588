"""What was measured, in the form of the file ``results.json``, which ``results.schema.json`` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from .acceptance import acceptance
from .calls import Call
from .journal import Journal
from .protocol import Estimate, Measured, Ratios, mean_speed, ratios
from .settings import Settings
from .stream import FRESH, Part
from .ways import LOOKUP_GROUP, PLAIN, LeftOut, Way

SCHEMA_VERSION = 1
# A text loops if more than this share of its tokens repeats earlier ones.
LOOPS = 0.3
Json = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """The calls of one condition.

    Attributes:
        part: what is measured under the condition.
        calls: calls of the pass that counts, by way, in the order of the stream.
        counted: indices of the prompts that count: all but those where a process called a way for the first time, and
            the first if there was one pass, since kernels and graphs are not ready yet in these calls.
        fresh: calls with a new ``SelfSpec``, by way.
        journal: all calls, and the places where texts differ.
        clock: clock of the main figures.
    """

    part: Part
    calls: Mapping[str, Sequence[Call]]
    counted: Sequence[int]
    fresh: Mapping[str, Sequence[Call]]
    journal: Journal
    clock: str

    @classmethod
    def of(cls, part: Part, journal: Journal, settings: Settings, clock: str) -> Told:
        """Collects the calls of ``journal`` under one condition."""
        turn, places = settings.passes - 1, range(len(part.batches))
        known = [p for p in places if all((way.name, part.index, turn, p) in journal.calls for way in part.ways)]
        calls = {way.name: [journal.calls[way.name, part.index, turn, p] for p in known] for way in part.ways}
        first = 1 if settings.passes == 1 and len(known) > 1 else 0
        fresh = {
            way.name: [
                c for c in journal.calls.values() if (c.way, c.condition, c.turn) == (way.name, part.index, FRESH)
            ]
            for way in part.ways
        }
        return cls(part, calls, _warm(known[first:], calls), fresh, journal, clock)

    def graphs(self, name: str) -> list[int]:
        """The number of graphs compiled in each call of a way, in all passes."""
        of_part = (call for call in self.journal.calls.values() if call.condition == self.part.index)
        return [call.graphs for call in of_part if call.way == name]

    def of_way(self, name: str, wanted: Callable[[Call], bool] = lambda plain: True) -> list[Call]:
        """The counted calls of a way, on prompts for whose call of plain generate ``wanted`` is true."""
        return [
            call
            for call, plain in zip(self.calls[name], self.calls[PLAIN], strict=True)
            if call.prompt in self.counted and wanted(plain)
        ]


def results(
    about: Mapping[str, Any],
    settings: Settings,
    parts: Sequence[Part],
    left_out: Sequence[LeftOut],
    journal: Journal,
    costs: Json | None,
    clock: str,
) -> Json:
    """Returns all results as plain numbers, lists and dicts.

    Args:
        about: model, machine, versions and prompts.
        settings: the settings of the comparison.
        parts: what was measured, by condition.
        left_out: ways that were not measured.
        journal: the calls.
        costs: costs of forwards over several tokens, ``None`` if they were not measured.
        clock: clock of the main figures, ``wall`` or ``cpu``.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "about": dict(about),
        "settings": {**settings.as_json(), "clock": clock},
        "left_out": [asdict(one) for one in left_out],
        "conditions": [_condition(Told.of(part, journal, settings, clock)) for part in parts],
        "verify_cost": costs,
    }


def _warm(places: Sequence[int], calls: Mapping[str, Sequence[Call]]) -> Sequence[int]:
    """The prompts without a first call of a process; all prompts if none is left."""
    cold = {call.prompt for of_way in calls.values() for call in of_way if call.in_process == 0}
    return [place for place in places if place not in cold] or places


def _condition(told: Told) -> Json:
    ways = [_way(told, way) for way in told.part.ways] if told.counted else []
    plain = told.of_way(PLAIN)
    return {
        "temperature": told.part.condition.temperature,
        "batch_size": told.part.condition.batch_size,
        "prompts": len(told.counted),
        "kinds": _counts([call.kind for call in plain]),
        "input_sequence_length": _mean([length for call in plain for length in call.prompt_tokens]),
        "ways": ways,
        "best": _best(ways),
        "best_prompt_lookup": _best([way for way in ways if way["group"] == LOOKUP_GROUP]),
    }


def _best(ways: Sequence[Json]) -> str | None:
    """The way whose whole calls are fastest, of those that write the model's own text."""
    known = [way for way in ways if way["whole"] is not None and way["is_lossless"]]
    found: str | None = max(known, key=lambda way: way["whole"]["ratio_of_means"]["value"])["name"] if known else None
    return found


def _way(told: Told, way: Way) -> Json:
    calls = told.of_way(way.name)
    kept = acceptance(calls)
    graphs = told.graphs(way.name)
    equal = _equal(told, way, calls)
    return {
        "name": way.name,
        "group": way.group,
        "call": way.call,
        "whole": _ratios(told, way.name, Measured.whole),
        "decode": _ratios(told, way.name, Measured.decoding),
        "whole_wall": _ratios(told, way.name, Measured.whole, clock="wall"),
        "whole_cpu": _ratios(told, way.name, Measured.whole, clock="cpu"),
        "by_kind": _by(told, way.name, lambda call: call.kind),
        "by_looping": _by(told, way.name, lambda call: "texts that loop" if call.looping > LOOPS else "other texts"),
        **_speeds(told, calls),
        "acceptance": None if kept is None else asdict(kept),
        "equal_ids": equal,
        "is_lossless": way.is_lossless and all(one["near_tie"] for one in (equal or {}).get("parted", ())),
        "first_call": _first_call(told, way.name),
        "fresh_calls": _fresh(told, way.name),
        "compiled_graphs": sum(graphs),
        "calls_with_compiling": sum(count > 0 for count in graphs),
        "left_to_generate": sum(bool(call.left_to_generate) for call in calls),
        "peak_memory_bytes": _peak(told, way, calls),
    }


def _peak(told: Told, way: Way, calls: Sequence[Call]) -> int | None:
    """Peak memory of the device, or of a process of its own; ``None`` where neither was measured."""
    alone = told.journal.peaks.get((way.name, told.part.index))
    return max((call.peak_memory for call in calls if call.peak_memory is not None), default=alone)


def _speeds(told: Told, calls: Sequence[Call]) -> Json:
    """Throughput and latencies, under AIPerf's names; seconds of the main clock."""
    clock = told.clock
    speed = mean_speed(Measured.whole(calls, clock))
    decoding = [call.decoding(clock) / (call.decoded / len(call.ids)) for call in calls if call.decoded > 0]
    return {
        "output_token_throughput": None if speed is None else asdict(speed),
        "time_to_first_token": _mean([call.seconds(clock) - call.decoding(clock) for call in calls]),
        "inter_token_latency": _mean(decoding),
        "request_latency": _mean([call.seconds(clock) for call in calls]),
        "output_sequence_length": _mean([len(row) for call in calls for row in call.ids]),
    }


def _ratios(
    told: Told,
    name: str,
    measured: Callable[[Sequence[Call], str], Measured],
    wanted: Callable[[Call], bool] = lambda plain: True,
    clock: str | None = None,
) -> Json | None:
    plain, way = (measured(told.of_way(one, wanted), clock or told.clock) for one in (PLAIN, name))
    found = ratios(plain, way)
    return None if found is None else _as_json(found)


def _by(told: Told, name: str, group_of: Callable[[Call], str]) -> Json:
    """Ratios by group of plain generate's calls; empty if there is only one group, the whole stream."""
    groups = dict.fromkeys(group_of(call) for call in told.of_way(PLAIN))
    if len(groups) < 2:
        return {}
    return {group: _of_group(told, name, group_of, group) for group in groups}


def _of_group(told: Told, name: str, group_of: Callable[[Call], str], group: str) -> Json:
    def wanted(plain: Call) -> bool:
        return group_of(plain) == group

    measures = {"whole": Measured.whole, "decode": Measured.decoding}
    parts = {what: _ratios(told, name, measured, wanted) for what, measured in measures.items()}
    return {"prompts": len(told.of_way(name, wanted)), **parts}


def _equal(told: Told, way: Way, calls: Sequence[Call]) -> Json | None:
    """Share of texts with plain generate's ids, and where others differ; ``None`` with sampling."""
    if not told.part.condition.is_greedy:
        return None
    plain = told.of_way(PLAIN)
    rows = [
        (mine, theirs) for a, b in zip(calls, plain, strict=True) for mine, theirs in zip(a.ids, b.ids, strict=True)
    ]
    equal = sum(mine == theirs for mine, theirs in rows)
    parted = [
        {
            "prompt": one.prompt,
            "row": one.row,
            "position": one.position,
            "margin": one.margin,
            "near_tie": one.is_near_tie,
        }
        for one in told.journal.parted
        if (one.way, one.condition) == (way.name, told.part.index) and one.prompt in told.counted
    ]
    return {"texts": len(rows), "equal": equal, "share": equal / len(rows), "parted": parted}


def _first_call(told: Told, name: str) -> Json | None:
    """The way's first call in the stream, which its main figures leave out if there was one pass."""
    key = (name, told.part.index, 0, 0)
    call, plain = told.journal.calls.get(key), told.journal.calls.get((PLAIN, *key[1:]))
    return None if call is None or plain is None else _single(told, plain, call)


def _fresh(told: Told, name: str) -> list[Json]:
    """Calls with a new ``SelfSpec``."""
    plain = {call.prompt: call for call in told.fresh[PLAIN]}
    if name == PLAIN:
        return []
    return [_single(told, plain[call.prompt], call) for call in told.fresh[name] if call.prompt in plain]


def _single(told: Told, plain: Call, call: Call) -> Json:
    seconds, others = call.seconds(told.clock), plain.seconds(told.clock)
    ratio = others / max(plain.tokens, 1) / (seconds / max(call.tokens, 1))
    return {"kind": call.kind, "request_latency": seconds, "plain_request_latency": others, "ratio": ratio}


def _as_json(found: Ratios) -> Json:
    return asdict(found)


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _counts(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def estimate(found: Mapping[str, Any] | None) -> Estimate | None:
    """An estimate from its form in the results."""
    return None if found is None else Estimate(**found)
