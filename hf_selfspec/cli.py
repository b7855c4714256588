"""``hf-selfspec``: fitting from the command line. What it prints is its output; the library itself prints nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .errors import SelfSpecError, SettingError
from .parts.adapter import BLOCKS
from .parts.heads import METRICS
from .parts.part import Part
from .train import fit_adapter, fit_exit_heads, fit_probe
from .train.fitting import training_arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-selfspec", description="Generating faster with a part of the model itself."
    )
    what = parser.add_subparsers(required=True, metavar="fit").add_parser(
        "fit", help="fit a small module to a frozen model", description="Fits a small module to a frozen model."
    )
    kinds = what.add_subparsers(dest="kind", required=True, metavar="adapter|heads|probe")
    adapter = kinds.add_parser("adapter", help="Kangaroo's adapter behind a shallow exit")
    adapter.add_argument("--exit-layer", type=int, help="2 by default, 3 from 40 layers on")
    adapter.add_argument("--heads", type=int, help="attention heads, the model's by default")
    adapter.add_argument("--blocks", nargs="+", choices=BLOCKS, default=["attention"], help="attention by default")
    adapter.add_argument("--own-head", action="store_true", help="a head of its own in the place of the model's")
    heads = kinds.add_parser("heads", help="DSSD's exit heads with calibrated thresholds")
    heads.add_argument("--layers", type=int, nargs="+", help="exit layers, spread over the depth by default")
    heads.add_argument("--heads", type=int, default=4, help="how many, where no layers are given")
    heads.add_argument("--rank", type=int, help="of the heads' linear layers, whole by default")
    heads.add_argument("--copied", action="store_true", help="begin with the model's own head")
    heads.add_argument("--metric", choices=sorted(METRICS), help="of confidence; the one that tells best by default")
    probe = kinds.add_parser("probe", help="AdaSPEED's probe of acceptance")
    probe.add_argument("--exit-layer", type=int, required=True)
    probe.add_argument("--sample", action="store_true", help="for drawn tokens")
    probe.add_argument("--temperature", type=float, default=1.0)
    probe.add_argument("--top-k", type=int)
    probe.add_argument("--top-p", type=float)
    for kind in (adapter, heads, probe):
        kind.add_argument("--model", required=True, help="folder or name of the model")
        kind.add_argument("--data", required=True, help="a .jsonl or .txt file, or a dataset of the Hub")
        kind.add_argument("--field", default="text", help="column of the text")
        kind.add_argument("--out", required=True, help="folder for what is fitted")
        kind.add_argument("--block-size", type=int, default=256, help="tokens of a row")
        kind.add_argument("--batch", type=int, default=8, help="rows in a step, on each device")
        kind.add_argument("--learning-rate", type=float, default=1e-3)
        kind.add_argument("--epochs", type=float, default=1.0)
        kind.add_argument("--dtype", default="auto", help="of the model")
        kind.add_argument("--cache", help="folder that keeps the model's states for further fits")
    return parser


def texts(data: str, field: str) -> list[str]:
    """The texts of a file or of a dataset of the Hub.

    Raises:
        SettingError: there is no such file or dataset, or no such column in it.
    """
    path = Path(data)
    if path.suffix == ".txt" and path.is_file():
        return [path.read_text(encoding="utf-8")]
    if path.suffix in (".jsonl", ".json") and path.is_file():
        rows: Any = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        if path.suffix in (".jsonl", ".json", ".txt"):
            raise SettingError(f"--data {data}: there is no such file.")
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise SettingError(
                f"--data {data} names a dataset of the Hub, which needs `pip install datasets`. Or give a .jsonl or "
                ".txt file."
            ) from error
        rows = load_dataset(data, split="train")
    found = [row.get(field) for row in rows]
    if any(not isinstance(text, str) for text in found):
        raise SettingError(f"--data {data} has rows without a text in the column {field!r}. Name it with --field.")
    return found


def _fit(args: argparse.Namespace) -> Part:
    data = texts(args.data, args.field)
    training = training_arguments(
        args.out,
        torch.accelerator.current_accelerator() or torch.device("cpu"),
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        num_train_epochs=args.epochs,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(training.device)
    common: dict[str, Any] = {
        "block_size": args.block_size,
        "args": training,
        "cache_dir": args.cache,
        "output_dir": args.out,
    }
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.kind == "adapter":
        kind = {"blocks": args.blocks, "num_heads": args.heads, "own_head": args.own_head}
        return fit_adapter(model, tokenizer, data, exit_layer=args.exit_layer, **kind, **common)
    if args.kind == "heads":
        chosen = {"layers": args.layers, "num_heads": args.heads, "metric": args.metric}
        kind = {"rank": args.rank, "copied": args.copied}
        return fit_exit_heads(model, tokenizer, data, **chosen, **kind, **common)
    sampling = {"do_sample": args.sample, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    return fit_probe(model, tokenizer, data, exit_layer=args.exit_layer, **sampling, **common)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 and one line where something is wrong with what was asked for."""
    args = _parser().parse_args(arguments)
    try:
        part = _fit(args)
    except SelfSpecError as error:
        print(f"hf-selfspec: {error}", file=sys.stderr)
        return 1
    for name, value in {**part.about["recipe"], **part.about["figures"]}.items():
        print(f"{name:<32} {value}")
    print(f"{part.kind} of {part.num_parameters:,} parameters in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
