"""``hf-selfspec``: fitting from the command line. What it prints is its output; the library itself prints nothing."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from .errors import SelfSpecError, SettingError, brief
from .files import check_folder
from .hub import is_name, trouble
from .model.anatomy import max_positions
from .parts.adapter import BLOCKS, Adapter
from .parts.heads import METRICS, ExitHeads
from .parts.part import CONFIG, FILES, Part
from .settings import check_count, check_exit, check_positive
from .train import fit_adapter, fit_exit_heads, fit_probe
from .train.adapter import usual_exit, usual_heads
from .train.fitting import Blocks, check_length, training_arguments
from .train.heads import chosen_layers, split
from .train.probe import check_warping
from .train.texts import texts

_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_USUAL_HEADS, _USUAL_TEMPERATURE = 4, 1.0
# What the config of every causal LM has, by these names or by those that it maps to them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_GIVE_MODEL = "Give the folder of a causal LM of transformers, or its name on the Hub."


class _Parser(argparse.ArgumentParser):
    """Whose errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}. See `{self.prog} --help`.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hf-selfspec", description="Generating faster with a part of the model itself.")
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
    heads.add_argument("--heads", type=int, help=f"how many, where no layers are given; {_USUAL_HEADS} by default")
    heads.add_argument("--rank", type=int, help="of the heads' linear layers, whole by default")
    heads.add_argument("--copied", action="store_true", help="begin with the model's own head")
    heads.add_argument("--metric", choices=sorted(METRICS), help="of confidence; the one that tells best by default")
    probe = kinds.add_parser("probe", help="AdaSPEED's probe of acceptance")
    probe.add_argument("--exit-layer", type=int, required=True)
    probe.add_argument("--sample", action="store_true", help="for drawn tokens")
    probe.add_argument("--temperature", type=float, help=f"of drawn tokens, {_USUAL_TEMPERATURE} by default")
    probe.add_argument("--top-k", type=int, help="of drawn tokens")
    probe.add_argument("--top-p", type=float, help="of drawn tokens")
    for kind in (adapter, heads, probe):
        kind.add_argument("--model", required=True, help="folder or name of the model")
        kind.add_argument("--data", required=True, help="a .jsonl or .txt file, or a dataset of the Hub")
        kind.add_argument("--field", help="column of the text, `text` by default")
        kind.add_argument("--out", required=True, help="folder for what is fitted")
        kind.add_argument("--block-size", type=int, default=256, help="tokens of a row")
        kind.add_argument("--batch", type=int, default=8, help="rows in a step, on each device")
        kind.add_argument("--learning-rate", type=float, default=1e-3)
        kind.add_argument("--epochs", type=float, default=1.0)
        kind.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the model")
        kind.add_argument("--cache", help="folder that keeps the model's states for further fits")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Checks what can be known without the text and the model.

    Raises:
        SettingError, SettingTypeError: something is not allowed, or has no effect beside something else.
    """
    counts = {"batch": args.batch, "exit-layer": getattr(args, "exit_layer", None)}
    counts |= {"heads": getattr(args, "heads", None), "rank": getattr(args, "rank", None)}
    for name, value in counts.items():
        if value is not None:
            check_count(f"--{name}", value)
    # Exit heads are calibrated on what the model writes behind the beginning of a row.
    check_count("--block-size", args.block_size, least=2 if args.kind == "heads" else 1)
    for layer in getattr(args, "layers", None) or ():
        check_count("--layers", layer)
    check_positive("--learning-rate", args.learning_rate)
    check_positive("--epochs", args.epochs)
    for name in _without_effect(args):
        raise SettingError(name)
    if args.kind == "probe" and args.sample:
        check_warping(_option, _or(args.temperature, _USUAL_TEMPERATURE), args.top_k, args.top_p)
    check_folder("--out", args.out, FILES)
    if args.cache is not None:
        check_folder("--cache", args.cache)


def _without_effect(args: argparse.Namespace) -> Iterator[str]:
    """What is to be said of options that another one leaves without an effect."""
    if args.kind == "adapter" and args.heads is not None and "attention" not in args.blocks:
        yield f"--heads {args.heads} has no effect with --blocks {' '.join(args.blocks)}: leave it out."
    if args.kind == "heads" and args.heads is not None and args.layers is not None:
        yield f"--heads {args.heads} has no effect with --layers, which tell how many there are: leave it out."
    if args.kind == "heads" and args.copied and args.rank is not None:
        yield f"--copied has no effect with --rank {args.rank}, since the model's own head is whole: leave one out."
    if args.kind == "probe" and not args.sample:
        for name, value in (("temperature", args.temperature), ("top-k", args.top_k), ("top-p", args.top_p)):
            if value is not None:
                yield f"--{name} {value} has no effect without --sample: add that, or leave it out."


def _check_model(args: argparse.Namespace, config: Any) -> None:
    """Checks what the config of the model's text decoder tells, before there are weights.

    Raises:
        SettingError: the model has not those layers, or not that width.
    """
    name = f"fit {args.kind}"
    check_length(name, args.block_size, max_positions(config))
    if not all(isinstance(getattr(config, size, None), int) for size in _SIZES):
        return  # no causal LM, as loading it will tell
    count, width = config.num_hidden_layers, config.hidden_size
    with torch.device("meta"):
        if args.kind == "heads":
            layers = chosen_layers(name, count, _or(args.heads, _USUAL_HEADS), args.layers)
            ExitHeads(layers, width, config.vocab_size, args.rank)
            return
        layer = usual_exit(config) if args.exit_layer is None else args.exit_layer
        check_exit(name, "exit_layer", layer, count)
        if args.kind == "adapter":
            Adapter(layer, width, args.heads or usual_heads(config.num_attention_heads, width), args.blocks)


def _text_config(name: str, **options: Any) -> Any:
    return AutoConfig.from_pretrained(name, **options).get_text_config(decoder=True)


def _rows(args: argparse.Namespace, tokenizer: Any, data: list[str]) -> list[dict[str, list[int]]]:
    """The text as rows of tokens, which is known to be enough before there are weights.

    Raises:
        SettingError: it is too little.
    """
    name = f"fit {args.kind}"
    blocks = Blocks(tokenizer, data, args.block_size, name)
    if args.kind == "heads":
        split(name, blocks)
    return [{"input_ids": ids} for ids in blocks.rows.tolist()]


def _loaded(what: str, load: Callable[..., Any], name: str, **options: Any) -> Any:
    """The config, tokenizer or model; code that is not of transformers itself does not run.

    Raises:
        SettingError: there is none.
    """
    try:
        return load(name, trust_remote_code=False, **options)
    except Exception as error:  # what transformers and the libraries below it raise for damaged files has no base
        raise SettingError(f"--model {name}: its {what} cannot be loaded ({brief(error)}). {_GIVE_MODEL}") from error


def _from_where(name: str) -> dict[str, Any]:
    """Options with which a model is loaded from a folder, the Hub, or what was downloaded where that does not answer.

    Raises:
        SettingError: it is nowhere.
    """
    if os.path.isdir(name):
        return {}
    why = trouble(HfApi().model_info, name) if is_name(name) else "it could have no such name"
    if not why:
        return {}
    if is_name(name) and isinstance(try_to_load_from_cache(name, CONFIG), str):
        return {"local_files_only": True}
    raise SettingError(f"--model {name}: there is no such folder, and the Hub has no such model ({why}). {_GIVE_MODEL}")


def _training(args: argparse.Namespace) -> TrainingArguments:
    return training_arguments(
        args.out,
        torch.accelerator.current_accelerator() or torch.device("cpu"),
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        num_train_epochs=args.epochs,
    )


def _fit(args: argparse.Namespace) -> Part:
    _check(args)
    data = texts(args.data, args.field)
    where = _from_where(args.model)
    _check_model(args, _loaded("config", _text_config, args.model, **where))
    rows = _rows(args, _loaded("tokenizer", AutoTokenizer.from_pretrained, args.model, **where), data)
    training = _training(args)
    model = _loaded("model", AutoModelForCausalLM.from_pretrained, args.model, dtype=args.dtype, **where)
    model = model.to(training.device)
    common: dict[str, Any] = {
        "block_size": args.block_size,
        "args": training,
        "cache_dir": args.cache,
        "output_dir": args.out,
    }
    if args.kind == "adapter":
        kind = {"blocks": args.blocks, "num_heads": args.heads, "own_head": args.own_head}
        return fit_adapter(model, None, rows, exit_layer=args.exit_layer, **kind, **common)
    if args.kind == "heads":
        chosen = {"layers": args.layers, "num_heads": _or(args.heads, _USUAL_HEADS), "metric": args.metric}
        kind = {"rank": args.rank, "copied": args.copied}
        return fit_exit_heads(model, None, rows, **chosen, **kind, **common)
    temperature = _or(args.temperature, _USUAL_TEMPERATURE)
    sampling = {"do_sample": args.sample, "temperature": temperature, "top_k": args.top_k, "top_p": args.top_p}
    return fit_probe(model, None, rows, exit_layer=args.exit_layer, **sampling, **common)


def _option(setting: str) -> str:
    """What a setting is called on the command line."""
    return f"--{setting.replace('_', '-')}"


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def _tell(message: object) -> None:
    """One line on stderr, whatever the message was."""
    print(f"hf-selfspec: {' '.join(str(message).split())}", file=sys.stderr)


@contextmanager
def _brief_warnings() -> Iterator[None]:
    """Warnings without the lines of code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _tell(message)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 and one line where something is wrong with what was asked for."""
    try:
        args = _parser().parse_args(arguments)
        with _brief_warnings():
            part = _fit(args)
    except SelfSpecError as error:
        _tell(error)
        return 1
    for name, value in {**part.about["recipe"], **part.about["figures"]}.items():
        print(f"{name:<32} {value}")
    print(f"{part.kind} of {part.num_parameters:,} parameters in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
