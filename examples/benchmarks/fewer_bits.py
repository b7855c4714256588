"""A model in four bits as its own draft: how often it agrees with the model, and what its steps cost.

With ``--model``: the share of tokens of the model's own greedy texts that it predicts. Many checkpoints were quantised
before, so that their weights lie on few values and four bits lose next to nothing: ``--dither`` moves each weight at
random between the values of its group that are next to it. Without ``--model``: the time of a draft step of a random
model over that of a plain one (CPU time), and the speed-up over plain ``generate`` that follows where drafts of three
tokens are accepted at the rate 0.9.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import chain

import torch
from synthetic import LlamaShape
from timing import Table, medians, parsed, parser_with, print_head
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import cache_for
from hf_selfspec.model.encoding import as_prompts, encoded
from hf_selfspec.model.forward_pass import ForwardPass
from hf_selfspec.model.kernels.packing import packed, to_pack, why_not
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.tools.compare import texts_of

AGREEMENT, DRAFTED = 0.9, 3


class Draft:
    """A draft's forwards over a text, whose keys and values before each step are the model's."""

    def __init__(self, model: PreTrainedModel, room: int) -> None:
        anatomy, begun = Anatomy.of(model), time.process_time()
        if not (modules := to_pack(anatomy, model)):
            sys.exit(why_not(anatomy))
        substitutes = packed(model, modules)
        self.seconds = time.process_time() - begun  # of packing
        self.plan = LayerPlan(anatomy.num_layers, substitutes=substitutes)
        self.target = Target(model, anatomy, cache_for(model, anatomy, 1, room, None))
        self.target.substitutes.append(substitutes)

    def predictions(self, ids: torch.Tensor, prompt: int) -> torch.Tensor:
        """The token that follows each of ``ids`` ``[s]`` from the last of ``prompt`` tokens on."""
        choices = []
        with self.target.prepared(), torch.no_grad():
            self.target.prefill(ids[None, : prompt - 1], [0], [prompt - 1])
            for at in range(prompt - 1, len(ids) - 1):
                for plan in (self.plan, self.target.full_plan):  # the model's keys and values replace the draft's
                    run = self.target.step(ids[None, at : at + 1], [at], ForwardPass(plan))
                    choices += [run.logits[0, -1].argmax()] if plan is self.plan else []
        return torch.stack(choices)

    def seconds_of_steps(self, count: int, repeats: int) -> dict[str, float]:
        """Of a plain step, a draft's step, and the verification of ``count`` tokens."""
        ids, target = torch.full((1, count + 1), 7), self.target
        runs = {
            "plain": lambda: target.step(ids[:, :1], [63]),
            "draft": lambda: target.step(ids[:, :1], [63], ForwardPass(self.plan)),
            "verification": lambda: target.step(ids, [63]),
        }
        with target.prepared(), torch.no_grad():
            target.prefill(torch.full((1, 63), 5), [0], [63])
            return medians(runs, repeats, ids.device)


def dithered(model: PreTrainedModel) -> None:
    for linear in (module for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear)):
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
    prompts, texts = texts_of([args.data]), []
    kinds = args.kinds or list(prompts)
    for kind in kinds:
        for prompt in as_prompts(tokenizer, prompts[kind][: args.prompts]):
            ids = encoded(tokenizer, prompt, model.device)["input_ids"][:, -args.longest :]
            texts.append((kind, ids.shape[1], model.generate(ids, max_new_tokens=args.tokens, do_sample=False)[0]))
    name = f"{args.model}{', dithered' if args.dither else ''}, bfloat16"
    print_head("cpu", name, f"{args.tokens} new tokens, greedy")
    table = Table("draft", "s to pack", "agreement", *kinds)
    draft = Draft(model, args.longest + args.tokens)
    right: dict[str, list[bool]] = {kind: [] for kind in kinds}
    for kind, prompt, ids in texts:
        right[kind] += (draft.predictions(ids, prompt) == ids[prompt:]).tolist()
    lists = [list(chain(*right.values())), *right.values()]
    table.row("Quantized()", f"{draft.seconds:.1f}", *(f"{sum(hits) / len(hits):.3f}" for hits in lists))


def steps(args: argparse.Namespace) -> None:
    model = LlamaShape(args.width, args.layers, vocabulary=args.vocabulary, dtype=torch.bfloat16).model()
    print_head("cpu", f"{args.layers} layers of width {args.width}, vocabulary {args.vocabulary}, bfloat16", "medians")
    table = Table("draft", "plain step, ms", "draft step", "verification", "speed-up")
    seconds = Draft(model, 256).seconds_of_steps(DRAFTED, args.repeats)
    plain = seconds.pop("plain")
    draft, verification = (value / plain for value in seconds.values())
    tokens = sum(AGREEMENT**depth for depth in range(DRAFTED + 1))
    shares = draft, verification, tokens / (DRAFTED * draft + verification)
    table.row("Quantized()", f"{1e3 * plain:.1f}", *(f"{value:.2f}" for value in shares))


def main() -> None:
    numbers = {"width": 2048, "layers": 22, "vocabulary": 32000, "repeats": 9, "threads": 1}
    parser = parser_with(__doc__, tokens=96, **numbers)
    parser.add_argument("--model", help="a chat model")
    parser.add_argument("--data", help="prompts, as suites.py writes them")
    parser.add_argument("--kinds", nargs="*", help="kinds of prompts, by default all")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--longest", type=int, default=700, help="last tokens of a prompt")
    parser.add_argument("--dither", action="store_true")
    args = parsed(parser)
    agreements(args) if args.model else steps(args)


if __name__ == "__main__":
    main()
