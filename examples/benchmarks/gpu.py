"""Checks and times all that needs a GPU, in nine minutes: ``python examples/benchmarks/gpu.py --out DIR``.

``gpu_parts.py`` has the parts. Each runs in processes of its own and may take its seconds, and those that earlier ones
have left. Its results are appended to ``DIR/results.jsonl`` and printed when they are there; what else processes print
is in ``DIR/log.txt``. What fails, ends its process or is late costs itself alone. The same command goes on where the
last one ended, with what was not reached first, then with what failed. Nothing comes from a hub.
``--device cpu --small`` tries all of it without a GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import operator
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

# The parts in their order, and the seconds that each may take. All processes import at the beginning, for which the
# first part waits.
SECONDS = {"probe": 40, "ids": 90, "135m": 85, "1b": 65, "8b": 205, "soak": 65}
PROCESSES = {"ids": 9}  # of a part, where it has several
# What speeds should be at least: in units of the compiled static cache's, by the tokens in a row that the prompt has of
# what follows, and in the first call in units of plain ``generate``'s.
BARS, FIRST = {0: 0.95, 3: 1.5, 8: 1.5}, 1.0
# How far the static cache's logits are from plain's, in units of how far ours are.
EXACTNESS = 0.5
Line = dict[str, Any]
Case = tuple[str, str]  # a part, and one of its cases; the first one is the start of its processes


def add(out: Path, part: str, case: str, **line: Any) -> None:
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"part": part, "case": case, **line}) + "\n")


def cases_in(out: Path) -> dict[Case, list[Line]]:
    """The lines of the last try of each case; a try has begun with a "call" and ended with what it "took"."""
    cases: dict[Case, list[Line]] = {}
    for line in map(json.loads, (out / "results.jsonl").read_text(encoding="utf-8").splitlines()):
        case = line["part"], line["case"]
        cases[case] = [line] if "call" in line else [*cases[case], line]
        for name in line.get("cases", ()):
            cases.setdefault((line["part"], name), [])
    return cases


def is_done(lines: list[Line]) -> bool:
    return bool(lines) and "took" in lines[-1] and "failed" not in lines[-1]


def begun_case(out: Path, part: str, call: float) -> str | None:
    """The next case of a part, which no other process begins: one that was not tried, else one that failed before."""
    with (out / "results.jsonl").open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cases = {case: lines for (of, case), lines in cases_in(out).items() if of == part and not is_done(lines)}
        left = [case for case, lines in cases.items() if not lines or lines[0]["call"] != call]
        case = min(left, key=lambda case: bool(cases[case]), default=None)
        if case is not None:
            add(out, part, case, call=call, at=time.time(), process=os.getpid())
        return case


def run_cases(bench: Any, out: Path, call: float, until: float) -> None:
    """Runs cases of a part until none is left."""
    if not is_done(cases_in(out).get((bench.part, "start"), [])):
        about = {"machine": bench.about, "process": os.getpid(), "cases": [*bench.cases]}
        add(out, bench.part, "start", call=call, took=0.0, **about)
    while (case := begun_case(out, bench.part, call)) is not None:
        begun, end = time.time(), {}
        bench.tell, bench.until = partial(add, out, bench.part, case), until
        try:
            bench.cases[case]()
        except SkipTest as why:
            end = {"skipped": str(why)}
        except Exception as error:  # whatever it is, other cases can still run
            print(f"\n{bench.part}, {case}:", traceback.format_exc(), sep="\n", flush=True)
            end = {"failed": f"{type(error).__name__}: {error}"[:600]}
            if "CUDA" in end["failed"]:  # perhaps nothing runs here any more; another process goes on
                add(out, bench.part, case, **end)
                sys.exit(1)
        add(out, bench.part, case, took=round(time.time() - begun, 1), **end)


class Call:
    """One call of the command, which starts processes and waits for them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.time()
        self._processes: list[subprocess.Popen[str]] = []
        self._results = (args.out / "results.jsonl").open("a+", encoding="utf-8")

    def started(self, part: str) -> subprocess.Popen[str]:
        """A process that imports, and begins when it is told to."""
        words = [sys.executable, __file__, "--part", part, "--out", self.args.out, "--device", self.args.device]
        words += ["--small"] * self.args.small
        with (self.args.out / "log.txt").open("a", encoding="utf-8") as log:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            self._processes.append(subprocess.Popen(words, **streams, text=True, start_new_session=True))
        return self._processes[-1]

    def run(self, part: str, new: list[subprocess.Popen[str]], until: float) -> None:
        """Waits for the processes of a part; where a case ends one, that has failed, and another process goes on."""
        waiting: list[subprocess.Popen[str]] = []
        while new or waiting:
            for process in new:
                with suppress(OSError):  # it has ended
                    print(self.began, until, file=process.stdin, flush=True)
            waiting, new = waiting + new, []
            time.sleep(0.05)
            is_late = time.time() > until
            for process in [process for process in waiting if is_late or process.poll() is not None]:
                waiting.remove(process)
                if self._note_end(part, process) and not is_late:
                    new.append(self.started(part))
            for line in self._results:
                print(f"{time.time() - self.began:6.1f} s  {line}", end="", flush=True)

    def _note_end(self, part: str, process: subprocess.Popen[str]) -> bool:
        """Ends a process; returns whether it was in a case."""
        code = process.poll()
        why = "the part's time was over" if code is None else f"its process ended with code {code}"
        self.stop([process])
        cases = {case: lines for (of, case), lines in cases_in(self.args.out).items() if of == part and lines}
        begun = [case for case, lines in cases.items() if lines[0]["process"] == process.pid]
        cut = [case for case in begun if "took" not in cases[case][-1]]
        for case in cut:
            add(self.args.out, part, case, took=round(time.time() - cases[case][0]["at"], 1), failed=why)
        if code != 0 and not begun:
            add(self.args.out, part, "start", call=self.began, process=process.pid, took=0.0, failed=why)
        return bool(cut)

    def stop(self, processes: Sequence[subprocess.Popen[str]] = ()) -> None:
        """Ends these processes, or all, with what they have started."""
        for process in processes or self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def print_table(head: str, rows: Sequence[Sequence[object]]) -> None:
    columns = head.split(" | ")
    for line in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |")
    print()


def middle(lines: list[Line], figure: str, **about: Any) -> float:
    """The median of a figure over the lines that are about this."""
    chosen = [line[figure] for line in lines if figure in line and about.items() <= line.items()]
    return statistics.median(chosen) if chosen else math.nan


def beside(number: float, bar: float) -> str:
    """A number and what it should be at least."""
    return f"{number:.2f} (≥ {bar})" if number >= bar else f"**{number:.2f}, not {bar}**"


def speeds(case: Case, lines: list[Line]) -> Iterator[list[str]]:
    """The cells of each kind of text: medians of calls after the first, and the first one."""
    plain, static = (middle(lines, "ms", way=way, is_first=False) for way in ("plain", "static"))
    logits = (middle(lines, f"logits_{way}") + 1e-9 for way in ("static", "ours"))  # 0 where they are plain's
    exactness = beside(operator.truediv(*logits), EXACTNESS)
    for repeated, bar in BARS.items():
        if ours := [line for line in lines if (line.get("way"), line.get("repeated")) == ("ours", repeated)]:
            ms, m = (middle(ours, figure, is_first=False) for figure in ("ms", "m"))
            first = middle(lines, "seconds", way="plain") / middle(ours, "seconds", is_first=True)
            numbers = (f"{number:.2f}" for number in (plain, static, ms, m))
            bars = beside(static / ms, bar), beside(first, FIRST), exactness
            yield [*case, str(repeated), *numbers, *bars, f"{middle(ours, 'mib'):.0f}"]


def print_summary(out: Path) -> None:
    """Speeds beside the bars, and what failed, was skipped, or was not reached."""
    cases = cases_in(out)
    machines = dict.fromkeys(line["machine"] for lines in cases.values() for line in lines if "machine" in line)
    print("", *machines, "", sep="\n")
    head = "model | tokens x rows | repeated | plain, ms | static, ms | ours, ms | M | static / ours | plain / first"
    print_table(f"{head} | logits | MiB", [cells for case in cases.items() for cells in speeds(*case)])
    rows = [[part, "", "not reached", ""] for part in SECONDS if (part, "start") not in cases]
    for case, lines in cases.items():
        ends = [(end, line[end]) for line in lines for end in ("failed", "skipped") if end in line]
        rows += [[*case, *end] for end in ends or [("not reached", "")] * (not lines)]
    print_table("part | case | end | why", rows)
    print(f"{sum(map(is_done, cases.values()))} of {len(cases)} cases ended well.")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results, may have those of an earlier call")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and few of all, to try the command")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process
    args = parser.parse_args(words)
    if args.part is not None:
        import gpu_parts

        if told := sys.stdin.readline():  # unless the command has ended
            run_cases(gpu_parts.Bench(args.part, args.device, args.small), args.out, *map(float, told.split()))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    call = Call(args)
    cases = cases_in(args.out)
    left = {part: [lines for (of, _), lines in cases.items() if of == part and not is_done(lines)] for part in SECONDS}
    parts = [part for part in SECONDS if left[part] or (part, "start") not in cases]
    parts.sort(key=lambda part: (part, "start") in cases and all(left[part]))  # last those where all have been tried
    counts = {part: 1 if args.small else PROCESSES.get(part, 1) for part in parts}
    processes = {part: [call.started(part) for _ in range(count)] for part, count in counts.items()}
    until = call.began
    try:
        for part in parts:
            until += SECONDS[part]
            call.run(part, processes[part], until)
    finally:
        call.stop()
    print_summary(args.out)


if __name__ == "__main__":
    main()
