"""How fast the demo model generates with its own early layers, beside transformers' ways and what is attainable.

    python examples/measure_demo_model.py --humaneval HumanEval.jsonl --output figures
    python examples/measure_demo_model.py --humaneval HumanEval.jsonl --twin twin --plot exits.png

Prompts are the first 64 tokens of HumanEval tasks (https://github.com/openai/human-eval) and of held-out files of the
standard library. Everything is timed in turn, prompt by prompt, in float32. The exit and draft length of each way are
chosen on other prompts than the timed ones.
"""

import argparse
import json
import math
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from train_demo_model import encode, read_corpus
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from hf_selfspec import SelfSpec
from hf_selfspec.bench.measure import machine
from hf_selfspec.bench.trained import Asked, Speed, Way, attainable, compare, without_reuse

PROMPT = 64
CHOOSING = 8
TEMPERATURE, TOP_P = 0.6, 0.9
MODES = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0},
}
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)])


def prompts_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[torch.Tensor]:
    """The first 64 tokens, shape (1, 64), of ``count`` texts that have more."""
    found = [encode(tokenizer, [text]) for text in texts]
    long_enough = [ids[None, :PROMPT] for ids in found if len(ids) > PROMPT]
    if len(long_enough) < count:
        raise SystemExit(f"{count} prompts of {PROMPT} tokens are needed, the texts give {len(long_enough)}")
    return long_enough[:count]


def held_out_texts(pieces: int = 3) -> list[str]:
    """Held-out files of the standard library, some of them from the middle, so that there are prompts enough."""
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    texts = []
    for part in range(pieces):
        for text in corpus.held_out:
            start = text.find("\ndef ", part * len(text) // pieces)
            texts.append(text[start + 1 :] if part and start >= 0 else text)
    return texts


def best_early_exit(asked: Asked, prompts: Sequence[torch.Tensor], layers: int) -> tuple[int, int]:
    """Exit and draft length at which transformers' early exit is fastest on ``prompts``."""
    grid = [
        (layer, length)
        for layer in sorted({min(3, layers - 1), min(4, layers - 1), -(-layers // 4), -(-layers // 3)})
        for length in (1, 2, 4)
    ]
    ways = {f"{case}": asked.early_exit(*case) for case in grid}
    speeds = compare(ways, prompts[:2], repeats=1)
    return min(grid, key=lambda case: speeds[f"{case}"].ms_per_token)


def choose(asked: Asked, prompts: Sequence[torch.Tensor]) -> SelfSpec:
    """A spec that has probed the model on ``prompts``."""
    spec = SelfSpec.layerskip()
    run = asked.plain(assistant=spec)
    for ids in prompts:
        run(ids)
    return spec


def row(name: str, speed: Speed, plain: Speed, notes: str = "") -> str:
    rate = f"{speed.acceptance_rate:.2f} | {speed.mean_generated_length:.2f}" if speed.runs else " | "
    same = f"{sum(speed.same)}/{len(speed.same)}"
    ratio = plain.ms_per_token / speed.ms_per_token
    return f"| {name} | {speed.ms_per_token:.2f} | {ratio:.2f} | {rate} | {same} | {notes} |"


def tables(
    model: PreTrainedModel, sets: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]], tokens: int, repeats: int
) -> str:
    """The figures of all modes and prompt sets, as Markdown."""
    layers = model.config.num_hidden_layers
    lines = []
    for mode, options in MODES.items():
        asked = Asked(model, {"max_new_tokens": tokens, **options})
        for name, (choosing, timed) in sets.items():
            spec = choose(asked, choosing)
            choice = spec.choice(model)
            if choice is None:
                raise SystemExit(f"--tokens {tokens} is too short for the probe; give at least 40")
            layer = choice.layer or layers // 4
            exit_layer, length = best_early_exit(asked, choosing, layers)
            only = SelfSpec.early_exit_only(layer)
            given = SelfSpec.layerskip(layer, stop=choice.stop)
            specs = {"ours": spec, "with KVQ reuse": given, "without KVQ reuse": given, "early exit only": only}
            with_reuse = asked.plain(assistant=given)

            def without(ids: torch.Tensor, run: Way = with_reuse) -> torch.Tensor:
                with without_reuse(model):
                    return run(ids)

            ways = {
                "plain generate": asked.plain(),
                "assistant_early_exit": asked.early_exit(exit_layer, length),
                "prompt lookup": asked.plain(prompt_lookup_num_tokens=4),
                "ours": asked.plain(assistant=spec),
                "with KVQ reuse": with_reuse,
                "without KVQ reuse": without,
                "early exit only": asked.plain(assistant=only),
            }
            speeds = compare(ways, timed, repeats, specs)
            plain = speeds["plain generate"]
            texts = [asked.plain()(ids) for ids in timed]
            best = attainable(model, texts, PROMPT, WARPERS if options["do_sample"] else None)
            lines += [
                f"\n### {name}, {mode}\n",
                "| way | ms per token | speed-up | α | M | same ids | |\n|---|---|---|---|---|---|---|",
                row("plain generate", plain, plain),
                row(
                    "assistant_early_exit", speeds["assistant_early_exit"], plain, f"E = {exit_layer}, {length} tokens"
                ),
                row("prompt lookup", speeds["prompt lookup"], plain, "4 tokens"),
                row("ours", speeds["ours"], plain, f"E = {choice.layer}, {choice.stop}"),
                row("the same exit and rule, KVQ reuse always", speeds["with KVQ reuse"], plain),
                row("the same exit and rule, KVQ reuse never", speeds["without KVQ reuse"], plain),
                row("early exit only", speeds["early exit only"], plain, f"E = {layer}"),
                f"\nAttainable (forwards alone): {best.expected_speedup:.2f} at E = {best.layer}, {best.stop}, "
                f"α {best.acceptance_rate:.2f}; ours reaches "
                f"{plain.ms_per_token / speeds['ours'].ms_per_token / best.expected_speedup:.2f} of it, and "
                f"{speeds['assistant_early_exit'].ms_per_token / speeds['ours'].ms_per_token:.2f}x transformers' early "
                "exit.",
            ]
            print("\n".join(lines[-10:]), flush=True)
    return "\n".join(lines)


def by_exit(
    model: PreTrainedModel, prompts: list[torch.Tensor], exits: Sequence[int], tokens: int
) -> tuple[float, list[Speed]]:
    """Tokens per second of plain generate, and our speed at each exit with the draft length that a probe finds."""
    asked = Asked(model, {"max_new_tokens": tokens, "do_sample": False})
    specs = {str(layer): SelfSpec.layerskip(layer) for layer in exits}
    for spec in specs.values():
        for ids in prompts[:CHOOSING]:
            asked.plain(assistant=spec)(ids)
    ways = {"plain": asked.plain(), **{name: asked.plain(assistant=spec) for name, spec in specs.items()}}
    speeds = compare(ways, prompts[CHOOSING:], 1, specs)
    return 1e3 / speeds["plain"].ms_per_token, [speeds[name] for name in specs]


def drafted_rate(speed: Speed) -> float:
    """α, no number where the probe found that no draft pays."""
    return speed.acceptance_rate if any(run.drafted for run in speed.runs) else math.nan


def plot(found: dict[str, tuple[float, list[Speed]]], exits: Sequence[int], path: Path) -> None:
    """Draw tokens per second and acceptance rate by exit layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    speed, rate = figure.subplots(1, 2)
    for name, (plain, speeds) in found.items():
        (line,) = speed.plot(exits, [1e3 / s.ms_per_token for s in speeds], marker="o", label=name)
        speed.axhline(plain, color=line.get_color(), linestyle=":", label=f"{name}, plain generate")
        rate.plot(exits, [drafted_rate(s) for s in speeds], marker="o", label=name)
    speed.set(xlabel="exit layer", ylabel="tokens per second", ylim=(0, None))
    rate.set(xlabel="exit layer", ylabel="acceptance rate α", ylim=(0, 1))
    for axes in (speed, rate):
        axes.set_xticks(exits)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every run has the same number of tokens
    return model


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "demo_model")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl")
    parser.add_argument("--output", type=Path, help="Markdown file for the tables")
    parser.add_argument("--twin", type=Path, help="a model to draw beside; needs --plot")
    parser.add_argument("--plot", type=Path, help="file for the picture of speed by exit layer, instead of the tables")
    parser.add_argument("--prompts", type=int, default=20, help="timed prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks = [json.loads(line)["prompt"] for line in options.humaneval.read_text().splitlines()]
    count = CHOOSING + options.prompts
    prompts = {
        "HumanEval": prompts_of(tasks, tokenizer, count),
        "standard library": prompts_of(held_out_texts(), tokenizer, count),
    }
    title = (
        f"{machine(torch.device('cpu'))}, float32; {options.prompts} prompts of {PROMPT} tokens, {options.tokens} new "
        f"tokens, medians of {options.repeats}\n\n`python examples/measure_demo_model.py {' '.join(sys.argv[1:])}`"
    )
    print(title, flush=True)
    model = load(options.model)
    if options.plot is None:
        sets = {name: (ids[:CHOOSING], ids[CHOOSING:]) for name, ids in prompts.items()}
        text = tables(model, sets, options.tokens, options.repeats)
        if options.output is not None:
            options.output.write_text(f"{title}\n{text}\n", encoding="utf-8")
        return
    layers = model.config.num_hidden_layers
    some = {1, 2, 3, 4, layers // 4, layers // 3, layers // 2, 2 * layers // 3, 5 * layers // 6}
    exits = sorted(layer for layer in some if 1 <= layer < layers)
    models = {"LayerSkip": model} | ({} if options.twin is None else {"twin": load(options.twin)})
    found = {name: by_exit(m, prompts["standard library"], exits, options.tokens) for name, m in models.items()}
    for name, (plain, speeds) in found.items():
        print(f"{name}: plain {plain:.1f} tokens/s")
        for layer, speed in zip(exits, speeds, strict=True):
            print(f"  exit {layer}: {1e3 / speed.ms_per_token:.1f} tokens/s, α {drafted_rate(speed):.2f}")
    plot(found, exits, options.plot)


if __name__ == "__main__":
    main()
