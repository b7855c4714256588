"""What was measured, in the form of the file ``results.json``.

Ratios stand by two protocols. Spec-Bench (arXiv 2401.07851, ``evaluation/speed.py``) takes the mean of the prompts' new
tokens per second, and divides the mean of a method by that of plain decoding, so that long answers count no more than
short ones. The ratio of totals divides all tokens by all seconds first. Intervals are 95 % percentile intervals of the
bootstrap over prompts (Efron and Tibshirani, An Introduction to the Bootstrap, §13.3): a method and plain generate are
resampled together, so that differences between prompts cancel.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np

from .methods import LAYERS, PLAIN, Method
from .stream import Call, Part, Stream

SCHEMA_VERSION = 2
# A text loops if more than this share of its tokens repeats earlier ones.
LOOPS = 0.3
# The fewest prompts for an interval. With few prompts the bootstrap's intervals are too narrow: for means of lognormal
# speeds (σ = 0.3) they cover the true mean in 79 % of cases with 4 prompts, in 88 % with 10, in 93 % with 20 (1,500
# simulated cases).
FEWEST = 10
_DRAWS, _SEED = 2000, 0
# The most places in a draft, and the fewest rounds that reach a place, for which a rate is shown.
_POSITIONS, _FEWEST_ROUNDS = 16, 5
Json = dict[str, Any]
Measure = Callable[[Call, str], tuple[int, float]]


def results(stream: Stream, clock: str) -> Json:
    """Returns the settings and all figures of a stream, by the clock ``wall`` or ``cpu``."""
    settings = {**vars(stream.settings), "clock": clock}
    conditions = [_Condition(part, stream, clock).as_json() for part in stream.parts]
    return {"schema_version": SCHEMA_VERSION, "settings": settings, "conditions": conditions}


class _Condition:
    """The calls of one condition that count: the last pass, without a process's first of a method, which warms up."""

    def __init__(self, part: Part, stream: Stream, clock: str) -> None:
        self.part, self.stream, self.clock = part, stream, clock
        self.all = [call for call in stream.journal.calls.values() if call.condition == part.number]
        passes = stream.settings.passes
        last = {(call.method, call.prompt): call for call in self.all if call.turn == passes - 1}
        later = range(1 if passes == 1 and len(part.batches) > 1 else 0, len(part.batches))
        cold = {call.prompt for call in last.values() if call.is_first}
        counted = [prompt for prompt in later if prompt not in cold] or later
        self.calls = {method.name: [last[method.name, prompt] for prompt in counted] for method in part.methods}
        self.plain = self.calls[PLAIN]

    def as_json(self) -> Json:
        methods = [self._method(method) for method in self.part.methods]
        return {
            "temperature": self.part.temperature,
            "batch_size": self.part.batch_size,
            "prompts": len(self.plain),
            "kinds": dict(Counter(call.kind for call in self.plain)),
            "input_sequence_length": mean(length for call in self.plain for length in call.prompt_tokens),
            "methods": methods,
            "best": fastest(methods),
        }

    def _method(self, method: Method) -> Json:
        name, clock, calls = method.name, self.clock, self.calls[method.name]
        decoded = [(len(call.ids), *call.decoding(clock)) for call in calls]
        between = [rows * seconds / tokens for rows, tokens, seconds in decoded if tokens]
        equal = None if self.part.temperature else self._equal(calls)
        differences = equal["differences"] if equal else ()
        return {
            "name": name,
            "group": method.group,
            "call": method.call,
            **_ratios(self.plain, calls, clock),
            "by_kind": self._by(calls, lambda call: call.kind),
            "by_looping": self._by(calls, lambda call: "texts that loop" if call.looping > LOOPS else "other texts"),
            # Throughput and latencies under AIPerf's names.
            "output_token_throughput": _estimate([call.whole(clock) for call in calls], _mean_speed),
            "time_to_first_token": mean(call.to_first[clock] for call in calls),
            "inter_token_latency": mean(between) if between else None,
            "request_latency": mean(call.seconds[clock] for call in calls),
            "output_sequence_length": mean(len(row) for call in calls for row in call.ids),
            "acceptance": acceptance(calls),
            "equal_ids": equal,
            "is_lossless": method.is_lossless and all(difference["near_tie"] for difference in differences),
            "first_call": self._first_call(name),
            "left_to_generate": sum(bool(call.left_to_generate) for call in calls),
            "peak_memory_bytes": max((call.peak_memory for call in calls if call.peak_memory), default=None),
        }

    def _by(self, calls: Sequence[Call], group_of: Callable[[Call], str]) -> Json:
        """Ratios by group of plain generate's calls; empty if there is only one group, the whole stream."""
        groups = defaultdict[str, list[tuple[Call, Call]]](list)
        for plain, call in zip(self.plain, calls, strict=True):
            groups[group_of(plain)].append((plain, call))
        figures: Json = {}
        for group, pairs in groups.items() if len(groups) > 1 else ():
            plains, others = zip(*pairs, strict=True)
            figures[group] = {"prompts": len(pairs), **_ratios(plains, others, self.clock)}
        return figures

    def _equal(self, calls: Sequence[Call]) -> Json:
        """Share of texts with plain generate's ids, and where others differ."""
        equal: list[bool] = []
        differences = []
        for plain, call in zip(self.plain, calls, strict=True):
            equal += map(list.__eq__, plain.ids, call.ids)
            width = self.part.batches[call.prompt].ids.shape[1]
            for difference in self.stream.differences(self.part, plain, call):
                place = {"prompt": call.prompt, "row": difference.row, "position": difference.column - width}
                differences.append({**place, "margin": difference.margin, "near_tie": difference.is_near_tie})
        return {"texts": len(equal), "equal": sum(equal), "share": sum(equal) / len(equal), "differences": differences}

    def _first_call(self, name: str) -> Json:
        """The first call beside plain generate's, which the main figures leave out if there was one pass."""
        first = {call.method: call.whole(self.clock) for call in self.all if call.turn == call.prompt == 0}
        (tokens, seconds), (plain_tokens, plain_seconds) = first[name], first[PLAIN]
        ratio = plain_seconds / max(plain_tokens, 1) / (seconds / max(tokens, 1))
        return {"request_latency": seconds, "plain_request_latency": plain_seconds, "ratio": ratio}


def fastest(methods: Sequence[Json]) -> str:
    """The method whose whole calls are fastest, of those that users can call and that write the model's own text."""
    lossless = [method for method in methods if method["is_lossless"] and method["name"] != LAYERS]
    timed = [method for method in lossless if method["whole"] is not None]
    return str(max(timed, key=lambda method: method["whole"]["ratio_of_means"]["value"])["name"])


def _ratios(plain: Sequence[Call], calls: Sequence[Call], clock: str) -> Json:
    measures: dict[str, Measure] = {"whole": Call.whole, "decode": Call.decoding}
    return {name: ratios(plain, calls, measure, clock) for name, measure in measures.items()}


def ratios(plain: Sequence[Call], calls: Sequence[Call], measure: Measure, clock: str) -> Json | None:
    """How much faster calls are than plain generate's; ``None`` if no prompt has tokens on both sides."""
    rows = [(*measure(a, clock), *measure(b, clock)) for a, b in zip(plain, calls, strict=True)]
    estimates = {"ratio_of_means": _estimate(rows, _of_means), "ratio_of_totals": _estimate(rows, _of_totals)}
    return None if None in estimates.values() else estimates


def _mean_speed(tokens: Any, seconds: Any, axis: int = -1) -> Any:
    return (tokens / seconds).mean(axis)


def _of_means(plain_tokens: Any, plain_seconds: Any, tokens: Any, seconds: Any, axis: int = -1) -> Any:
    return _mean_speed(tokens, seconds, axis) / _mean_speed(plain_tokens, plain_seconds, axis)


def _of_totals(plain_tokens: Any, plain_seconds: Any, tokens: Any, seconds: Any, axis: int = -1) -> Any:
    return tokens.sum(axis) / seconds.sum(axis) / (plain_tokens.sum(axis) / plain_seconds.sum(axis))


def _estimate(rows: Sequence[tuple[float, ...]], statistic: Callable[..., Any]) -> Json | None:
    """A figure of the prompts' tokens and seconds, with an interval where there are enough; zeros do not count."""
    from scipy.stats import bootstrap  # slow to import

    data = np.array(rows, dtype=float)
    data = data[(data > 0).all(1)].T
    if not data.size:
        return None
    estimate: Json = {"value": float(statistic(*data)), "low": None, "high": None}
    if data.shape[1] >= FEWEST:
        options: dict[str, Any] = {"n_resamples": _DRAWS, "method": "percentile", "random_state": _SEED}
        interval = bootstrap(tuple(data), statistic, paired=True, vectorized=True, **options).confidence_interval
        estimate |= {"low": float(interval.low), "high": float(interval.high)}
    return estimate


def acceptance(calls: Sequence[Call]) -> Json | None:
    """Acceptance over calls under vLLM's and AIPerf's names, ``None`` without rounds; ``conditional_acceptance`` is, by
    place, how often a token was kept if those before were, an ended draft's never."""
    counts = [call.rounds for call in calls if call.rounds is not None and call.rounds["rounds"]]
    if not counts:
        return None
    rounds, accepted = (sum(of_call[name] for of_call in counts) for name in ("rounds", "accepted"))
    drafts = [of_call["drafted"] for of_call in counts]
    drafted = None if None in drafts else sum(drafts)
    kept: Counter[int] = Counter()
    for of_call in counts:
        kept.update({int(length): count for length, count in of_call["histogram"].items()})
    reached = [sum(kept[length] for length in kept if length >= place) for place in range(_POSITIONS + 1)]
    return {
        "num_rounds": rounds,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": {str(length): kept[length] for length in sorted(kept)},
        "conditional_acceptance": [b / a for a, b in pairwise(reached) if a >= _FEWEST_ROUNDS][: max(kept, default=0)],
    }
