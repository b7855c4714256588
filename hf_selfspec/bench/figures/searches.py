"""Speed of self-speculation without any training: the searches for layers to skip."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ...draft.skip_layers import SkipLayers
from ...loading import NamedModel
from ...search.choice import SkipChoice
from ...search.on_the_fly import ClosestLayers
from ...selfspec import SelfSpec
from ...stop.rules import ConfidenceThreshold, FixedLength
from ...verify.tree import CostTree, TopKTree
from ..trained import Asked, Speed, attainable_with, compare, forward_costs, without_reuse
from .figure import Figure, print_head
from .prompts import PROMPT, add_prompts, best_early_exit, column, held_out_texts, load, prompts_of

LONGEST = 25


def specs_of_stream() -> dict[str, SelfSpec]:
    """The measured ``SelfSpec``s; the last ones show what each part of SWIFT brings (Table 8)."""
    return {
        "SelfSpec()": SelfSpec(),
        "layers": SelfSpec(SkipLayers(search=ClosestLayers())),
        "layers, CostTree": SelfSpec(SkipLayers(search=ClosestLayers()), tree=CostTree()),
        "swift()": SelfSpec.swift(),
        "swift(), the paper's tree": SelfSpec.swift(tree=TopKTree()),
        "swift(), CostTree": SelfSpec.swift(tree=CostTree()),
        "swift(), no early stop": SelfSpec.swift(stop=FixedLength(LONGEST)),
        "no search": SelfSpec(SkipLayers(), ConfidenceThreshold()),
    }


def accelerated(speed: Speed, plain: Speed) -> float:
    """Speed-up in the calls that began after the search had ended, 0 if there were none."""
    phases = ["", *(run.phase for run in speed.runs[:-1])]
    chosen = [index for index, phase in enumerate(phases) if phase == "acceleration"]
    ours = sum(speed.seconds[index] for index in chosen)
    return sum(plain.seconds[index] for index in chosen) / ours if chosen else 0.0


def efficiency(speed: Speed, one_token: float) -> float:
    """Measured speed-up / that of SWIFT's equation 6 with the measured cost of a drafting step, for decoding only."""
    steps = sum(run.draft_steps for run in speed.runs)
    if not steps:
        return 0.0
    c = sum(run.draft_seconds for run in speed.runs) / steps / one_token
    m, alpha = speed.mean_generated_length, speed.acceptance_rate
    decoding = sum(run.total_seconds - run.prefill_seconds - run.search_seconds for run in speed.runs)
    tokens = sum(run.tokens - len(run.from_draft) for run in speed.runs)
    return one_token * tokens / decoding / (m * alpha / ((m - 1) * c + alpha))


def stream_table(model: PreTrainedModel, prompts: list[torch.Tensor], tokens: int) -> dict[str, SelfSpec]:
    """Prints all ways on one stream, and what is attainable with the set that was found; returns the ``SelfSpec``s."""
    asked = Asked(model, {"max_new_tokens": tokens, "do_sample": False})
    exit_layer, length = best_early_exit(asked, prompts[:2], model.config.num_hidden_layers)
    specs = specs_of_stream()
    ways = {
        "plain generate": asked.plain(),
        "prompt lookup": asked.plain(prompt_lookup_num_tokens=4),
        f"assistant_early_exit, E = {exit_layer}": asked.early_exit(exit_layer, length),
        **{name: asked.plain(assistant=spec) for name, spec in specs.items()},
    }
    speeds = compare(ways, prompts, 1, specs, warm_up=False)
    plain = speeds["plain generate"]
    # The cost of a plain token, without the prompt.
    one_token = forward_costs(model, asked.plain()(prompts[0])).plain()
    print("| way | ms per token | speed-up | after the search | α | M | search | efficiency | same ids | set |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, speed in speeds.items():
        cells = [name, f"{speed.ms_per_token:.2f}", f"{plain.ms_per_token / speed.ms_per_token:.2f}"]
        if speed.runs:
            share = sum(run.search_seconds for run in speed.runs) / sum(run.total_seconds for run in speed.runs)
            after = accelerated(speed, plain)
            cells += [
                f"{after:.2f}" if after else "-",
                f"{speed.acceptance_rate:.2f}",
                f"{speed.mean_generated_length:.2f}",
                f"{share:.1%}",
                f"{efficiency(speed, one_token):.2f}",
            ]
        else:
            cells += ["", "", "", "", ""]
        cells += [f"{sum(speed.same)}/{len(speed.same)}", f"`{speed.runs[-1].plan}`" if speed.runs else ""]
        print(f"| {' | '.join(cells)} |", flush=True)
    choice = specs["layers"].choice(model)
    assert isinstance(choice, SkipChoice)
    texts = [asked.plain()(ids) for ids in prompts[::4]]
    best = attainable_with(model, choice.plan, texts, PROMPT)
    print(
        f"\nThe search chose {choice.stop}, drafts: {choice.drafts}, promised {choice.expected_speedup or 0:.2f}x. "
        f"Attainable with its set on every fourth text (forwards alone): {best.speedup:.2f}x with {best.stop}, "
        f"α {best.acceptance_rate:.2f}.",
        flush=True,
    )
    fixed = SelfSpec(SkipLayers(tuple(choice.plan.skipped_attention), tuple(choice.plan.skipped_mlp)), best.stop)
    with_reuse = asked.plain(assistant=fixed)

    def without(ids: torch.Tensor) -> torch.Tensor:
        with without_reuse(model):
            return with_reuse(ids)

    again = compare({"plain": asked.plain(), "with": with_reuse, "without": without}, prompts[::4], 3, {"with": fixed})
    base = again["plain"].ms_per_token
    print(
        f"The same texts with that set and rule given: {base / again['with'].ms_per_token:.2f}x with states reused "
        f"after the exact prefix of {choice.plan.first_altered} layers, {base / again['without'].ms_per_token:.2f}x "
        f"without (medians of 3); α {again['with'].acceptance_rate:.2f}, M {again['with'].mean_generated_length:.2f}."
    )
    return specs


def change_table(
    model: PreTrainedModel, code: Sequence[torch.Tensor], other: Sequence[torch.Tensor], tokens: int
) -> None:
    """Prints α and speed-up before and after a change of text, with one search and with the set found before it."""
    asked = Asked(model, {"max_new_tokens": tokens, "do_sample": False})
    spec, fixed = SelfSpec(SkipLayers(search=ClosestLayers())), None
    print("| texts | speed-up | α | M | tries | set kept: speed-up | α | promised |")
    print("|---|---|---|---|---|---|---|---|")
    stages = [(f"code {part * 10 + 1}-{part * 10 + 10}", code[part * 10 : part * 10 + 10]) for part in range(2)]
    stages += [(f"other {part * 10 + 1}-{part * 10 + 10}", other[part * 10 : part * 10 + 10]) for part in range(2)]
    for name, prompts in stages:
        choice = spec.choice(model)
        if name.startswith("other") and fixed is None:
            assert isinstance(choice, SkipChoice)
            draft = SkipLayers(tuple(choice.plan.skipped_attention), tuple(choice.plan.skipped_mlp))
            fixed = SelfSpec(draft, choice.stop)
        ways = {"plain": asked.plain(), "ours": asked.plain(assistant=spec)}
        kept = {"ours": spec}
        if fixed is not None:
            ways["fixed"], kept["fixed"] = asked.plain(assistant=fixed), fixed
        speeds = compare(ways, prompts, 1, kept, warm_up=False)
        assert all(all(speed.same) for speed in speeds.values())
        plain, ours = speeds["plain"], speeds["ours"]
        cells = [name, f"{plain.ms_per_token / ours.ms_per_token:.2f}", f"{ours.acceptance_rate:.2f}"]
        cells += [f"{ours.mean_generated_length:.2f}", str(len(ours.runs[-1].matchness))]
        if fixed is not None:
            other_way = speeds["fixed"]
            cells += [f"{plain.ms_per_token / other_way.ms_per_token:.2f}", f"{other_way.acceptance_rate:.2f}"]
        else:
            cells += ["", ""]
        now = spec.choice(model)
        assert isinstance(now, SkipChoice)
        cells.append("no draft" if not now.drafts else f"{now.expected_speedup or 0:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, 30)
    parser.add_argument("--change", help="file of JSON lines with a `question`: measure a change of text instead")
    parser.add_argument("--plot", help="file for a plot of the search and its speed")


def _run(args: argparse.Namespace) -> None:
    tokenizer = NamedModel.find(args.model).tokenizer()
    code = prompts_of(column(args.humaneval, "prompt"), tokenizer, args.prompts)
    print_head(args, "float32", f"{args.tokens} new tokens, greedy")
    model = load(args.model)
    if args.change is not None:
        other = prompts_of(column(args.change, "question"), tokenizer, args.prompts)
        change_table(model, code, other, args.tokens)
        return
    library = prompts_of(held_out_texts(), tokenizer, args.prompts)
    stream = [ids for pair in zip(code, library, strict=True) for ids in pair]
    specs = stream_table(model, stream, args.tokens)
    if args.plot is not None:
        specs["layers"].plot(args.plot)


_DESCRIPTION = (
    "A stream is HumanEval tasks and held-out files of the standard library in turn, 64 tokens of each, greedy, "
    "float32. Each way of generating sees the whole stream, prompt by prompt in turn with the others, and learns "
    "meanwhile. With --change, the stream is code first and other text afterwards."
)
FIGURE = Figure("searches for layers to skip on a stream", _add_options, _run, _DESCRIPTION)
