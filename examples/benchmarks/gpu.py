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
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

# The parts in their order, and the seconds that each may take, 550 together. All processes import at the beginning, for
# which the first part waits.
SECONDS = {"probe": 40, "ids": 90, "135m": 85, "1b": 65, "8b": 205, "soak": 65}
ROOT = Path(__file__).parents[2]
# What speeds should be at least: in units of the compiled static cache's, by what drafts and the tokens in a row that
# the prompt has of what follows, and in the first call, where nothing is packed, in units of plain ``generate``'s.
BARS: dict[tuple[str, int], float] = {("ours", 0): 0.95, ("ours", 3): 1.5, ("ours", 8): 1.5, ("four bits", 0): 1.5}
FIRST = {"ours": 1.0, "four bits": 0.0}
Line = dict[str, Any]


def add(out: Path, part: str, case: str, **line: Any) -> None:
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"part": part, "case": case, **line}) + "\n")


def cases_in(out: Path) -> dict[tuple[str, str], list[Line]]:
    """The lines of the last try of each case, by its part and name; the first one of a part is its start. A try begins
    with a "call" and ends with what it "took"."""
    cases: dict[tuple[str, str], list[Line]] = {(part, "start"): [] for part in SECONDS}
    for line in map(json.loads, (out / "results.jsonl").read_text(encoding="utf-8").splitlines()):
        case = line["part"], line["case"]
        cases[case] = [line] if "call" in line else [*cases[case], line]
        for name in line.get("cases", ()):
            cases.setdefault((line["part"], name), [])
    return cases


def is_done(lines: list[Line]) -> bool:
    return bool(lines) and "took" in lines[-1] and "failed" not in lines[-1]


def left_in(out: Path, part: str, call: float) -> dict[str, list[Line]]:
    """The cases of a part that this call has to run: those that were not tried first, then those that failed before."""
    cases = {case: lines for (of, case), lines in cases_in(out).items() if of == part and not is_done(lines)}
    left = {case: lines for case, lines in cases.items() if not lines or lines[0]["call"] != call}
    return dict(sorted(left.items(), key=lambda case: bool(case[1])))


def run_cases(bench: Any, out: Path, call: float, until: float) -> None:
    """Runs cases of a part until none is left."""
    if not is_done(cases_in(out)[bench.part, "start"]):
        about = {"call": call, "process": os.getpid(), "machine": bench.machine, "cases": [*bench.cases]}
        add(out, bench.part, "start", **about, took=None)
    while True:
        with (out / "results.jsonl").open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # so that no other process begins the same case
            if (case := next(iter(left_in(out, bench.part, call)), None)) is None:
                return
            add(out, bench.part, case, call=call, process=os.getpid())
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
        self.args, self.began, self.processes = args, time.time(), list[subprocess.Popen[str]]()
        self._results = (args.out / "results.jsonl").open("a+", encoding="utf-8")

    def started(self, part: str) -> subprocess.Popen[str]:
        """A process that imports, and begins when it is told to."""
        command, pipe = [sys.executable, *sys.argv, "--part", part], subprocess.PIPE
        with (self.args.out / "log.txt").open("a", encoding="utf-8") as log:
            started = subprocess.Popen(command, stdin=pipe, stdout=log, stderr=log, text=True, start_new_session=True)
        self.processes.append(started)
        return started

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
        stop(process)
        cases = {case: lines for (of, case), lines in cases_in(self.args.out).items() if of == part and lines}
        begun = [case for case, lines in cases.items() if lines[0]["process"] == process.pid]
        cut = [case for case in begun if "took" not in cases[case][-1]]
        for case in cut:
            add(self.args.out, part, case, took=None, failed=why)
        if code != 0 and not begun:
            add(self.args.out, part, "start", call=self.began, process=process.pid, took=None, failed=why)
        return bool(cut)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a process, with what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def middle(lines: list[Line], figure: str, **about: Any) -> float:
    """The median of a figure over the lines that are about this."""
    figures = [line[figure] for line in lines if figure in line and about.items() <= line.items()]
    return statistics.median(figures or [math.nan])


def beside(number: float, bar: float) -> str:
    """A number and what it should be at least."""
    return f"{number:.2f} (≥ {bar})" if number >= bar else f"**{number:.2f}, not {bar}**"


def speeds(case: tuple[str, str], lines: list[Line]) -> Iterator[list[str]]:
    """The cells of each kind of text: medians of calls after the first, and the first one."""
    plain, static = (middle(lines, "ms", way=way, is_first=False) for way in ("plain", "static"))
    for (way, repeated), bar in BARS.items():
        if ours := [line for line in lines if (line.get("way"), line.get("repeated")) == (way, repeated)]:
            ms, m = (middle(ours, figure, is_first=False) for figure in ("ms", "m"))
            first = middle(lines, "seconds", way="plain") / middle(ours, "seconds", is_first=True)
            numbers = (f"{number:.2f}" for number in (plain, static, ms, m))
            bars = beside(static / ms, bar), beside(first, FIRST[way])
            yield [*case, f"{repeated}{', four bits' * (way != 'ours')}", *numbers, *bars, f"{middle(ours, 'mib'):.0f}"]


def print_summary(out: Path) -> None:
    """Speeds beside the bars, and what failed, was skipped, or was not reached."""
    cases = cases_in(out)
    head = "model | shape | repeated | plain, ms | static, ms | ours, ms | M | static / ours | plain / first call | MiB"
    tables: dict[str, list[list[str]]] = {head: [cells for case in cases.items() for cells in speeds(*case)]}
    rows = tables["part | case | end | why"] = []
    for case, lines in cases.items():
        ends = [(end, line[end]) for line in lines for end in ("failed", "skipped") if end in line]
        rows += [[*case, *end] for end in ends or [("not reached", "")] * (not lines)]
    for head, rows in tables.items():
        columns = head.split(" | ")
        for line in (columns, ["---"] * len(columns), *rows):
            print(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |")
        print()
    print(f"{sum(map(is_done, cases.values()))} of {len(cases)} cases ended well.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results, may have those of an earlier call")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and few of all, to try the command")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process
    args = parser.parse_args()
    if args.part is not None:
        sys.path += [str(ROOT), str(ROOT / "tests")]  # the package, where it is not installed, and tables of types
        import gpu_parts

        if told := sys.stdin.readline():  # unless the command has ended
            run_cases(gpu_parts.Bench(args.part, args.device, args.small), args.out, *map(float, told.split()))
        os._exit(0)  # what torch does at the end takes seconds
    args.out.mkdir(parents=True, exist_ok=True)
    call = Call(args)
    left = {part: left_in(args.out, part, call.began) for part in SECONDS}
    parts = [part for part in SECONDS if left[part]]
    parts.sort(key=lambda part: all(left[part].values()))  # last those where all have been tried
    count = {"ids": 1 if args.small else 9}  # of processes, one for the tests and eight for types of models
    processes = {part: [call.started(part) for _ in range(count.get(part, 1))] for part in parts}
    until = call.began
    try:
        for part in parts:
            until += SECONDS[part]
            call.run(part, processes[part], until)
    finally:
        for process in call.processes:
            stop(process)
    print_summary(args.out)


if __name__ == "__main__":
    main()
