"""Stop rules, adapters and exit heads on a trained model."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import TopPLogitsWarper

from ...draft.early_exit import EarlyExit
from ...draft.exit_heads import DynamicExit
from ...files import path_of
from ...loading import NamedModel
from ...model.plan import LayerPlan
from ...modules import Adapter, ExitHeads, LinearProbe
from ...modules.heads import METRICS
from ...search.replay import Replay, Trace, replays, rules
from ...selfspec import SelfSpec
from ...stop.adaptive import AdaptiveThreshold
from ...stop.rules import ConfidenceThreshold, FixedLength, ProductThreshold
from ...train import fit_adapter, fit_exit_heads, fit_probe
from ...train.fit_trainer import training_arguments
from ..trained import Asked, Speed, Way, _traces, compare, forward_costs
from .figure import Figure, print_head
from .prompts import PROMPT, add_prompts, column, held_out_texts, load, prompts_of, standard_library

LENGTHS = (1, 2, 3, 4, 5, 6)
Options = dict[str, Any]
EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9)


class Fits:
    """Fits parts on the same text, or loads what an earlier run has fitted."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], folder: Path, rate: float
    ) -> None:
        self.model, self.tokenizer, self.texts, self.folder, self.rate = model, tokenizer, texts, folder, rate

    def __call__(self, fit: Callable[..., Any], kind: Any, name: str, **options: Any) -> Any:
        """Returns the part of that name and prints its recipe and figures."""
        out = self.folder / name
        if not (out / "model.safetensors").exists():
            args = training_arguments(str(out), self.model.device, learning_rate=self.rate, disable_tqdm=True)
            fit(self.model, self.tokenizer, self.texts, args=args, output_dir=out, **options)
        part = kind.load(out)
        known = {**part.about["recipe"], **part.about["figures"]}
        print(f"{name}: {part.num_parameters:,} parameters; " + ", ".join(f"{k} {v}" for k, v in known.items()))
        return part


def row(name: str, speed: Speed, plain: Speed, *more: str) -> str:
    """Returns a row of a table."""
    ratios = [p / s for p, s in zip(plain.seconds, speed.seconds, strict=True)]
    spread = 1.96 * stdev(ratios) / math.sqrt(len(ratios))
    cells = [name, f"{plain.ms_per_token / speed.ms_per_token:.3f}", f"{mean(ratios):.3f} ± {spread:.3f}"]
    cells += [f"{speed.acceptance_rate:.2f}", f"{speed.mean_generated_length:.2f}", *more]
    return f"| {' | '.join(cells)} |"


def stops(fits: Fits, prompts: list[torch.Tensor], options: Options, exit_layer: int, repeats: int) -> None:
    """Measures stop rules as in AdaSPEED's Figure 1 and Table I."""
    model, sampled = fits.model, options["do_sample"]
    top_p = options.get("top_p")
    probe = fits(
        fit_probe, LinearProbe, f"probe-{exit_layer}-{'drawn' if sampled else 'greedy'}",
        exit_layer=exit_layer, do_sample=sampled, top_p=top_p,
    )  # fmt: skip
    asked = Asked(model, options)
    texts = [asked.plain()(ids) for ids in prompts]
    warpers = LogitsProcessorList([TopPLogitsWarper(top_p)]) if sampled else None
    traces = [_traces(model, ids, PROMPT, [exit_layer], warpers)[exit_layer] for ids in texts]
    costs = forward_costs(model, texts[0])
    plan = LayerPlan.early_exit(costs.num_layers, exit_layer)
    candidates = rules(12)
    runs = dict(zip(candidates, replays(traces, candidates, plan, costs, 12), strict=True))

    def best(kind: type) -> Any:
        return max(
            (rule for rule in runs if type(rule) is kind), key=lambda rule: runs[rule].tokens / runs[rule].seconds
        )

    product = best(ProductThreshold)
    # The probe's probabilities differ from the draft's, so another threshold is best.
    probed = [_probed(trace, model, ids, probe, exit_layer) for trace, ids in zip(traces, texts, strict=True)]
    products = [rule for rule in candidates if isinstance(rule, ProductThreshold)]
    by_probe = dict(zip(products, replays(probed, products, plan, costs, 12), strict=True))
    with_probe = max(by_probe, key=lambda rule: _speed(by_probe[rule]))
    chosen = {
        **{f"fixed, {length}": FixedLength(length) for length in LENGTHS},
        "confidence, best simulated": best(ConfidenceThreshold),
        "Draft & Verify (adaptive confidence, from 0.8)": AdaptiveThreshold(ConfidenceThreshold(0.8)),
        "product, best simulated": product,
        "AdaSPEED (adaptive product, from 0.8)": AdaptiveThreshold(ProductThreshold(0.8)),
        "probe, product, best simulated": ProductThreshold(with_probe.threshold, probe),
        "AdaSPEED with the probe": AdaptiveThreshold(ProductThreshold(0.8, probe)),
    }
    runs[chosen["probe, product, best simulated"]] = by_probe[with_probe]
    specs = {name: SelfSpec(EarlyExit(exit_layer), rule, max_draft=12) for name, rule in chosen.items()}
    ways: dict[str, Way] = {"plain": asked.plain(), **{n: asked.plain(assistant=spec) for n, spec in specs.items()}}
    found = compare(ways, prompts, repeats, specs)
    # The measured times include the prompts' forwards, and the warpers for each drafted or generated token.
    warping = 0.0 if warpers is None else _seconds_of(warpers, model.config.vocab_size)
    prefill = len(texts) * median(run.prefill_seconds for speed in found.values() for run in speed.runs)
    print("| rule | speed-up | mean over prompts, 95 % | α | M | simulated | same ids |\n|---|---|---|---|---|---|---|")
    known: dict[Any, Replay] = dict(runs)
    for name, spec in specs.items():
        simulated = ""
        if (run := known.get(spec.stop)) is not None:
            plain = prefill + (costs.plain() + warping) * run.tokens
            simulated = f"{plain / (prefill + run.seconds + warping * (run.tokens + run.drafted)):.3f}"
        same = "" if sampled else f"{sum(found[name].same)}/{len(prompts)}"
        print(row(f"{name}: {_short(spec.stop)}", found[name], found["plain"], simulated, same), flush=True)


@torch.no_grad()
def _probed(trace: Trace, model: PreTrainedModel, ids: torch.Tensor, probe: LinearProbe, exit_layer: int) -> Trace:
    """The same trace with the probe's probabilities as confidence."""
    states = model(ids, output_hidden_states=True).hidden_states[exit_layer][0, PROMPT - 1 : -1]
    return Trace(trace.accept, probe.scores(states).sigmoid()[None].double().numpy())


def _seconds_of(warpers: LogitsProcessorList, vocabulary: int) -> float:
    logits, found = 3 * torch.randn(1, vocabulary, device="cpu", dtype=torch.float32), []
    ids = torch.zeros(1, 0, dtype=torch.long, device="cpu")
    for _ in range(100):
        begun = perf_counter()
        warpers(ids, logits)
        found.append(perf_counter() - begun)
    return median(found)


def _speed(run: Replay) -> float:
    return run.tokens / run.seconds


def _short(rule: Any) -> str:
    inner = rule.rule if isinstance(rule, AdaptiveThreshold) else rule
    return str(getattr(inner, "threshold", getattr(inner, "num_tokens", "")))


def adapters(fits: Fits, prompts: list[torch.Tensor], options: Options, exit_layer: int, repeats: int) -> None:
    """Measures adapters as in Kangaroo's Table 2, compared with the exit alone."""
    variants = {
        "attention": (("attention",), False),
        "attention and a head": (("attention",), True),
        "attention and MLP": (("attention", "mlp"), False),
        "MLP and a head": (("mlp",), True),
    }
    specs = {}
    for name, (blocks, own_head) in variants.items():
        kept = f"adapter-{exit_layer}-{'-'.join(blocks)}{'-head' * own_head}"
        part = fits(fit_adapter, Adapter, kept, exit_layer=exit_layer, blocks=blocks, own_head=own_head)
        specs[f"{name}, {part.num_parameters:,} parameters"] = SelfSpec.kangaroo(part)
    specs["exit alone (LayerSkip), the same rule"] = SelfSpec.layerskip(
        exit_layer, stop=ConfidenceThreshold(0.6), max_draft=6
    )
    _table(fits, prompts, options, specs, repeats)


def heads(
    fits: Fits, prompts: list[torch.Tensor], options: Options, rank: int | None, copied: bool, repeats: int
) -> None:
    """Measures exit heads as in DSSD's Figure 4, §4.3, Table 1 and Figure 2."""
    kept = "heads-copied" if copied else "heads" if rank is None else f"heads-{rank}"
    part = fits(fit_exit_heads, ExitHeads, kept, rank=rank, copied=copied)
    auc = part.about["calibration"]["auc"]
    print("\n| ROC AUC | " + " | ".join(f"layer {layer}" for layer in part.layers) + " |")
    print("|---" * (len(part.layers) + 1) + "|")
    for metric, values in auc.items():
        print(f"| {metric} | " + " | ".join("-" if value is None else f"{value:.3f}" for value in values) + " |")
    specs = {f"DSSD, ε = {epsilon}": SelfSpec.dssd(part, epsilon) for epsilon in EPSILONS}
    specs |= {f"DSSD, ε = 0.9, by {metric}": SelfSpec.dssd(part, 0.9, metric) for metric in METRICS}
    for index, layer in enumerate(part.layers):
        draft = DynamicExit(_only(part, index), 0.9)
        for length in (2, 4, 6, 8, 10, 12):
            specs[f"head at {layer}, {length} tokens"] = SelfSpec(draft, FixedLength(length))
    print()
    _table(fits, prompts, options, specs, 1)
    print("\nEarly exits alone (not the model's own text):\n")
    lossy = {f"ε = {epsilon}": SelfSpec.early_exit_only(heads=part, epsilon=epsilon) for epsilon in EPSILONS}
    _table(fits, prompts, options, lossy, repeats)


def _only(part: ExitHeads, index: int) -> ExitHeads:
    """The same heads, of which one is always trusted and the others never."""
    thresholds = [[-1e9 if head == index else None] for head in range(len(part.layers))]
    found = copy.deepcopy(part)
    found.about = {
        "calibration": {
            "metric": "entropy",
            "epsilons": [0.9],
            "thresholds": {"entropy": thresholds},
            "acceptance": {"entropy": [1.0]},
        }
    }
    return found


def _table(fits: Fits, prompts: list[torch.Tensor], options: Options, specs: dict[str, SelfSpec], repeats: int) -> None:
    asked = Asked(fits.model, options)
    ways: dict[str, Way] = {"plain": asked.plain(), **{n: asked.plain(assistant=spec) for n, spec in specs.items()}}
    ids: dict[str, list[torch.Tensor]] = {}
    found = compare(_kept(ways, ids), prompts, repeats, specs)
    print("| way | speed-up | mean over prompts, 95 % | α | M | mean exit layer | discarded | agreement |")
    print("|---|---|---|---|---|---|---|---|")
    for name in specs:
        runs = found[name].runs
        taken = {layer: sum(run.exit_layers[layer] for run in runs) for run in runs for layer in run.exit_layers}
        own = sum(run.tokens for run in runs) - sum(run.accepted for run in runs)
        layers = fits.model.config.num_hidden_layers
        depth = sum(layer * count for layer, count in taken.items())
        lossy = not getattr(specs[name].draft, "lossless", True)
        # For drafts, the mean over drafted tokens; for early exits alone, over all tokens.
        exits = (depth + layers * own * lossy) / (sum(taken.values()) + own * lossy) if taken else 0.0
        same = mean(
            float((a[0, PROMPT:] == b[0, PROMPT:]).float().mean()) for a, b in zip(ids[name], ids["plain"], strict=True)
        )
        discarded = sum(run.drafted - run.accepted for run in runs)
        print(row(name, found[name], found["plain"], f"{exits:.1f}", str(discarded), f"{same:.3f}"), flush=True)


def _kept(ways: dict[str, Way], ids: dict[str, list[torch.Tensor]]) -> dict[str, Way]:
    """The same ways, which also store their last ids of each prompt in ``ids``."""

    def kept(name: str, way: Way) -> Way:
        seen: list[torch.Tensor] = []
        ids[name] = []

        def run(prompt: torch.Tensor) -> torch.Tensor:
            found = way(prompt)
            if seen and seen[-1] is prompt:
                ids[name][-1] = found
            else:
                seen.append(prompt)
                ids[name].append(found)
            return found

        return run

    return {name: kept(name, way) for name, way in ways.items()}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("stops", "adapters", "heads"))
    add_prompts(parser, 10)
    parser.add_argument("--gsm8k", help="gsm8k_train.jsonl, for prompts of a third kind")
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--top-p", type=float, help="sample with this top-p (stops)")
    parser.add_argument("--files", type=int, default=250, help="number of files to fit on")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--rank", type=int, help="rank of the heads (heads)")
    parser.add_argument("--copied", action="store_true", help="heads start as copies of the model's own (heads)")
    parser.add_argument("--out", type=path_of, default=Path("fitted"), help="folder for the fitted parts")


def _run(args: argparse.Namespace) -> None:
    tokenizer = NamedModel.find(args.model).tokenizer()
    kinds = [column(args.humaneval, "prompt"), held_out_texts()]
    if args.gsm8k is not None:
        kinds.append(column(args.gsm8k, "question"))
    found = [prompts_of(texts, tokenizer, args.prompts) for texts in kinds]
    prompts = [ids for together in zip(*found, strict=True) for ids in together]
    print_head(args, "float32", f"{len(prompts)} prompts", f"{args.tokens} new tokens")
    texts = standard_library().training[: args.files]
    fits = Fits(load(args.model), tokenizer, texts, args.out, args.learning_rate)
    asked: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": args.top_p is not None}
    if args.top_p is not None:
        asked |= {"top_p": args.top_p, "top_k": 0}
    if args.what == "stops":
        stops(fits, prompts, asked, args.exit_layer, args.repeats)
    elif args.what == "adapters":
        adapters(fits, prompts, asked, args.exit_layer, args.repeats)
    else:
        heads(fits, prompts, asked, args.rank, args.copied, args.repeats)


_DESCRIPTION = (
    "Parts are fitted to the first files of the standard library's training part, in rows of 256 tokens, for one "
    "epoch, and saved in --out; another run reuses what is there. Prompts are 64 tokens of HumanEval and of held-out "
    "files, in float32; every way is timed on each prompt in turn."
)
FIGURE = Figure("stop rules, adapters and exit heads", _add_options, _run, _DESCRIPTION)
