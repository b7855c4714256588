"""Times random models of usual sizes on an accelerator (synthetic acceptance): generation, forwards, training steps.

``pytest -m cuda tests`` checks there that ids, losses and waits are right. Each piece runs in a process of its own, and
each figure is printed and saved as soon as it is there, so that a piece that fails, or takes longer than its limit,
leaves all others; the same command goes on after what ``--out`` has. The first piece, two minutes at most, tells
whether the rest is worth its time. Prompts repeat themselves, and random models do, too, so free drafts find more than
in texts of people: read the speed-up of a way together with its M. ``--device cpu --shapes tiny --prompts 64`` tries it
without an accelerator.
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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # the package, where it is not installed

import torch
from synthetic import DTYPES, LlamaShape, exit_damping, random_prompt
from timing import peak_mib, print_row, print_table_head
from training import VARIANTS, step_seconds
from transformers import DynamicCache, LlamaForCausalLM

from hf_selfspec import EarlyExit, FixedLength, SelfSpec, TopKTree, __version__
from hf_selfspec.bench.compare import machine
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.attention import without_cudnn_attention
from hf_selfspec.model.cache import cache_for
from hf_selfspec.model.partial import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.prompt import cache_name
from hf_selfspec.model.target import Target
from hf_selfspec.search.forward_costs import seconds_of

SHAPES = {
    "tiny": LlamaShape(64, 4, 128, 256, heads=4, key_heads=2),  # for trying the command
    "100m": LlamaShape(768, 12, 2048, 16000, heads=12, key_heads=12),
    "1b": LlamaShape(2048, 22, 5632, 32000, heads=32, key_heads=4),  # TinyLlama
    "7b": LlamaShape(4096, 32, 11008, 32000, heads=32, key_heads=32),  # Llama 2
    "8b": LlamaShape(4096, 32, 14336, 128256, heads=32, key_heads=8),  # Llama 3.1
    "13b": LlamaShape(5120, 40, 13824, 32000, heads=40, key_heads=40),
}
# How often drafts should agree, about as often as those of a model that was trained for it.
AGREEMENT, NUM_DRAFT = 0.8, 4
# Attention of a verification: query heads of 32 tokens over grouped keys of an 8B model.
HEADS, KEY_HEADS, HEAD_WIDTH = 32, 8, 128
# How often a prompt repeats what it begins with.
REPEATS = 4
# Forwards between two synchronisations.
IN_A_ROW = 16
# Seconds after which a piece is cut, so that it cannot take the time of all others. Not measured on a GPU yet.
LIMIT = 300.0
TRAINING_ROWS, TRAINING_TOKENS = 4, 512
Result = dict[str, Any]


def shape_of(args: argparse.Namespace, name: str, dtype: str) -> LlamaShape:
    known = SHAPES[name]
    return LlamaShape(**{**vars(known), "device": args.device, "dtype": getattr(torch, dtype)})


# Pieces --------------------------------------------------------------------------------------------------------------


def bandwidth(args: argparse.Namespace, done: Result) -> Result:
    """Bytes that are read and written per second, of more than any cache holds."""
    device = torch.device(args.device)
    count = 1 << (25 if device.type == "cpu" else 30)
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = [seconds_of(lambda: target.copy_(source), device) for _ in range(11)]
    return {"bytes_per_second": 2 * count / statistics.median(seconds[1:])}


def probe(args: argparse.Namespace, done: Result) -> Iterator[Result]:
    """What launches take, with few layers and with many, eager and captured; and attention with a mask, and without."""
    found: Result = {}
    for layers in (16, 32):
        shape = LlamaShape(256, layers, 512, 4096, heads=4, key_heads=4, device=args.device, dtype=torch.bfloat16)
        model = shape.damped(layers // 4, 0.02)
        inputs, device = random_prompt(model, 1, 64), torch.device(args.device)
        ways: dict[str, Any] = {"plain": {}}
        for name, how in (("eager", False), ("captured", None)):
            ways[name] = {"assistant": SelfSpec(EarlyExit(layers // 4), FixedLength(NUM_DRAFT), compile=how)}
        for name, given in ways.items():
            run = partial(model.generate, **inputs, max_new_tokens=64, do_sample=False, **given)
            seconds = [seconds_of(run, device) for _ in range(4)]
            what, ms = (
                f"{layers} layers, {name}: ms a token, and of the first call",
                [1e3 * one / 64 for one in seconds],
            )
            found[what] = [min(ms), ms[0]]
            yield found | {"line": f"{what}: {min(ms):.3f} {ms[0]:.3f}"}
    for slots in (1024, 4096, 8192):
        query = torch.randn(1, HEADS, NUM_DRAFT + 1, HEAD_WIDTH, dtype=torch.bfloat16, device=args.device)
        key = torch.randn(1, HEADS, slots, HEAD_WIDTH, dtype=torch.bfloat16, device=args.device)
        mask = torch.zeros(1, 1, NUM_DRAFT + 1, slots, dtype=torch.bfloat16, device=args.device)
        for name, given in (("a mask", {"attn_mask": mask}), ("no mask", {})):
            attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, key, **given)
            often = seconds_of(lambda: [attend() for _ in range(IN_A_ROW)], query.device)  # noqa: B023
            often = min(often, seconds_of(lambda: [attend() for _ in range(IN_A_ROW)], query.device))  # noqa: B023
            found[what := f"attention over {slots} slots, {name}: ms"] = [1e3 * often / IN_A_ROW]
            yield found | {"line": f"{what}: {found[what][0]:.3f}"}


def damping(args: argparse.Namespace, done: Result, name: str) -> Result:
    """The damping of the blocks after the exit, a quarter of the layers, with which drafts agree as often as wanted."""
    shape = shape_of(args, name, args.dtype)
    return {"factor": exit_damping(shape, shape.layers // 4, NUM_DRAFT, AGREEMENT)}


def generate(args: argparse.Namespace, done: Result, name: str, rows: str, prompt: str) -> Iterator[Result]:
    """Times each way in turn, and forwards of the same model; a way that fails does not stop the others."""
    shape = shape_of(args, name, args.dtype)
    early, device = shape.layers // 4, torch.device(args.device)
    model = shape.damped(early, done[f"damping {name}"]["factor"])
    ways: dict[str, dict[str, Any]] = {"plain": {}, "plain, static and compiled": {"cache_implementation": "static"}}
    if rows == "1":
        ways["transformers' prompt lookup"] = {"prompt_lookup_num_tokens": NUM_DRAFT}
    line, tree = (EarlyExit(early), FixedLength(NUM_DRAFT)), TopKTree()
    specs = {
        "SelfSpec()": SelfSpec(),
        "lookup()": SelfSpec.lookup(),
        "an exit": SelfSpec(*line),
        "an exit, eager": SelfSpec(*line, compile=False),
        "an exit, a tree": SelfSpec(*line, tree),
    }
    ways |= {way: {"assistant": spec} for way, spec in specs.items()}
    first: dict[str, float] = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, float] = {}
    errors: dict[str, str] = {}

    def inputs_of(turn: int) -> dict[str, torch.Tensor]:
        """Another prompt in each turn, since texts of earlier calls are remembered."""
        begun = random_prompt(model, int(rows), int(prompt) // REPEATS, seed=1 + turn)
        return {key: values.repeat(1, REPEATS) for key, values in begun.items()}

    def run(way: str, tokens: int) -> float:
        given = {"max_new_tokens": tokens, "do_sample": False, **ways[way]}
        with without_cudnn_attention():
            return seconds_of(lambda: model.generate(**inputs, **given), device)

    size = bytes_read(model, shape.layers, int(rows), int(prompt))
    found: Result = {"ways": {}, "errors": errors, "bytes": size}
    for turn in range(args.repeats + 1):
        inputs = inputs_of(turn)
        for way in [way for way in ways if way not in errors]:
            try:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                one, whole = run(way, 1), run(way, args.tokens)
                if way in first:  # the difference to a single token is the time of decoding
                    seconds[way].append((whole - one) / (args.tokens - 1))
                    peaks[way] = max(peaks.get(way, 0.0), peak_mib(device))
                first.setdefault(way, one + whole)
            except Exception as error:  # whatever it is, the other ways can still be timed
                errors[way] = " ".join(str(error).split())[:300]
            if seconds[way]:
                stats = ways[way]["assistant"].stats if "assistant" in ways[way] else None
                rates = {} if stats is None else {"alpha": stats.acceptance_rate, "m": stats.mean_generated_length}
                ms = [1e3 * one for one in seconds[way]]
                middle = statistics.median(ms)
                times = {"ms": middle, "spread": (max(ms) - min(ms)) / 2 / middle, "first_seconds": first[way]}
                found["ways"][way] = times | {"peak_mib": peaks[way]} | rates
                yield found | {"line": f"{way}: {ms[-1]:.3f} ms a token {rates or ''}"}
            elif way in errors:
                yield found | {"line": f"{way}: {errors[way]}"}
    yield found | {"forwards": forwards(model, int(rows), int(prompt), early, args.repeats)}


@torch.no_grad()
def forwards(model: LlamaForCausalLM, rows: int, prompt: int, early: int, repeats: int) -> Result:
    """Times a one-token forward of plain ``generate``, a drafting step and a verification, many of each in a row."""
    ids, starts = random_prompt(model, rows, prompt + NUM_DRAFT + 1)["input_ids"], [prompt] * rows
    layers = model.config.num_hidden_layers
    cache = DynamicCache(config=model.config)
    past = {"use_cache": True, cache_name(model): cache}
    model(ids[:, :prompt], logits_to_keep=1, **past)
    anatomy = Anatomy.of(model)
    target = Target(model, anatomy, cache_for(model, anatomy, rows, ids.shape[1]))
    exit_plan = LayerPlan.early_exit(layers, early)
    one, several = ids[:, prompt : prompt + 1], ids[:, prompt:]

    def plain() -> None:
        model(one, **past)
        cache.crop(-1)

    runs = {
        "plain step": (plain, layers),
        "draft step": (lambda: target.step(one, starts, ForwardPass(exit_plan)), early),
        "verification": (lambda: target.step(several, starts), layers),
    }
    with target.prepared():
        target.prefill(ids[:, :prompt], [0] * rows, [prompt] * rows)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + repeats):
        for name, (run, _) in runs.items():
            # plain forwards run as plain ``generate`` runs them
            with without_cudnn_attention() if name == "plain step" else target.prepared():
                often = seconds_of(lambda: [run() for _ in range(IN_A_ROW)], model.device)  # noqa: B023
            found[name].append(1e3 * often / IN_A_ROW)
    sizes = {name: bytes_read(model, of, rows, prompt) for name, (_, of) in runs.items()}
    return {name: {"ms": statistics.median(found[name][1:]), "bytes": sizes[name]} for name in runs}


def bytes_read(model: LlamaForCausalLM, layers: int, rows: int, context: int) -> int:
    """The least bytes that a forward through the first layers and the head reads: their weights, keys and values."""
    config = model.config
    parts = [*model.model.layers[:layers], model.model.norm, model.lm_head]
    weights = sum(weight.numel() * weight.element_size() for part in parts for weight in part.parameters())
    keys = rows * context * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return weights + 2 * layers * keys * model.lm_head.weight.element_size()


def training(args: argparse.Namespace, done: Result, name: str) -> Result:
    """Seconds of a step of the stock ``Trainer``, with and without callbacks, in turn."""
    model, tokens = shape_of(args, name, "float32").model(), 16 if name == "tiny" else TRAINING_TOKENS
    return step_seconds(model, args.repeats, TRAINING_ROWS, tokens, args.device != "cpu", args.device)


PIECES = {"probe": probe, "bandwidth": bandwidth, "damping": damping, "generate": generate, "training": training}


def pieces(args: argparse.Namespace) -> Iterator[str]:
    """The names of all pieces: the first batch size of each model first."""
    yield "probe"
    yield "bandwidth"
    for rows in args.rows:
        for name in args.shapes:
            if rows == args.rows[0]:
                yield f"damping {name}"
            yield from (f"generate {name} {rows} {prompt}" for prompt in args.prompts)
        if rows == args.rows[0]:
            yield f"training {args.shapes[0]}"


# The run -------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, header: dict[str, str]) -> dict[str, Result]:
    """Runs what the file does not have, as far as time permits; failures are kept, too, and not tried again."""
    record = {"header": header, "pieces": {}}
    if args.out.exists():
        record = json.loads(args.out.read_text())
        if record["header"] != header:
            sys.exit(f"{args.out} has figures of {record['header']}, now {header}. Give another --out.")
    found, begun = record["pieces"], time.perf_counter()
    for piece in [piece for piece in pieces(args) if piece not in found]:
        left = args.seconds - (time.perf_counter() - begun)
        if left <= 0 or (piece.startswith("generate") and "factor" not in found.get(f"damping {piece.split()[1]}", {})):
            continue
        started, limit = time.perf_counter(), min(LIMIT, left)
        with tempfile.TemporaryFile("w+") as told:
            process = subprocess.Popen(
                [sys.executable, *sys.argv, "--piece", piece], stdout=subprocess.PIPE, stderr=told, text=True
            )
            (timer := threading.Timer(limit, process.kill)).start()
            for line in process.stdout or ():
                if line.startswith("{"):
                    found[piece] = json.loads(line)
                    about = found[piece].pop("line", "")
                    print(f"{time.perf_counter() - started:7.1f} s  {piece}  {about}", flush=True)
                    args.out.write_text(json.dumps(record, indent=1))
            is_late, code = not timer.is_alive(), process.wait()
            timer.cancel()
            told.seek(0)
            if code and not (is_late and limit < LIMIT and piece not in found):
                why = f"it was not done after {limit:.0f} s" if is_late else " ".join(told.read().splitlines()[-1:])
                found.setdefault(piece, {})["error"] = why[:300]
        print(f"{time.perf_counter() - started:7.1f} s  {piece}  {found.get(piece, {}).get('error', '')}", flush=True)
        args.out.write_text(json.dumps(record, indent=1))
    return found


def report(args: argparse.Namespace, found: dict[str, Result]) -> None:
    speed = found.get("bandwidth", {}).get("bytes_per_second")
    print(f"\nBandwidth of a large copy: {'-' if speed is None else f'{speed / 1e9:.1f} GB/s'}.\n")
    for name, numbers in found.get("probe", {}).items():
        print(f"{name}: {', '.join(f'{number:.3f}' for number in numbers)}" if name != "error" else "")
    timed = {piece: one for piece, one in found.items() if "ways" in one}

    def floor(size: int, ms: float) -> str:
        """The time in which the memory could be read, as a share of the time that it took."""
        return "-" if speed is None else f"{1e3 * size / speed / ms:.2f}"

    print_table_head(
        "generation", "way", "ms/token", "spread", "speed-up", "floor / time", "α", "M", "peak MiB", "first s"
    )
    for piece, one in timed.items():
        for name, way in one["ways"].items():
            cells = [f"{way['ms']:.3f}", f"±{way['spread']:.0%}"]
            cells.append(f"{one['ways']['plain']['ms'] / way['ms']:.2f}" if "plain" in one["ways"] else "-")
            cells += [
                floor(one["bytes"], way["ms"]),
                *(f"{way[key]:.2f}" if key in way else "-" for key in ("alpha", "m")),
            ]
            print_row(piece, name, *cells, f"{way['peak_mib']:.0f}", f"{way['first_seconds']:.1f}")
    print()
    print_table_head("forward", "kind", "ms", "of plain's", "floor / time")
    for piece, one in timed.items():
        for name, kind in one.get("forwards", {}).items():
            share = kind["ms"] / one["forwards"]["plain step"]["ms"]
            print_row(piece, name, f"{kind['ms']:.3f}", f"{share:.2f}", floor(kind["bytes"], kind["ms"]))
    print()
    print_table_head("training step", "callbacks", "s", "ratio")
    for piece, one in found.items():
        for name in VARIANTS if piece.startswith("training") and "plain" in one else ():
            print_row(piece, name, f"{one[name]:.3f}", f"{one[name] / one['plain']:.2f}")
    failed = {f"{piece}, {way}": why for piece, one in timed.items() for way, why in one["errors"].items()}
    failed |= {piece: one["error"] for piece, one in found.items() if "error" in one}
    failed |= {piece: "no time was left" for piece in pieces(args) if piece not in found}
    print()
    print_table_head("no result", "why")
    for piece, why in failed.items():
        print_row(piece, why.replace("|", "/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.json"), help="file of results, which a run may have begun"
    )
    parser.add_argument("--seconds", type=float, default=540, help="time limit; what takes longer is left out")
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"], choices=SHAPES, help="models that are timed")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8], help="batch sizes")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1024, 8192], help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a timed generation")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each way")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.piece is not None:
        name, *given = args.piece.split()
        done = json.loads(args.out.read_text())["pieces"] if args.out.exists() else {}
        result = PIECES[name](args, done, *given)
        for part in [result] if isinstance(result, dict) else result:
            print(json.dumps(part), flush=True)
        return
    torch.tensor(1, device=args.device)  # fails at once where torch has no such device
    about = {"machine": machine(torch.device(args.device)), "package": f"hf_selfspec {__version__}"}
    settings = {"dtype": args.dtype, "tokens": str(args.tokens), "repeats": str(args.repeats)}
    report(args, run(args, about | settings))


if __name__ == "__main__":
    main()
