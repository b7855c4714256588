"""How fast a model generates with itself on a stream of prompts of many kinds, beside transformers' own ways.

    python examples/measure_speed.py --model DIR --spec-bench spec_bench.jsonl --humaneval HumanEval.jsonl \\
        --gsm8k gsm8k_train.jsonl --text wikitext2_valid.txt --ways plain selfspec lookup2 lookup3 --json figures.json
    python examples/measure_speed.py --model DIR ... --do-sample --temperature 0.7 --top-p 0.9
    python examples/measure_speed.py --model DIR ... --batch 4
    python examples/measure_speed.py --model DIR ... --variants        (or --repeat)
    python examples/measure_speed.py --humaneval HumanEval.jsonl --kinds code library    (demo model)
    python examples/measure_speed.py --model DIR ... --spec "swift=SelfSpec.swift()" --spec "two=SelfSpec.layerskip(8)"

Prompts are chats; a model without a chat template (or --raw) goes on with the first 64 tokens of texts instead. All
ways see each prompt in turn, in an order that rotates. A `SelfSpec` is kept over the stream and is not warmed up, so
it learns in the stream; what its first call costs is told apart. `lookup2` is prompt lookup with n-grams of up to 2
tokens and 10 drafted ones, `lookup3-5` with up to 3 and 5. What figures mean is told in ``speed_report.py``.
"""

import argparse
import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from speed_ablations import ABLATIONS, free_verification, without
from speed_prompts import Batch, Encoder, Sources, batches_of, padding, repeated, stream_of, stream_of_variants
from speed_report import (
    LOOKUP,
    PLAIN,
    PREFILL,
    Figures,
    FirstCall,
    Run,
    Sample,
    cost_where_free,
    looping_share,
    report,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import hf_selfspec
from hf_selfspec import GenerationStats, SelfSpec, first_differences
from hf_selfspec.bench.measure import machine

PRESETS = {"selfspec": "SelfSpec()", "swift": "SelfSpec.swift()"}
LOOKUP_TOKENS = 10
BEGINNING = 64
# New tokens of a call that warms a way up.
WARM_UP = 8
# Statistics that have a value for each token or round; they are in the trace alone.
LONG = ("from_draft", "timeline", "matchness", "round_sizes")


@dataclass(frozen=True)
class Way:
    """One way of generating.

    Attributes:
        name: in tables.
        options: its own arguments of ``generate``.
        make: makes its ``SelfSpec``, ``None`` for transformers' ways.
    """

    name: str
    options: dict[str, Any]
    make: Callable[[], SelfSpec] | None = None

    @classmethod
    def of(cls, name: str, expression: str | None = None) -> "Way":
        """A way by its name, or by a Python expression with the public names of ``hf_selfspec``."""
        expression = expression or PRESETS.get(name)
        if expression is not None:
            names = {public: getattr(hf_selfspec, public) for public in hf_selfspec.__all__}
            return cls(name, {}, lambda: eval(expression, {**names, "hf_selfspec": hf_selfspec}))
        if lookup := LOOKUP.fullmatch(name):
            size, tokens = int(lookup[1]), int(lookup[2] or LOOKUP_TOKENS)
            return cls(name, {"max_matching_ngram_size": size, "prompt_lookup_num_tokens": tokens})
        if name == PREFILL:
            return cls(name, {"max_new_tokens": 1, "min_new_tokens": None})
        if name == PLAIN:
            return cls(name, {})
        known = ", ".join((PLAIN, *PRESETS, "lookup2", "lookup3-5"))
        raise SystemExit(f"--ways: {name!r} is not known. Give one of {known}, or define it with --spec.")


class Bench:
    """Times calls of ``generate``.

    Args:
        model: the model.
        options: arguments of ``generate``, the same for all ways.
        seed: of drawn tokens; each prompt begins with the same state of the generator in all ways.
        trace: gets our statistics of each call as a line of JSON, ``None`` for none.
    """

    def __init__(self, model: PreTrainedModel, options: dict[str, Any], seed: int, trace: Path | None) -> None:
        self.model, self.options, self.seed, self.trace = model, options, seed, trace
        eos = model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])
        if trace is not None:
            trace.write_text("")

    def run(self, way: Way, batch: Batch, index: int, spec: SelfSpec | None = None, **more: Any) -> Run:
        """One call.

        Args:
            way: how.
            batch: the prompts.
            index: their place in the stream.
            spec: of a way of ours.
            more: further arguments of ``generate``.
        """
        options = {**self.options, **way.options, **more}
        if spec is not None:
            options["assistant"] = spec
        torch.manual_seed(self.seed + index)
        self._wait()
        wall, cpu = perf_counter(), process_time()
        output = self.model.generate(batch.ids, attention_mask=batch.mask, **options)
        self._wait()
        wall, cpu = perf_counter() - wall, process_time() - cpu
        ids = [self._until_end(row) for row in output[:, batch.ids.shape[1] :].tolist()]
        tokens = sum(map(len, ids))
        looping = sum(looping_share(row) * len(row) for row in ids) / tokens
        found = Run(wall, cpu, tokens, ids, looping)
        stats = None if spec is None else spec.stats
        if stats is not None:
            found.stats, found.free = _summary(stats), _free(stats)
            self._write(way, batch, index, stats)
        return found

    def compare(self, sample: Sample, batch: Batch) -> None:
        """Finds where ids are not plain generate's."""
        plain = sample.runs[PLAIN].ids
        for name, run in sample.runs.items():
            if name == PREFILL or run.ids == plain:
                continue
            width = batch.ids.shape[1]
            both = first_differences(self.model, *self._padded(batch, plain, run.ids), batch.mask)
            run.differences = [
                {"row": d.row, "position": d.column - width, "margin": d.margin, "is_near_tie": d.is_near_tie}
                for d in both
            ]

    def _padded(self, batch: Batch, *texts: list[list[int]]) -> list[torch.Tensor]:
        pad = self.options["pad_token_id"]
        longest = max(len(row) for text in texts for row in text)
        rows = [[[*row, *[pad] * (longest - len(row))] for row in text] for text in texts]
        return [torch.cat([batch.ids, torch.tensor(text, device=batch.ids.device)], dim=1) for text in rows]

    def _until_end(self, row: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(row) if token in self._eos), len(row))
        return row[: end + 1]

    def _wait(self) -> None:
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize(self.model.device)

    def _write(self, way: Way, batch: Batch, index: int, stats: GenerationStats) -> None:
        if self.trace is not None:
            line = {"way": way.name, "index": index, "kind": batch.kind, "stats": vars(stats)}
            with self.trace.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")


def _summary(stats: GenerationStats) -> dict[str, Any]:
    known = {name: value for name, value in vars(stats).items() if name not in LONG}
    return json.loads(json.dumps({**known, "rows": len(stats.from_draft)}, default=str))


def _free(stats: GenerationStats) -> tuple[float, float] | None:
    """Tokens and cost where verification is free, if each round's are recorded; those of one text at a time."""
    sizes = getattr(stats, "round_sizes", None)
    if sizes is None or len(stats.from_draft) != 1:
        return None
    return cost_where_free(sizes) if sizes else (stats.tokens - 1, stats.rounds)


def measure(bench: Bench, ways: list[Way], batches: list[Batch], figures: Figures, first_calls: int, path: Path | None):
    """Runs all ways on all prompts in turn; what is known so far is in ``figures`` and at ``path``."""
    specs = {way.name: way.make() for way in ways if way.make is not None}
    for way in ways:
        if way.make is None:
            bench.run(way, batches[0], 0, **({} if way.name == PREFILL else _new_tokens(WARM_UP)))
    plain = next(way for way in ways if way.name == PLAIN)
    for index, batch in enumerate(batches):
        sample = Sample(batch.kind, batch.mask.sum(1).tolist())
        for way in ways[index % len(ways) :] + ways[: index % len(ways)]:
            spec = specs.get(way.name)
            if index == 0 and spec is not None:
                call = first_call(bench, plain, way, spec, batch, index)
                figures.first_calls.append(call)
                sample.runs[way.name] = call.run
            else:
                sample.runs[way.name] = bench.run(way, batch, index, spec)
        sample.runs = {way.name: sample.runs[way.name] for way in ways}
        if not bench.options["do_sample"]:
            bench.compare(sample, batch)
        figures.samples.append(sample)
        _keep(figures, path)
        print(_progress(index, len(batches), sample), flush=True)
    for index, batch in enumerate(batches[1 : first_calls + 1], start=1):
        for way in ways:
            if way.make is not None:
                figures.first_calls.append(first_call(bench, plain, way, way.make(), batch, index))
                _keep(figures, path)


def first_call(bench: Bench, plain: Way, way: Way, spec: SelfSpec, batch: Batch, index: int) -> FirstCall:
    """A call with a new ``SelfSpec``, between two of plain generate."""
    before, run, after = (
        bench.run(one, batch, index, given) for one, given in ((plain, None), (way, spec), (plain, None))
    )
    return FirstCall(way.name, batch.kind, before, run, after)


def _keep(figures: Figures, path: Path | None) -> None:
    if path is not None:
        figures.save(path)


def _progress(index: int, count: int, sample: Sample) -> str:
    plain = sample.runs[PLAIN]
    speeds = [
        f"{name} {plain.wall / plain.tokens / (run.wall / run.tokens):.2f}{'!' if run.differences else ''}"
        for name, run in sample.runs.items()
        if name not in (PLAIN, PREFILL)
    ]
    tokens = "+".join(map(str, sample.prompt_tokens))
    head = f"{index + 1}/{count} {sample.kind}, {tokens} tokens, {plain.tokens} new in {plain.wall:.2f} s"
    return f"{head}, looping {plain.looping:.2f}; whole call: {', '.join(speeds)}"


def _new_tokens(count: int) -> dict[str, int | None]:
    return {"max_new_tokens": count, "min_new_tokens": None}


def chosen_batches(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Batch], Counter[str]]:
    """The stream, and by kind how many prompts did not fit."""
    sources = Sources(options.spec_bench, options.humaneval, options.gsm8k, options.text)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = (positions or sys.maxsize) - options.max_new_tokens
    raw = options.raw or tokenizer.chat_template is None
    if raw and options.variants:
        raise SystemExit("--variants are chats; this model has no chat template, or --raw was given.")
    encoder = Encoder(tokenizer, min(longest, options.max_prompt_tokens or longest), BEGINNING if raw else None)
    rng = random.Random(options.seed)
    texts = sources.pairs() if options.variants else sources.beginnings() if raw else sources.questions()
    kinds = options.kinds or list(texts)
    if not texts or not set(kinds) <= set(texts):
        raise SystemExit(f"There are no prompts of {', '.join(kinds) or 'any kind'}; files give {', '.join(texts)}.")
    make = stream_of_variants if options.variants else stream_of
    stream = make({kind: texts[kind] for kind in kinds}, encoder, options.prompts_per_kind, rng)
    stream = repeated(stream) if options.repeat else stream
    batches = batches_of(stream, options.batch, padding(tokenizer), options.device)
    if not batches:
        raise SystemExit("No prompt fits, or fewer than --batch.")
    return batches, encoder.left_out


def ways_of(options: argparse.Namespace) -> list[Way]:
    """Prefill, plain and what was named."""
    defined = dict(spec.split("=", 1) for spec in options.spec)
    names = [PREFILL, PLAIN, *options.ways, *defined]
    ways = [Way.of(name, defined.get(name)) for name in dict.fromkeys(names)]
    if options.batch == 1:
        return ways
    return [way for way in ways if "prompt_lookup_num_tokens" not in way.options]  # it takes one prompt at a time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "demo_model")
    parser.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench: six kinds")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl: code and editing")
    parser.add_argument("--gsm8k", type=Path, help="JSON lines with a `question` each")
    parser.add_argument("--text", type=Path, help="plain text, a paragraph a line: editing")
    parser.add_argument("--kinds", nargs="+", help="only these, in this order")
    parser.add_argument("--prompts-per-kind", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, help="longer prompts are left out")
    parser.add_argument("--raw", action="store_true", help=f"the first {BEGINNING} tokens of texts, no chats")
    parser.add_argument("--variants", action="store_true", help="each prompt and, later, a variant of it")
    parser.add_argument("--repeat", action="store_true", help="the whole stream twice")
    parser.add_argument("--batch", type=int, default=1, help="prompts that are generated together")
    parser.add_argument("--ways", nargs="+", default=[PLAIN, "selfspec", "lookup2", "lookup3", "lookup2-5"])
    parser.add_argument("--spec", action="append", default=[], metavar="NAME=EXPRESSION", help="a further SelfSpec")
    parser.add_argument("--first-calls", type=int, default=0, help="prompts with a new SelfSpec each, afterwards")
    parser.add_argument("--do-sample", action="store_true")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--without", nargs="+", choices=ABLATIONS, default=[], help="an ablation of ours")
    parser.add_argument("--free-verification", action="store_true", help="drafts as on a GPU; see the simulated figure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), help="of the tables by kind; cpu with one thread of a CPU")
    parser.add_argument("--json", type=Path, help="everything, written after each prompt")
    parser.add_argument("--trace", type=Path, help="our statistics of each call, a line of JSON each")
    options = parser.parse_args()
    one_thread = options.device == "cpu" and options.threads == 1
    options.clock = options.clock or ("cpu" if one_thread else "wall")
    return options


def generate_options(options: argparse.Namespace, pad: int) -> dict[str, Any]:
    found: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.do_sample}
    if options.do_sample:  # texts differ, so all are as long
        found["min_new_tokens"] = options.max_new_tokens
        found |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    return {**found, "pad_token_id": pad}


def main() -> None:
    """Run the command line."""
    options = arguments()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    model.to(options.device)
    batches, left_out = chosen_batches(options, model, tokenizer)
    about = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    about |= {"machine": machine(torch.device(options.device)), "left_out": dict(+left_out)}
    print(f"{about['machine']}, {options.dtype}; {len(batches)} prompts or batches; left out: {about['left_out']}")
    print(f"\n`python examples/measure_speed.py {' '.join(sys.argv[1:])}`\n", flush=True)
    figures = Figures(about)
    bench = Bench(model, generate_options(options, padding(tokenizer)), options.seed, options.trace)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        stack.enter_context(without(options.without))
        if options.free_verification:
            stack.enter_context(free_verification())
        measure(bench, ways_of(options), batches, figures, options.first_calls, options.json)
    print(f"\n{report(figures, options.clock)}")


if __name__ == "__main__":
    main()
