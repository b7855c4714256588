"""All fitted parts beside each other: the same text, about as many parameters, each alone and with free drafts.

``--text`` is a file of texts that the model wrote, from ``hf_selfspec.train.write_answers``. Parts are fitted to
its first tokens in bfloat16 and saved in ``--out``; another run reuses what is there. Speeds are those of whole calls
over plain ``generate``'s, CPU time, geometric means over the prompts of ``--data``.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from fitting import trainer_arguments
from timing import Table, Way, compare, parsed, parser_with, print_head
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_selfspec
from hf_selfspec import (
    MTP,
    Cascade,
    EarlyExit,
    EarlyExitAdapter,
    Lookup,
    SelfSpec,
    SettingError,
)
from hf_selfspec.model.encoding import as_prompts, encoded
from hf_selfspec.train.loading import read_prompts

SETTINGS = {"num_train_epochs": 2, "learning_rate": 1e-3, "warmup_steps": 10}


def fitted(model: PreTrainedModel, texts: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Fits the parts that are not there yet; returns what drafts with each."""
    layer, depth = args.exit_layer, model.config.num_hidden_layers
    fits: dict[str, tuple[str, dict[str, Any], Any]] = {
        "mtp": ("fit_mtp", {}, MTP),
        "mtp3": ("fit_mtp", {"state_layers": sorted({layer + 1, 2 * depth // 3 - 1, depth})}, MTP),
        "adapter": ("fit_adapter", {"exit_layer": layer, "blocks": ("attention", "mlp")}, EarlyExitAdapter),
        "heads": ("fit_exit_heads", {"layers": [layer], "rank": args.rank}, lambda at: SelfSpec.dssd(at).draft),
    }
    drafts = {"exit alone": EarlyExit(layer)}
    for name, (fit, options, draft) in fits.items():
        at = args.out / name
        if not (at / "model.safetensors").exists():
            trainer = trainer_arguments(at, 4, bf16=not name.startswith("mtp"), **SETTINGS)
            getattr(hf_selfspec, fit)(
                model, None, texts, args=trainer, block_size=args.block_size, output_dir=at, **options
            )
        try:
            drafts[name] = draft(at)
        except SettingError as error:  # heads that are right too seldom
            print(error)
        print(name, (at / "README.md").read_text().split("## Recipe")[1].replace("\n", " "))
    return drafts


def speeds(model: PreTrainedModel, drafts: dict[str, Any], prompts: list[Any], options: dict[str, Any]) -> None:
    """Prints a row for each draft: alone, in one cascade with free drafts, and how often its tokens were accepted."""
    ways: dict[tuple[str, str], Way] = {("plain", ""): {}, ("free drafts", ""): SelfSpec.lookup()}
    for name, draft in drafts.items():
        ways[name, "alone"], ways[name, "beside"] = SelfSpec(draft), SelfSpec(Cascade((Lookup(), draft)))
    timed = compare(model, ways, prompts[1:], options, warm_up=prompts[:1])
    plain, *others = (
        [seconds / ids.shape[1] for seconds, ids in zip(speed.seconds, speed.ids, strict=True)]
        for speed in timed.values()
    )
    ratios = (geometric_mean(p / s for p, s in zip(plain, seconds, strict=True)) for seconds in others)
    free, *pairs = (f"{ratio:.2f}" for ratio in ratios)
    table = Table("draft", "alone", "with free drafts", "accepted")
    table.row("free drafts", "", free, "")
    for name, alone, beside in zip(drafts, pairs[::2], pairs[1::2], strict=True):
        table.row(name, alone, beside, f"{timed[name, 'alone'].alpha:.2f}")


def main() -> None:
    numbers = {"tokens_of_text": 75_000, "prompts": 12, "tokens": 64, "exit_layer": 7, "block_size": 512}
    parser = parser_with(__doc__, threads=1, **numbers)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--data", required=True, help="a .jsonl file of prompts")
    parser.add_argument("--rank", type=int, default=84, help="of the exit head")
    parser.add_argument("--out", type=Path, default=Path("fitted"))
    args = parsed(parser)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line)["input_ids"] for line in args.text.read_text(encoding="utf-8").splitlines()]
    totals = accumulate(map(len, rows))
    texts = [{"input_ids": row} for row, total in zip(rows, totals, strict=True) if total <= args.tokens_of_text]
    chosen = as_prompts(tokenizer, read_prompts(args.data)[: args.prompts + 1])
    prompts = [encoded(tokenizer, prompt, torch.device("cpu"), 400)["input_ids"] for prompt in chosen]
    drafts: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        drafts = drafts or fitted(model, texts, args)
        for temperature in (0.0, 0.7):
            print_head("cpu", dtype, f"temperature {temperature}", f"{args.prompts} prompts, {args.tokens} tokens")
            options = {"max_new_tokens": args.tokens, "do_sample": temperature > 0, "pad_token_id": 0}
            speeds(model, drafts, prompts, options | ({"temperature": temperature} if temperature else {}))


if __name__ == "__main__":
    main()
