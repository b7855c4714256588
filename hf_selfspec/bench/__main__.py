"""Command line of the measurements, one command per figure: it prints Markdown tables."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from ..draft.early_exit import EarlyExit
from ..draft.skip_layers import SkipLayers
from ..search.on_the_fly import ClosestLayers
from ..selfspec import SelfSpec
from ..stop.rules import FixedLength
from . import known_answer
from .engine import EngineFigures, engine_figures, peak_memory
from .forward import COUNTS, forward_seconds
from .gpu.command import main as gpu
from .measure import machine
from .synthetic import LlamaShape, damped_llama, known_skips_llama, random_prompt
from .training import VARIANTS, TrainingShape, peak_training_memory, step_seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_selfspec.bench",
        description="Engine figures on random models whose early exit agrees at a set rate (synthetic acceptance).",
        epilog="`gpu` in the place of the figure checks and times an accelerator; it has options of its own.",
    )
    parser.add_argument(
        "figure",
        choices=("engine", "context", "batch", "memory", "training", "known-answer", "forward"),
        help="engine: efficiency; context: cost per token by context; batch: by batch size; memory: peak memory; "
        "training: step time and peak memory with early-exit loss and with layer dropout; known-answer: how well "
        "searches find the half of the blocks that hardly matters; forward: our forwards over 1 to 32 tokens over "
        "transformers' own over one",
    )
    parser.add_argument("--model", help="folder or name of the model whose forwards are timed (forward)")
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024], help="hidden sizes")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16", "float16")
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intermediate", type=int, default=None, help="MLP width, 8/3 of the hidden size by default")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--draft",
        choices=("exit", "skips", "search"),
        default="exit",
        help="an early exit; the known half of the blocks, which hardly matter; or the search for them on that model",
    )
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--agreement", type=float, help="0.8 of an exit, 0.95 of the known set by default")
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="batch sizes")
    parser.add_argument("--prompt", type=int, nargs="+", default=None, help="prompt lengths")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=552, help="sets that each search tries (known-answer)")
    parser.add_argument("--plot", help="file for the picture (known-answer)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak-of", choices=("plain", "ours", *VARIANTS), help=argparse.SUPPRESS)
    return parser


def _row(name: str, figures: EngineFigures) -> str:
    cells = (
        name,
        f"{figures.plain_ms:.2f}",
        f"{figures.ours_ms:.2f}",
        f"±{figures.spread:.0%}",
        f"{figures.acceptance_rate:.2f}",
        f"{figures.mean_generated_length:.2f}",
        f"{figures.draft_cost:.3f}",
        f"{figures.verify_cost:.3f}",
        f"{figures.speedup:.2f}",
        f"{figures.expected:.2f}",
        f"{figures.efficiency:.2f}",
        f"{figures.outside:.1%}",
    )
    return "| " + " | ".join(cells) + " |"


_COLUMNS = (
    "case", "plain ms/token", "ours ms/token", "spread", "α", "M", "c", "verify", "speed-up", "expected", "efficiency",
    "outside",
)  # fmt: skip
_HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def _peak(args: argparse.Namespace, width: int, dtype: str, variant: str) -> float:
    """Peak memory of one variant in a process of its own."""
    command = [sys.executable, "-m", "hf_selfspec.bench", args.figure, "--peak-of", variant]
    command += ["--width", str(width), "--dtype", dtype, "--device", args.device, "--layers", str(args.layers)]
    command += [
        "--exit-layer",
        str(args.exit_layer),
        "--vocabulary",
        str(args.vocabulary),
        "--tokens",
        str(args.tokens),
    ]
    command += ["--threads", str(args.threads), "--prompt", str(args.prompt[0]), "--rows", str(args.rows[0])]
    command += ["--draft", args.draft]
    if args.intermediate is not None:
        command += ["--intermediate", str(args.intermediate)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _cases(args: argparse.Namespace) -> list[tuple[int, int]]:
    """``(rows, prompt length)`` of each measurement."""
    defaults = {
        "engine": ([1], [64]),
        "memory": ([1], [512]),
        "context": ([1], [512, 8192]),
        "batch": ([1, 4, 8], [64]),
        "training": ([2], [512]),
    }
    rows, prompts = defaults[args.figure]
    args.rows = args.rows or rows
    args.prompt = args.prompt or prompts
    return [(r, p) for r in args.rows for p in args.prompt]


def _training(args: argparse.Namespace, width: int, dtype: str, rows: int, tokens: int) -> None:
    """Step time and peak memory of training, one model and batch."""
    shape = TrainingShape(
        width=width,
        layers=args.layers,
        intermediate=args.intermediate or width * 8 // 3 // 64 * 64,
        vocabulary=args.vocabulary,
        batch=rows,
        tokens=tokens,
        bf16=dtype == "bfloat16",
    )
    if args.peak_of is not None:
        print(json.dumps(peak_training_memory(shape, args.peak_of, args.device)))
        return
    print(f"{machine(torch.device(args.device))}; stock Trainer, AdamW, random tokens; {shape}")
    print(f"python -m hf_selfspec.bench {' '.join(sys.argv[1:])}\n")
    print("| callbacks | s/step | ratio | peak MiB | ratio |\n|---|---|---|---|---|")
    memory = {name: _peak(args, width, dtype, name) for name in VARIANTS}
    seconds = step_seconds(shape, args.repeats, args.device)
    for name in VARIANTS:
        time, peak = seconds[name], memory[name]
        ratios = time / seconds["plain"], peak / memory["plain"]
        print(f"| {name} | {time:.2f} | {ratios[0]:.2f} | {peak:.0f} | {ratios[1]:.3f} |", flush=True)


def _spec(args: argparse.Namespace) -> SelfSpec:
    """Drafts of the kind that was asked for, as far as the model need not be known."""
    if args.draft == "exit":
        return SelfSpec(EarlyExit(args.exit_layer), FixedLength(args.num_draft))
    if args.draft == "search":
        return SelfSpec(SkipLayers(search=ClosestLayers()))
    return SelfSpec(SkipLayers(), FixedLength(args.num_draft))


def _model_and_spec(args: argparse.Namespace, shape: LlamaShape) -> tuple[LlamaForCausalLM, SelfSpec]:
    """The model whose agreement is set, and what drafts; a search is over before it is timed."""
    if args.draft == "exit":
        return damped_llama(shape, args.exit_layer, args.num_draft, args.agreement)[0], _spec(args)
    model, known, _ = known_skips_llama(shape, num_draft=args.num_draft, agreement=args.agreement)
    if args.draft == "skips":
        return model, SelfSpec(known, FixedLength(args.num_draft))
    spec = _spec(args)
    while spec.stats is None or spec.stats.phase == "optimization":
        model.generate(**random_prompt(model, 1, 64), max_new_tokens=args.tokens, do_sample=False, assistant=spec)
    return model, spec


def _known_answer(args: argparse.Namespace) -> None:
    """All searches on one model."""
    shape = LlamaShape(
        args.width[0],
        args.layers,
        args.intermediate,
        args.vocabulary,
        dtype=getattr(torch, args.dtype[0]),
        device=args.device,
    )
    model, known, agreement = known_skips_llama(shape, agreement=args.agreement)
    print(
        f"{machine(torch.device(args.device))}; synthetic acceptance, the known set agrees on {agreement:.2f}; {shape}"
    )
    print(f"python -m hf_selfspec.bench {' '.join(sys.argv[1:])}\n\n{known_answer.HEAD}")
    courses = {}
    for name, settings in known_answer.proposers(args.steps).items():
        courses[name] = known_answer.follow(model, known, 0.5, settings)
        print(courses[name].row(name), flush=True)
    if args.plot is not None:
        known_answer.plot(courses, f"{args.layers} layers of width {args.width[0]}", args.plot)


def _forward(args: argparse.Namespace) -> None:
    """Forwards over few tokens of a model that was named, or of random ones."""
    context = (args.prompt or [300])[0]
    print(f"{machine(torch.device(args.device))}; {context} tokens before, medians of {args.repeats}")
    print(f"python -m hf_selfspec.bench {' '.join(sys.argv[1:])}\n")
    print(
        f"| forward, in transformers' over one token | {' | '.join(map(str, COUNTS))} |\n{'|---' * (len(COUNTS) + 1)}|"
    )
    for width, name in itertools.product(args.width if args.model is None else [None], args.dtype):
        dtype = getattr(torch, name)
        if width is None:
            model: PreTrainedModel = (
                AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
            )
        else:
            model = LlamaShape(
                width, args.layers, args.intermediate, args.vocabulary, dtype=dtype, device=args.device
            ).model()
        theirs, ours = forward_seconds(model, context, args.repeats)
        for whose, seconds in (("transformers", theirs), ("ours", ours)):
            ratios = " | ".join(f"{seconds[count] / theirs[1]:.2f}" for count in COUNTS)
            print(f"| {args.model or f'width {width}'}, {name}, {whose} | {ratios} |", flush=True)


def main() -> None:
    """Runs one figure and prints it as a table."""
    if sys.argv[1:2] == ["gpu"]:
        sys.exit(gpu(sys.argv[2:]))
    args = _parser().parse_args()
    has_known_set = args.figure == "known-answer" or args.draft != "exit"
    args.agreement = args.agreement or (0.95 if has_known_set else 0.8)
    torch.set_num_threads(args.threads)
    if args.figure == "known-answer":
        _known_answer(args)
        return
    if args.figure == "forward":
        _forward(args)
        return
    cases = _cases(args)
    if args.figure == "training":
        for width, dtype, case in itertools.product(args.width, args.dtype, cases):
            _training(args, width, dtype, *case)
        return
    if args.peak_of is None:
        print(f"{machine(torch.device(args.device))}; synthetic acceptance; {args.tokens} new tokens, greedy")
        print(f"python -m hf_selfspec.bench {' '.join(sys.argv[1:])}\n")
        print("| case | plain MiB | ours MiB | ours / plain |\n|---|---|---|---|" if args.figure == "memory" else _HEAD)
    for width in args.width:
        for dtype in args.dtype:
            if args.figure == "memory" and args.peak_of is None:
                plain, ours = (_peak(args, width, dtype, variant) for variant in ("plain", "ours"))
                print(f"| width {width}, {dtype} | {plain:.1f} | {ours:.1f} | {ours / plain:.3f} |", flush=True)
                continue
            shape = LlamaShape(
                width,
                args.layers,
                args.intermediate,
                args.vocabulary,
                dtype=getattr(torch, dtype),
                device=args.device,
            )
            if args.peak_of is not None:  # memory does not depend on the agreement
                spec = None if args.peak_of == "plain" else _spec(args)
                print(json.dumps(peak_memory(shape.model(), spec, *cases[0], args.tokens)))
                return
            model, spec = _model_and_spec(args, shape)
            for rows, prompt in cases:
                figures = engine_figures(model, spec, rows, prompt, args.tokens, args.repeats)
                print(_row(f"width {width}, {dtype}, batch {rows}, prompt {prompt}", figures), flush=True)


if __name__ == "__main__":
    main()
