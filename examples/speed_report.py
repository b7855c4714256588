"""Tables of what ``measure_speed.py`` has measured.

    python examples/speed_report.py figures.json --clock wall

A ratio is plain generate's seconds per token over a way's, so above 1 the way is faster. "Decode" is a call less the
call of ``generate`` with one new token on the same prompt, which is transformers' own for all ways. The simulated
figure is the number of tokens for each token's worth of verification where a forward over up to 32 tokens costs as
much as one over a single token; forwards of a draft's own layers are not counted in it.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

PLAIN, PREFILL = "plain", "prefill"
# A text loops if more than this share of its tokens repeats so many of its own earlier ones in a row.
LOOPS, REPETITION = 0.3, 12
# Tokens up to which verification is free in the simulated figure.
FREE = 32
LOOKUP = re.compile(r"lookup(\d+)(?:-(\d+))?")


@dataclass
class Run:
    """One call of ``generate``.

    Attributes:
        wall, cpu: seconds, and those of the process's CPU time.
        tokens: new tokens, all rows, padding left out.
        ids: for each row its new tokens.
        looping: share of the tokens that are in repetitions of the row's own text.
        stats: our statistics, without those for each token and round.
        free: tokens, and the cost of the rounds that gave them where verification is free; if rounds are recorded.
        differences: rows, columns and top-two logit gaps where the ids part from plain generate's.
    """

    wall: float
    cpu: float
    tokens: int
    ids: list[list[int]]
    looping: float
    stats: dict[str, Any] | None = None
    free: tuple[float, float] | None = None
    differences: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Sample:
    """One prompt, or batch of prompts, with all ways.

    Attributes:
        kind: of the prompt.
        prompt_tokens: for each row.
        runs: by the name of the way, and ``prefill``.
    """

    kind: str
    prompt_tokens: list[int]
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def loops(self) -> bool:
        return self.runs[PLAIN].looping > LOOPS


@dataclass
class FirstCall:
    """A call with a new ``SelfSpec`` between two of plain generate."""

    way: str
    kind: str
    before: Run
    run: Run
    after: Run

    def ratio(self, clock: str) -> float:
        """Plain over ours, per token, whole calls."""
        plain = [getattr(run, clock) / run.tokens for run in (self.before, self.after)]
        return sum(plain) / 2 / (getattr(self.run, clock) / self.run.tokens)


@dataclass
class Figures:
    """All that was measured.

    Attributes:
        about: what is needed to measure it again.
        samples: prompts in the order of the stream.
        first_calls: calls with a new ``SelfSpec``; the first is the first one in the process.
    """

    about: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes everything; a file that is there stays whole until it is replaced."""
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Figures":
        known = json.loads(path.read_text())
        samples = [
            Sample(s["kind"], s["prompt_tokens"], {way: Run(**run) for way, run in s["runs"].items()})
            for s in known["samples"]
        ]
        first = [
            FirstCall(c["way"], c["kind"], *(Run(**c[name]) for name in ("before", "run", "after")))
            for c in known["first_calls"]
        ]
        return cls(known["about"], samples, first)


def looping_share(ids: Sequence[int]) -> float:
    """Share of the tokens that are in repetitions of ``REPETITION`` or more earlier tokens of ``ids``."""
    seen: set[tuple[int, ...]] = set()
    repeats: set[int] = set()
    for end in range(REPETITION, len(ids) + 1):
        piece = tuple(ids[end - REPETITION : end])
        if piece in seen:
            repeats.update(range(end - REPETITION, end))
        seen.add(piece)
    return len(repeats) / len(ids) if ids else 0.0


def cost_where_free(round_sizes: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Tokens that rounds gave, and what they cost where ``FREE`` tokens take as long as one.

    Args:
        round_sizes: for each round how many tokens it verified and how many it gave.
    """
    return sum(gained for _, gained in round_sizes), sum(max(1.0, nodes / FREE) for nodes, _ in round_sizes)


# Seconds and tokens of a way in a sample.
Part = Callable[[Sample, str], tuple[float, int]]


def whole_call(clock: str) -> Part:
    return lambda sample, way: (getattr(sample.runs[way], clock), sample.runs[way].tokens)


def decoding(clock: str) -> Part:
    """What comes after the first token of each row."""

    def part(sample: Sample, way: str) -> tuple[float, int]:
        run = sample.runs[way]
        seconds = getattr(run, clock) - getattr(sample.runs[PREFILL], clock)
        return seconds, run.tokens - len(sample.prompt_tokens)

    return part


def in_total(samples: Sequence[Sample], way: str, part: Part) -> float | None:
    """Plain's seconds per token over the way's, all samples together."""
    plain = [part(sample, PLAIN) for sample in samples]
    ours = [part(sample, way) for sample in samples]
    plain_seconds, plain_tokens = (sum(values) for values in zip(*plain, strict=True)) if plain else (0.0, 0)
    seconds, tokens = (sum(values) for values in zip(*ours, strict=True)) if ours else (0.0, 0)
    if plain_tokens <= 0 or tokens <= 0 or seconds <= 0:
        return None
    return plain_seconds / plain_tokens / (seconds / tokens)


def typical(samples: Sequence[Sample], way: str, part: Part) -> float | None:
    """The median of the samples' ratios."""
    ratios = [in_total([sample], way, part) for sample in samples]
    known = [ratio for ratio in ratios if ratio is not None]
    return median(known) if known else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"{title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def by_kind(
    title: str, samples: Sequence[Sample], ways: Sequence[str], ratio: Callable[[Sequence[Sample], str], float | None]
) -> str:
    """A row for each kind and one for all, a column for each way and one for the best of prompt lookup."""
    lookups = [way for way in ways if LOOKUP.fullmatch(way)]
    groups = {kind: [sample for sample in samples if sample.kind == kind] for kind in dict.fromkeys(_kinds(samples))}
    if len(groups) > 1:
        groups["all"] = list(samples)
    rows = []
    for kind, group in groups.items():
        found = {way: ratio(group, way) for way in ways}
        cells = [kind, str(len(group)), *(_cell(found[way]) for way in ways)]
        if len(lookups) > 1:
            cells.append(_cell(max((found[way] for way in lookups if found[way] is not None), default=None)))
        rows.append(cells)
    head = ["kind", "samples", *ways, *(["best lookup"] if len(lookups) > 1 else [])]
    return _table(title, head, rows)


def _kinds(samples: Sequence[Sample]) -> list[str]:
    return [sample.kind for sample in samples]


def overview(figures: Figures, ways: Sequence[str]) -> str:
    """A row for each way over the whole stream."""
    samples, rows = figures.samples, []
    for way in (PLAIN, *ways):
        runs = [sample.runs[way] for sample in samples]
        parts = [of(clock) for of in (decoding, whole_call) for clock in ("wall", "cpu")]
        tokens = sum(run.tokens for run in runs)
        cells = [way, *(_cell(in_total(samples, way, part)) for part in parts)]
        cells += [f"{1e3 * sum(run.cpu for run in runs) / tokens:.2f}", *_drafts(runs)]
        same = sum(not run.differences for run in runs)
        cells.append("" if figures.about["do_sample"] else f"{same}/{len(runs)}")
        rows.append(cells)
    head = ["way", "decode, wall", "decode, CPU", "whole, wall", "whole, CPU", "CPU ms per token", "α", "M"]
    return _table("All prompts, total seconds", [*head, f"free to {FREE}", "same ids"], rows)


def _drafts(runs: Sequence[Run]) -> list[str]:
    """α, M and the simulated figure."""
    stats = [run.stats for run in runs if run.stats is not None]
    if not stats:
        return ["", "", ""]
    drafted, rounds = (sum(s[name] for s in stats) for name in ("drafted", "rounds"))
    decoded = sum(s["tokens"] - s["rows"] for s in stats)
    free = [run.free for run in runs if run.free is not None]
    cost = sum(pair[1] for pair in free)
    return [
        _cell(sum(s["accepted"] for s in stats) / drafted if drafted else None),
        _cell(decoded / rounds if rounds else None),
        _cell(sum(pair[0] for pair in free) / cost if cost else None),
    ]


def report(figures: Figures, clock: str) -> str:
    """All tables."""
    samples, clock_name = figures.samples, {"wall": "wall-clock", "cpu": "CPU"}[clock]
    if not samples:
        return "Nothing was measured."
    ways = [way for way in samples[0].runs if way not in (PLAIN, PREFILL)]
    decode, whole = decoding(clock), whole_call(clock)
    loops = [sample for sample in samples if sample.loops]
    straight = [sample for sample in samples if not sample.loops]
    tables = [overview(figures, ways)]
    tables.append(by_kind(f"Decode, total {clock_name} seconds", samples, ways, lambda s, w: in_total(s, w, decode)))
    tables.append(by_kind("Decode, median of ratios", samples, ways, lambda s, w: typical(s, w, decode)))
    tables.append(by_kind("Whole call, total seconds", samples, ways, lambda s, w: in_total(s, w, whole)))
    for title, part in (("do not loop", straight), ("loop", loops)):
        if part and loops:
            tables.append(by_kind(f"Decode, texts that {title}", part, ways, lambda s, w: in_total(s, w, decode)))
    if figures.first_calls:
        tables.append(_first_calls(figures.first_calls))
    return "\n\n".join([*tables, *_parted(figures)])


def _first_calls(calls: Sequence[FirstCall]) -> str:
    rows = [[c.way, c.kind, _cell(c.ratio("wall")), _cell(c.ratio("cpu"))] for c in calls]
    for way in dict.fromkeys(call.way for call in calls):
        own = [call for call in calls if call.way == way]
        if len(own) > 1:
            rows.append([way, "median", *(_cell(median(c.ratio(clock) for c in own)) for clock in ("wall", "cpu"))])
    return _table("First calls, whole call", ["way", "kind", "wall", "CPU"], rows)


def _parted(figures: Figures) -> list[str]:
    """A line for each text whose ids are not plain generate's."""
    return [
        f"{way}, prompt {index} ({sample.kind}), row {d['row']}: ids part at new token {d['position']}, "
        f"top-2 logit gap {d['margin']:.2g}{' (a near tie)' if d['is_near_tie'] else ''}"
        for index, sample in enumerate(figures.samples)
        for way, run in sample.runs.items()
        for d in run.differences
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what --json of measure_speed.py has written")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    print(report(Figures.load(options.figures), options.clock))


if __name__ == "__main__":
    main()
