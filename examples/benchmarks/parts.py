"""All fitted parts beside each other: the same text, about as many parameters, each alone and with free drafts.

``--text`` is a file of texts that the model wrote, as ``fit_mtp(prompts=...)`` keeps it. Parts are fitted to its first
tokens in bfloat16 and saved in ``--out``; another run reuses what is there. Speeds are those of whole calls over plain
``generate``'s, CPU time, geometric means over the prompts of ``--data``.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import accumulate
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from timing import print_head, print_row, print_table_head
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments

import hf_selfspec
from hf_selfspec import MTP, Cascade, EarlyExit, EarlyExitAdapter, EarlyExitLora, Lookup, SelfSpec, SettingError
from hf_selfspec.data.prompts import as_prompts, encoded, read_prompts

SETTINGS = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 10}


def fitted(model: PreTrainedModel, texts: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Fits the parts that are not there yet; returns what drafts with each."""
    layer, depth = args.exit_layer, model.config.num_hidden_layers
    fits: dict[str, tuple[str, dict[str, Any], Any]] = {
        "mtp": ("fit_mtp", {}, MTP),
        "mtp3": ("fit_mtp", {"state_layers": [layer + 1, 2 * depth // 3 - 1, depth]}, MTP),
        "adapter": ("fit_adapter", {"exit_layer": layer, "blocks": ("attention", "mlp")}, EarlyExitAdapter),
        "heads": ("fit_exit_heads", {"layers": [layer], "rank": args.ranks[1]}, lambda at: SelfSpec.dssd(at).draft),
        "lora": ("fit_draft_lora", {"exit_layer": layer, "rank": args.ranks[0]}, EarlyExitLora),
    }
    drafts = {"exit alone": EarlyExit(layer)}
    for name, (fit, options, draft) in fits.items():
        at = args.out / name
        if not (at / "model.safetensors").exists():
            trainer = TrainingArguments(
                f"{at}-trainer", lr_scheduler_type="cosine", save_strategy="no", report_to="none", use_cpu=True,
                disable_tqdm=True, bf16=not name.startswith("mtp"), **SETTINGS,
            )  # fmt: skip
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
    alone = {name: SelfSpec(draft) for name, draft in drafts.items()}
    both = {name: SelfSpec(Cascade((Lookup(), draft))) for name, draft in drafts.items()}
    ways: dict[Any, Any] = {"plain": False, "free": SelfSpec.lookup()}
    ways |= {(name, 0): spec for name, spec in alone.items()} | {(name, 1): spec for name, spec in both.items()}
    found: dict[Any, list[float]] = {way: [] for way in ways}
    counts = {name: [0, 0] for name in drafts}
    for number, inputs in enumerate(prompts):  # the first one warms up
        for way, spec in ways.items():
            torch.manual_seed(number)
            begun = time.process_time()
            ids = model.generate(**inputs, **options, assistant=spec)
            found[way].append((time.process_time() - begun) / (ids.shape[1] - inputs["input_ids"].shape[1]))
            if isinstance(way, tuple) and not way[1] and (stats := spec.stats) is not None:
                counts[way[0]][0] += stats.accepted
                counts[way[0]][1] += stats.drafted
    ratio = {
        way: geometric_mean(plain / own for plain, own in zip(found["plain"][1:], seconds[1:], strict=True))
        for way, seconds in found.items()
    }
    print_table_head("draft", "alone", "with free drafts", "accepted")
    print_row("free drafts", "", f"{ratio['free']:.2f}", "")
    for name, (accepted, drafted) in counts.items():
        print_row(name, f"{ratio[name, 0]:.2f}", f"{ratio[name, 1]:.2f}", f"{accepted / max(drafted, 1):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--tokens-of-text", type=int, default=75_000)
    parser.add_argument("--data", required=True, help="a .jsonl file of prompts")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--exit-layer", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs=2, default=(59, 84), help="of the LoRA and of the exit head")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("fitted"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = json.loads(args.text.read_text())["texts"]
    texts = [
        {"input_ids": row}
        for row, total in zip(rows, accumulate(map(len, rows)), strict=True)
        if total <= args.tokens_of_text
    ]
    chosen = as_prompts(tokenizer, read_prompts(args.data)[: args.prompts + 1])
    prompts = [encoded(tokenizer, prompt, torch.device("cpu"), 400) for prompt in chosen]
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
