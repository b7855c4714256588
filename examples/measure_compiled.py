"""Compiled decoding with a model that drafts for itself, beside transformers' static cache with compiled decoding.

    python examples/measure_compiled.py --model DIR --spec-bench spec_bench.jsonl --humaneval HumanEval.jsonl \\
        --kinds summary code editing --prompts-per-kind 2 --max-new-tokens 64 --max-prompt-tokens 300

Options are those of ``measure_speed.py``. The stream runs three times, and the last time counts: shapes are
compiled when they come for the second time. Decoding is the whole call less a call of one token.
"""

from collections import defaultdict
from statistics import median

import torch
from measure_speed import Bench, Way, arguments, chosen_batches, generate_options, padding
from speed_report import PREFILL
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig

from hf_selfspec import SelfSpec
from hf_selfspec.bench.measure import machine

COMPILED = CompileConfig(mode="default")
COMPILED._compile_all_devices = True  # a CPU, too
STATIC = {"cache_implementation": "static", "compile_config": COMPILED}


def main() -> None:
    """Run the command line."""
    options = arguments()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    model.to(options.device)
    batches, _ = chosen_batches(options, model, tokenizer)
    longest = max(batch.ids.shape[1] for batch in batches) + options.max_new_tokens
    ways = {
        PREFILL: Way.of(PREFILL),
        "plain": Way("plain", {}),
        "static, compiled": Way("static, compiled", STATIC | {"max_cache_len": longest}),
        "SelfSpec()": Way("SelfSpec()", {}, SelfSpec),
        "SelfSpec(compile=...)": Way("SelfSpec(compile=...)", {}, lambda: SelfSpec(compile=COMPILED)),
    }
    bench = Bench(model, generate_options(options, padding(tokenizer)), options.seed, None)
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    equal = dict.fromkeys(ways, 0)
    for counts in (False, False, True):
        specs = {name: way.make() for name, way in ways.items() if way.make is not None}
        for index, batch in enumerate(batches):
            runs = {name: bench.run(way, batch, index, specs.get(name)) for name, way in ways.items()}
            for name, run in runs.items():
                spent = run.cpu if options.clock == "cpu" else run.wall
                first = runs[PREFILL].cpu if options.clock == "cpu" else runs[PREFILL].wall
                if counts and name != PREFILL:
                    seconds[batch.kind][name] += spent - first
                    equal[name] += run.ids == runs["plain"].ids
            print(f"{'counted' if counts else 'not counted'}, {batch.kind}", flush=True)
    print(f"\n{machine(torch.device(options.device))}; decoding, {options.clock} time; {len(batches)} prompts\n")
    names = [name for name in ways if name != PREFILL]
    print("| kind | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for kind, found in seconds.items():
        print(f"| {kind} | " + " | ".join(f"{found['plain'] / found[name]:.2f}" for name in names) + " |")
    print("| ids of plain | " + " | ".join(f"{equal[name]}/{len(batches)}" for name in names) + " |")
    over = [found["static, compiled"] / found["SelfSpec(compile=...)"] for found in seconds.values()]
    print(
        f"\nSelfSpec(compile=...) over static, compiled: {median(over):.2f} (median of kinds), lowest {min(over):.2f}"
    )


if __name__ == "__main__":
    main()
