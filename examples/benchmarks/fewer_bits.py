"""A model in fewer bits as its own draft: how often it agrees with the model, and what its steps cost.

With ``--model``: the share of tokens of the model's own greedy texts that it predicts, for each form of its weights.
Many checkpoints were quantised before, so that their weights lie on few values and four bits lose next to nothing:
``--dither`` moves each weight at random between the values of its group that are next to it. Without ``--model``: the
time of a draft step of a random model over that of a plain one (CPU time), and the speed-up over plain ``generate``
that follows where drafts of ``--drafted`` tokens are accepted at the rate ``--agreement``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from statistics import median

import torch
from synthetic import LlamaShape
from timing import print_head, print_row, print_table_head
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_selfspec import Quantized
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import cache_for
from hf_selfspec.model.packing import packed
from hf_selfspec.model.partial import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target

DRAFTS = (
    Quantized(4),
    Quantized(4, head=4),
    Quantized(4, head=16),
    Quantized(4, group_size=64),
    Quantized(8),
)


class Draft:
    """A draft's forwards over a text, whose keys and values before each step are the model's."""

    def __init__(self, model: PreTrainedModel, draft: Quantized, room: int) -> None:
        anatomy, begun = Anatomy.of(model), time.process_time()
        substitutes = packed(model, draft.wanted(anatomy, model))
        self.seconds = time.process_time() - begun  # of packing
        self.plan = LayerPlan(anatomy.num_layers, substitutes=substitutes)
        self.target = Target(model, anatomy, cache_for(model, anatomy, 1, room, None))
        self.target.substitutes.append(substitutes)

    def predictions(self, ids: torch.Tensor, prompt: int) -> torch.Tensor:
        """The token that follows each of ``ids`` ``[s]`` from the last of ``prompt`` tokens on."""
        found = []
        with self.target.prepared(), torch.no_grad():
            self.target.prefill(ids[None, : prompt - 1], [0], [prompt - 1])
            for at in range(prompt - 1, len(ids) - 1):
                for plan in (self.plan, self.target.full_plan):  # the model's keys and values replace the draft's
                    run = self.target.step(ids[None, at : at + 1], [at], ForwardPass(plan))
                    found += [run.logits[0, -1].argmax()] if plan is self.plan else []
        return torch.stack(found)


def dithered(model: PreTrainedModel) -> None:
    for linear in (one for one in model.get_decoder().modules() if isinstance(one, torch.nn.Linear)):
        groups = linear.weight.data.float().unflatten(1, (-1, 32))
        gaps = groups.sort(-1).values.diff(dim=-1)
        gaps = gaps.where(gaps > 1e-3 * groups.abs().amax(-1, keepdim=True), torch.inf).amin(-1, keepdim=True)
        linear.weight.data.copy_((groups + (torch.rand_like(groups) - 0.5) * gaps).flatten(1))


def agreements(args: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    torch.manual_seed(0)
    if args.dither:
        dithered(model)
    prompts: dict[str, list[str]] = {}
    with open(args.data) as file:
        for row in map(json.loads, file):
            prompts.setdefault(row["kind"], []).append(row["prompt"])
    kinds, texts = args.kinds or list(prompts), []
    for kind in kinds:
        for prompt in prompts[kind][: args.prompts]:
            chat = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            ids = ids["input_ids"][:, -args.longest :]
            texts.append((kind, ids.shape[1], model.generate(ids, max_new_tokens=args.tokens, do_sample=False)[0]))
    print_head(
        "cpu", f"{args.model}{', dithered' if args.dither else ''}, bfloat16", f"{args.tokens} new tokens, greedy"
    )
    print_table_head("draft", "s to pack", "agreement", *kinds)
    for given in DRAFTS:
        draft = Draft(model, given, args.longest + args.tokens)
        right = {kind: [] for kind in kinds}
        for kind, prompt, ids in texts:
            right[kind] += (draft.predictions(ids, prompt) == ids[prompt:]).tolist()
        print_row(repr(given), f"{draft.seconds:.1f}", *map(share, [list(chain(*right.values())), *right.values()]))


def share(right: list[bool]) -> str:
    return f"{sum(right) / len(right):.3f}"


def steps(args: argparse.Namespace) -> None:
    shape = LlamaShape(args.width, args.layers, vocabulary=args.vocabulary, dtype=torch.bfloat16)
    model = shape.model()
    print_head("cpu", f"{args.layers} layers of width {args.width}, vocabulary {args.vocabulary}, bfloat16", "medians")
    print_table_head("draft", "plain step, ms", "draft step", "verification", "speed-up")
    for given in (Quantized(4), Quantized(8)):
        one, drafted, verified = seconds_of(Draft(model, given, 256), args.drafted, args.repeats)
        tokens = sum(args.agreement**depth for depth in range(args.drafted + 1))
        shares = (drafted / one, verified / one, tokens * one / (args.drafted * drafted + verified))
        print_row(repr(given), f"{1e3 * one:.1f}", *(f"{value:.2f}" for value in shares))


def seconds_of(draft: Draft, count: int, repeats: int) -> list[float]:
    """Of a plain step, a draft's step, and the verification of ``count`` tokens."""
    ids, target = torch.full((1, count + 1), 7), draft.target
    full, part = (partial(ForwardPass, plan) for plan in (target.full_plan, draft.plan))
    with target.prepared(), torch.no_grad():
        target.prefill(torch.full((1, 63), 5), [0], [63])
        return medians(
            repeats,
            (
                lambda: target.step(ids[:, :1], [63], full()),
                lambda: target.step(ids[:, :1], [63], part()),
                lambda: target.step(ids, [63], full()),
            ),
        )


def medians(repeats: int, runs: Iterable[Callable[[], object]]) -> list[float]:
    """CPU seconds of each, in turn; the first turn does not count."""
    times = []
    for _ in range(repeats + 1):
        times.append([])
        for run in runs:
            begun = time.process_time()
            run()
            times[-1].append(time.process_time() - begun)
    return list(map(median, zip(*times[1:], strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat model")
    parser.add_argument("--data", help="prompts, as suites.py writes them")
    parser.add_argument("--kinds", nargs="*", help="kinds of prompts, by default all")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=700, help="last tokens of a prompt")
    parser.add_argument("--dither", action="store_true")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--agreement", type=float, default=0.9)
    parser.add_argument("--drafted", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    agreements(args) if args.model else steps(args)


if __name__ == "__main__":
    main()
