"""Times generation with random models of usual sizes on an accelerator (synthetic acceptance).

``pytest -m cuda tests`` checks there that ids, losses and waits are right. Each piece runs in a process of its own, and
each figure is printed and saved as soon as it is there, so that a piece that fails, or takes longer than its limit,
leaves all others; the same command goes on after what ``--out`` has. Prompts repeat themselves, and random models do,
too, so free drafts find more than in texts of people: read the speed-up of a way together with its M. ``engine.py
--device cuda`` times drafting steps and verifications. ``--device cpu --shapes tiny --prompts 64`` tries it without an
accelerator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # the package, where it is not installed

import torch
from synthetic import DTYPES, LlamaShape, exit_damping, random_prompt
from timing import Table, medians, now, parser_with, peak_mib
from transformers import LlamaForCausalLM

from hf_selfspec import EarlyExit, FixedLength, SelfSpec, TopKTree, __version__
from hf_selfspec.bench.compare import machine

SHAPES = {
    "tiny": LlamaShape(64, 4, 128, 256, heads=4, key_heads=2),  # for trying the command
    "1b": LlamaShape(2048, 22, 5632, 32000, heads=32, key_heads=4),  # TinyLlama
    "8b": LlamaShape(4096, 32, 14336, 128256, heads=32, key_heads=8),  # Llama 3.1
}
# How often drafts should agree, about as often as those of a model that was trained for it.
AGREEMENT, NUM_DRAFT = 0.8, 4
# How often a prompt repeats what it begins with.
REPEATS = 4
# Seconds after which a piece is cut, so that it cannot take the time of all others. Not measured on a GPU yet.
LIMIT = 300.0
Result = dict[str, Any]


def shape_of(args: argparse.Namespace, name: str) -> LlamaShape:
    return replace(SHAPES[name], device=args.device, dtype=getattr(torch, args.dtype))


def bandwidth(args: argparse.Namespace, done: Result) -> Iterator[Result]:
    """Bytes that are read and written per second, of more than any cache holds."""
    device = torch.device(args.device)
    count = 1 << (25 if device.type == "cpu" else 30)
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    yield {"bytes_per_second": 2 * count / medians({"copy": lambda: target.copy_(source)}, 10, device)["copy"]}


def damping(args: argparse.Namespace, done: Result, name: str) -> Iterator[Result]:
    """The damping of the blocks after the exit, a quarter of the layers, with which drafts agree as often as wanted."""
    shape = shape_of(args, name)
    yield {"factor": exit_damping(shape, shape.layers // 4, NUM_DRAFT, AGREEMENT)}


def generate(args: argparse.Namespace, done: Result, name: str, rows: str, prompt: str) -> Iterator[Result]:
    """Times each way in turn; a way that fails does not stop the others."""
    shape = shape_of(args, name)
    exit_layer, device = shape.layers // 4, torch.device(args.device)
    model = shape.damped(exit_layer, done[f"damping {name}"]["factor"])
    line = EarlyExit(exit_layer), FixedLength(NUM_DRAFT)
    specs = {
        "SelfSpec()": SelfSpec(),
        "lookup()": SelfSpec.lookup(),
        "an exit": SelfSpec(*line),
        "an exit, eager": SelfSpec(*line, compile=False),
        "an exit, a tree": SelfSpec(*line, TopKTree()),
    }
    ways: dict[str, dict[str, Any]] = {"plain": {}, "plain, static and compiled": {"cache_implementation": "static"}}
    if rows == "1":
        ways["transformers' prompt lookup"] = {"prompt_lookup_num_tokens": NUM_DRAFT}
    ways |= {way: {"assistant": spec} for way, spec in specs.items()}
    ms: dict[str, list[float]] = {way: [] for way in ways}
    figures: Result = {"ways": {}, "errors": {}, "bytes": bytes_read(model, int(rows), int(prompt))}

    def seconds_of(way: str, inputs: dict[str, torch.Tensor], tokens: int) -> float:
        begun = now(device)
        model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **ways[way])
        return now(device) - begun

    for turn in range(args.repeats + 1):
        # Another prompt in each turn, since texts of earlier calls are remembered.
        beginning = random_prompt(model, int(rows), int(prompt) // REPEATS, seed=1 + turn)
        inputs = {key: values.repeat(1, REPEATS) for key, values in beginning.items()}
        for way in [way for way in ways if way not in figures["errors"]]:
            try:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                first, whole = (seconds_of(way, inputs, tokens) for tokens in (1, args.tokens))
            except Exception as error:  # whatever it is, the other ways can still be timed
                figures["errors"][way] = " ".join(str(error).split())[:300]
                yield figures | {"line": f"{way}: {figures['errors'][way]}"}
                continue
            if not turn:
                figures["ways"][way] = {"first_seconds": first + whole, "peak_mib": 0.0}
                continue
            ms[way].append(1e3 * (whole - first) / (args.tokens - 1))  # of decoding
            middle, entry = statistics.median(ms[way]), figures["ways"][way]
            entry |= {"ms": middle, "spread": (max(ms[way]) - min(ms[way])) / 2 / middle}
            entry["peak_mib"] = max(entry["peak_mib"], peak_mib(device))
            if stats := specs[way].stats if way in specs else None:
                entry |= {"alpha": stats.acceptance_rate, "m": stats.mean_generated_length}
            yield figures | {"line": f"{way}: {ms[way][-1]:.3f} ms a token, M {entry.get('m', 1):.2f}"}


def bytes_read(model: LlamaForCausalLM, rows: int, context: int) -> int:
    """The least bytes that a forward over a token reads: weights but the embeddings, keys and values."""
    config, embeddings = model.config, model.get_input_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters() if weight is not embeddings)
    keys = rows * context * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return weights + 2 * config.num_hidden_layers * keys * embeddings.element_size()


PIECES = {"bandwidth": bandwidth, "damping": damping, "generate": generate}


def pieces(args: argparse.Namespace) -> Iterator[str]:
    """The names of all pieces: the first batch size of each model first."""
    yield "bandwidth"
    for rows in args.rows:
        for name in args.shapes:
            if rows == args.rows[0]:
                yield f"damping {name}"
            yield from (f"generate {name} {rows} {prompt}" for prompt in args.prompts)


def run(args: argparse.Namespace, header: dict[str, str]) -> dict[str, Result]:
    """Runs what the file does not have, as far as time permits; failures are kept, too, and not tried again."""
    record = {"header": header, "pieces": {}}
    if args.out.exists():
        record = json.loads(args.out.read_text())
        if record["header"] != header:
            sys.exit(f"{args.out} has figures of {record['header']}, now {header}. Give another --out.")
    results, begun = record["pieces"], time.perf_counter()
    for piece in [piece for piece in pieces(args) if piece not in results]:
        left = args.seconds - (time.perf_counter() - begun)
        lacks_damping = piece.startswith("generate") and "factor" not in results.get(f"damping {piece.split()[1]}", {})
        if left <= 0 or lacks_damping:
            continue
        started, limit = time.perf_counter(), min(LIMIT, left)
        with tempfile.TemporaryFile("w+") as errors:
            command = [sys.executable, *sys.argv, "--piece", piece]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            (timer := threading.Timer(limit, process.kill)).start()
            for line in process.stdout or ():
                if line.startswith("{"):
                    results[piece] = json.loads(line)
                    about = results[piece].pop("line", "")
                    print(f"{time.perf_counter() - started:7.1f} s  {piece}  {about}", flush=True)
                    args.out.write_text(json.dumps(record, indent=1))
            is_late, code = not timer.is_alive(), process.wait()
            timer.cancel()
            errors.seek(0)
            if code and not (is_late and limit < LIMIT and piece not in results):
                why = f"it was not done after {limit:.0f} s" if is_late else " ".join(errors.read().splitlines()[-1:])
                results.setdefault(piece, {})["error"] = why[:300]
        error = results.get(piece, {}).get("error", "")
        print(f"{time.perf_counter() - started:7.1f} s  {piece}  {error}", flush=True)
        args.out.write_text(json.dumps(record, indent=1))
    return results


def report(args: argparse.Namespace, results: dict[str, Result]) -> None:
    speed = results.get("bandwidth", {}).get("bytes_per_second")
    print(f"\nBandwidth of a large copy: {'-' if speed is None else f'{speed / 1e9:.1f} GB/s'}.\n")
    timed = {piece: result for piece, result in results.items() if "ways" in result}
    columns = ("ms/token", "spread", "speed-up", "floor / time", "α", "M", "peak MiB", "first s")
    table = Table("generation", "way", *columns)
    for piece, result in timed.items():
        ways = {name: way for name, way in result["ways"].items() if "ms" in way}
        for name, way in ways.items():
            cells = [f"{way['ms']:.3f}", f"±{way['spread']:.0%}"]
            cells.append(f"{ways['plain']['ms'] / way['ms']:.2f}" if "plain" in ways else "-")
            # The time in which the memory could be read, as a share of the time that it took.
            cells.append("-" if speed is None else f"{1e3 * result['bytes'] / speed / way['ms']:.2f}")
            cells += (f"{way[key]:.2f}" if key in way else "-" for key in ("alpha", "m"))
            table.row(piece, name, *cells, f"{way['peak_mib']:.0f}", f"{way['first_seconds']:.1f}")
    failed = {f"{piece}, {way}": why for piece, result in timed.items() for way, why in result["errors"].items()}
    failed |= {piece: result["error"] for piece, result in results.items() if "error" in result}
    failed |= {piece: "no time was left" for piece in pieces(args) if piece not in results}
    print()
    table = Table("no result", "why")
    for piece, why in failed.items():
        table.row(piece, why.replace("|", "/"))


def main() -> None:
    parser = parser_with(__doc__, rows=[1, 8], prompts=[1024, 8192], tokens=96, repeats=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file of results, may have been begun")
    parser.add_argument("--seconds", type=float, default=540, help="time limit; what takes longer is left out")
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"], choices=SHAPES, help="models that are timed")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.piece is not None:
        name, *words = args.piece.split()
        done = json.loads(args.out.read_text())["pieces"] if args.out.exists() else {}
        for part in PIECES[name](args, done, *words):
            print(json.dumps(part), flush=True)
        return
    torch.tensor(1, device=args.device)  # fails at once where torch has no such device
    about = {"machine": machine(torch.device(args.device)), "package": f"hf_selfspec {__version__}"}
    settings = {"dtype": args.dtype, "tokens": str(args.tokens), "repeats": str(args.repeats)}
    report(args, run(args, about | settings))


if __name__ == "__main__":
    main()
