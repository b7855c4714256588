"""Breaks a file of the package in one place at a time, and lists what no test notices.

    python tests/helpers/mutate.py hf_selfspec/verify/sampling.py tests/verify

Where a change survives, a test is missing or the change makes no difference; which of the two, a reader decides.
Libraries are imported once: each change is tested in a fork of this process that imports the package from a copy. Not
for Windows.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "hf_selfspec"
# What pytest last printed.
_OUTPUT = "output.txt"
# What the package and its tests import, and takes longest.
LIBRARIES = ("torch", "transformers", "transformers.trainer", "peft", "pytest", "scipy.stats")

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

Change = Callable[[Any], None]


def changes(node: ast.AST) -> Iterator[Change]:
    """The ways to break one node in its place."""
    if isinstance(node, ast.Compare):
        for index in range(len(node.ops)):
            yield partial(_swap_comparison, index)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _SWAPPED:
        yield lambda n: setattr(n, "op", _SWAPPED[type(n.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, ast.Break):
        yield lambda n: setattr(n, "__class__", ast.Continue)
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield lambda n: setattr(n, "id", _NAMES[n.id])


def _swap_comparison(index: int, node: Any) -> None:
    node.ops[index] = _SWAPPED[type(node.ops[index])]()


class _Untouched(ast.NodeVisitor):
    """Collects what no behaviour follows from: annotations, decorators and errors."""

    def __init__(self) -> None:
        self.found: set[int] = set()

    def leave(self, node: ast.AST | None) -> None:
        if node is not None:
            self.found.update(id(inner) for inner in ast.walk(node))

    def visit(self, node: ast.AST) -> None:
        for name in ("annotation", "returns"):
            self.leave(getattr(node, name, None))
        for decorator in getattr(node, "decorator_list", []):
            self.leave(decorator)
        if isinstance(node, ast.Raise):
            self.leave(node)
        self.generic_visit(node)


def mutants(source: str) -> Iterator[tuple[int, str, str, str]]:
    """Line, the statement before and after, and the whole text of each mutant."""
    tree = ast.parse(source)
    untouched = _Untouched()
    untouched.visit(tree)
    nodes = list(ast.walk(tree))
    for place, node in enumerate(nodes):
        if id(node) in untouched.found:
            continue
        for change in changes(node):
            changed = copy.deepcopy(tree)
            change(list(ast.walk(changed))[place])
            text = ast.unparse(ast.fix_missing_locations(changed))
            before, after = _difference(ast.unparse(tree), text)
            yield getattr(node, "lineno", 0), before, after, text


def _difference(before: str, after: str) -> tuple[str, str]:
    """The first lines that differ."""
    for old, new in zip(before.splitlines(), after.splitlines(), strict=False):
        if old != new:
            return old.strip(), new.strip()
    return "", ""


def run_tests(copied: Path, tests: list[str], seconds: float) -> str:
    """``killed``, ``survived`` or ``timeout``, found in a fork that imports the package from ``copied``."""
    child = os.fork()
    if not child:
        silent = os.open(copied / _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.setsid()
        os.chdir(copied)
        sys.path.insert(0, str(copied))
        os.environ["PYTHONPATH"] = str(copied)
        import pytest

        try:
            status = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
        except BaseException:  # in a forked child, which must not go on as its parent
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def main() -> int:
    """Runs the command line; returns the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file of the package")
    parser.add_argument("tests", nargs="+", help="what pytest gets: files, ids, -k ...")
    parser.add_argument("--seconds", type=float, help="limit for each mutant (default: 5 times what all tests take)")
    parser.add_argument("--lines", help="only these, as 10-40")
    parser.add_argument("--sample", type=int, help="only so many mutants, drawn with a fixed seed")
    options, further = parser.parse_known_args()
    tests = [*options.tests, *further]
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        for name in (PACKAGE, "tests", "pyproject.toml", "examples"):
            source = ROOT / name
            if name == PACKAGE:
                shutil.copytree(source, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (copied / name).symlink_to(source)
        file = copied / options.file.resolve().relative_to(ROOT)
        original = file.read_text()
        start = time.monotonic()
        if run_tests(copied, tests, 3600) != "survived":
            raise SystemExit(f"{(copied / _OUTPUT).read_text()[-3000:]}\nthe tests fail without any change")
        taken = time.monotonic() - start
        found = list(mutants(original))
        if options.lines:
            first, last = map(int, options.lines.split("-"))
            found = [mutant for mutant in found if first <= mutant[0] <= last]
        if options.sample:
            found = random.Random(0).sample(found, min(options.sample, len(found)))
        print(f"{len(found)} mutants, {taken:.0f} s for all tests", flush=True)
        survivors = 0
        for line, before, after, text in found:
            file.write_text(text)
            result = run_tests(copied, tests, options.seconds or max(20.0, 5 * taken))
            if result == "survived":
                survivors += 1
                print(f"{options.file}:{line}\n  - {before}\n  + {after}", flush=True)
        print(f"{survivors} of {len(found)} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(), 1))
