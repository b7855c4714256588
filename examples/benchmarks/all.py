r"""Makes the figures of RESULTS again: runs the commands in ``results``, and writes tables and pictures from them.

    python examples/benchmarks/all.py --model SMOLLM2 --data FOLDER [--twin TWIN] [NAME ...]

``SMOLLM2`` is a folder with SmolLM2-135M-Instruct, the folder of data has the files of the suites (HumanEval.jsonl,
gsm8k_train.jsonl, spec_bench.jsonl, wikitext2_valid.txt), ``TWIN`` is the demo model trained without exits
(``train_demo_model.py --plain``). Names are those of files in ``results``, which may end with ``*``; without any, all
are run that need no more than this, which takes hours. A file whose day is ``--since`` or later is left as it is, so
that a run that was stopped goes on. A row of another machine, such as one with a GPU, is a new file::

    all.py ... speed-gpu --command "hf-selfspec bench --model SMOLLM2 --data seven.jsonl --prompts 20 \
        --max-new-tokens 64 --device cuda --dtype bfloat16 --methods selfspec,prompt-lookup,static-compiled"

Pictures need matplotlib (``pip install -e ".[plot]"``).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tables
import torch

ROOT = Path(__file__).parents[2]
SUITES = {
    "prompts.jsonl": "spec-bench spec_bench.jsonl humaneval HumanEval.jsonl gsm8k gsm8k_train.jsonl "
    "editing wikitext2_valid.txt",
    "seven.jsonl": "spec-bench spec_bench.jsonl humaneval HumanEval.jsonl editing wikitext2_valid.txt",
    "both.jsonl": "spec-bench spec_bench.jsonl humaneval HumanEval.jsonl",
    "chats.jsonl": "spec-bench spec_bench.jsonl",
    "code.jsonl": "humaneval HumanEval.jsonl",
}


def words_of(command: str, places: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and its words, with paths in the place of names."""
    words = [places.get(word, word) for word in shlex.split(command)]
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    first = {"python": [sys.executable], "hf-selfspec": [sys.executable, "-m", "hf_selfspec"]}[words[0]]
    return variables, [*first, *words[1:]]


def made(command: str, places: dict[str, str], folder: Path) -> dict[str, Any] | None:
    """Runs a command and returns what a file of results holds, or ``None`` if it failed."""
    is_bench = " bench " in command
    variables, words = words_of(f"{command} --out {shlex.quote(str(folder))}" if is_bench else command, places)
    done = subprocess.run(words, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return None
    result: dict[str, Any] = {"command": command, "day": date.today().isoformat()}
    if is_bench:
        bench = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        bench["about"]["model"] = Path(bench["about"]["model"]).name
        about = bench["about"]
        return {**result, "machine": f"{about['machine']}, {about['clock']} time", "bench": bench}
    machine = done.stdout.partition("\n")[0]  # scripts begin with it
    return {**result, "machine": machine, "tables": tables.tables_in(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="which results (all by default)")
    parser.add_argument("--model", required=True, type=Path, help="folder with SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of the suites")
    parser.add_argument("--twin", type=Path, help="the demo model trained without exits")
    parser.add_argument("--since", default=date.today().isoformat(), help="a day, YYYY-MM-DD (today by default)")
    parser.add_argument("--command", help="the command of a new file, whose NAME is given")
    args = parser.parse_args()
    places = {path.name: str(path.absolute()) for path in args.data.iterdir()}
    places |= {"SMOLLM2": str(args.model.absolute())} | ({"TWIN": str(args.twin.absolute())} if args.twin else {})
    failed = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, suites in SUITES.items():
            _, words = words_of(f"python {ROOT}/examples/benchmarks/suites.py {suites}", places)
            places[name] = str(Path(folder, name))
            with open(places[name], "w", encoding="utf-8") as file:
                subprocess.run(words, stdout=file, check=True)
        new = {tables.RESULTS / f"{args.names[0]}.json": {"command": args.command, "day": ""}} if args.command else {}
        for path in new or sorted(tables.RESULTS.glob("*.json")):
            before = new.get(path) or tables.read(path.stem)
            command = before.get("again", before["command"])  # where the next run is to be another
            needed = {word for word in ("TWIN", "answers.jsonl", "adapter,heads") if word in command} - set(places)
            needed |= {"a GPU"} if "cuda" in command and not torch.cuda.is_available() else set()
            if needed or before["day"] >= args.since or not any(fnmatch(path.stem, name) for name in args.names):
                continue
            print(f"{path.stem}: {command}", flush=True)
            result = made(command, places, Path(folder, path.stem))
            if result is None:
                failed.append(path.stem)
                continue
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    tables.main()
    if find_spec("matplotlib"):
        subprocess.run([sys.executable, ROOT / "examples" / "pictures.py"], check=True)
    if failed:
        raise SystemExit(f"these failed, and run again with the next call: {', '.join(failed)}")


if __name__ == "__main__":
    main()
