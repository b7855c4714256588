"""The commands of ``hf-selfspec``, and their options."""

from __future__ import annotations

import argparse
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# The names of an option, and how argparse takes it.
Option = tuple[tuple[str, ...], dict[str, Any]]
# The function of each command, and its options.
COMMANDS: dict[str, tuple[Callable[[Namespace], int | None], list[Option]]] = {}

# Prompts in a stream of one kind, twice as many as an interval needs, and of each kind if there are several.
_OF_ONE_KIND, _OF_EACH_KIND = 20, 5


def _option(name: str, about: str, **how: Any) -> Option:
    shown = "" if how.get("default") in (None, "") else " (%(default)s by default)"
    return (f"--{name}",), {"help": f"{about}{shown}.", **how}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (temperature := float(text)) < math.inf:
            return temperature
    raise argparse.ArgumentTypeError(f"it must be a number of at least 0, got {text!r}")


def _command(*options: Option) -> Callable[[Callable[[Namespace], int | None]], Callable[[Namespace], int | None]]:
    """Makes a command of a function."""

    def registered(run: Callable[[Namespace], int | None]) -> Callable[[Namespace], int | None]:
        COMMANDS[run.__name__.replace("_", "-")] = run, list(options)
        return run

    return registered


def _number(name: str, about: str, default: int | None = None) -> Option:
    return _option(name, about, type=_count, default=default)


def _max_new_tokens(default: int) -> Option:
    return _number("max-new-tokens", "tokens to generate for each prompt", default)


_TYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_MODEL = _option("model", "folder of the model, or its name on the Hub", required=True)
_REVISION = _option("revision", "branch, tag or commit of the model on the Hub")
_DTYPE = _option("dtype", "data type of the model's weights", choices=_TYPES, default="auto")
_ATTENTION = _option("attn-implementation", "attention of transformers, e.g. sdpa or flash_attention_2")
_LOADING = (
    _MODEL,
    _REVISION,
    _DTYPE,
    _ATTENTION,
    _option("device", "e.g. cpu, cuda or cuda:1; otherwise the accelerator, if there is one"),
    _option("device-map", "how to spread the model over devices instead, e.g. auto or balanced"),
    _number("threads", "number of torch threads on the CPU"),
)
_PROMPTS = _number("prompts", "texts to take, from the beginning of the data", 8)
_DATA = _option("data", "a .jsonl or .txt file", required=True)
_OUT = _option("out", "folder for the result", required=True)
_FIELD = _option("field", "column of the text, otherwise `text`")
_PROMPT_DATA = "a .jsonl file of prompts, or a .txt file with a prompt in each line"
_PROMPT_FIELD = _option(
    "field",
    "column of the prompt or chat; otherwise the first of messages, prompt, text, question, instruction",
)
_IS_CHAT: dict[str, Any] = {"dest": "chat", "action": "store_const"}
_CHAT: tuple[Option, ...] = (
    _option("chat", "prompts are chat messages, as otherwise if the model has a chat template", const=True, **_IS_CHAT),
    _option("raw", "prompts are texts to continue", const=False, **_IS_CHAT),
)
_TEMPERATURE = _option("temperature", "0 for greedy decoding", type=_temperature, default=0.0)
_SEED = _option("seed", "seed of random numbers", type=int, default=0)
OF_FITS = (_MODEL, _DATA, _OUT, _FIELD, _DTYPE, _REVISION, _ATTENTION)


def _named(args: Namespace) -> Any:
    """Sets up the process of a command; returns its model, of which nothing is loaded yet."""
    from .. import SettingError
    from ..train.loading import NamedModel, set_up

    if args.device is not None and args.device_map is not None:
        raise SettingError("--device and --device-map are both given: give one of the two.")
    place = set_up(args.device, args.threads)
    weights = {name: getattr(args, name) for name in ("dtype", "attn_implementation", "device_map")}
    return NamedModel(args.model, place if args.device_map is None else None, args.revision, **weights)


@_command(
    *_LOADING,
    _option("data", _PROMPT_DATA, required=True),
    _PROMPT_FIELD,
    _PROMPTS,
    *_CHAT,
    _option("methods", "as generate's --spec, several separated by commas; otherwise selfspec", action="append"),
    _max_new_tokens(64),
    _number("max-prompt-tokens", "most tokens of a prompt; the rest is cut off", 512),
)
def audit(args: Namespace) -> int:
    """Compare texts with those of plain generate; exit with 1 if a difference is not a near tie."""
    from .. import audit
    from ..model.encoding import as_prompts
    from ..train.loading import read_prompts
    from .methods import read_spec, split

    named = _named(args)
    specs = {name: read_spec(name, "--methods") for name in split(args.methods or ["selfspec"])}
    texts, tokenizer = read_prompts(args.data, args.field)[: args.prompts], named.tokenizer()
    chats, model, all_passed = as_prompts(tokenizer, texts, args.chat), named.model(), True
    limits = {"max_new_tokens": args.max_new_tokens, "max_prompt_tokens": args.max_prompt_tokens}
    for name, spec in specs.items():
        report = audit(model, tokenizer, chats, spec, name=name, **limits)
        print(f"{report}\n")
        all_passed &= report.passed
    return 0 if all_passed else 1


@_command(
    *_LOADING,
    _option(
        "data", f"{_PROMPT_DATA}; repeat it for more. A column `kind` groups prompts", action="append", required=True
    ),
    _OUT,
    _PROMPT_FIELD,
    _number("prompts", "prompts of each kind that fit; otherwise 20 for a single kind, 5 each for several"),
    _number("max-prompt-tokens", "longer prompts are left out"),
    *_CHAT,
    _option(
        "methods",
        "prompt-lookup, static-compiled, selfspec, or a value of generate's --spec, separated by commas; otherwise all "
        "that fit",
        action="append",
    ),
    _max_new_tokens(128),
    _TEMPERATURE,
    _number("batch-size", "prompts in a batch", 1),
    _SEED,
)
def bench(args: Namespace) -> None:
    """Compare all methods of generating on your prompts: which is fastest, and are the tokens the same?"""
    from .. import compare
    from ..learned.files import check_folder
    from ..model.encoding import check_chats
    from .compare import texts_of
    from .methods import methods_of, split

    named = _named(args)
    check_folder("--out", args.out)
    methods = split(args.methods or ()) or None
    if methods is not None:
        methods_of(methods)  # before the model, so that errors are reported at once, as those in files
    texts = texts_of(args.data, args.field)
    names = ("max_new_tokens", "max_prompt_tokens", "temperature", "batch_size", "seed", "chat", "out")
    options = {name: getattr(args, name) for name in names}
    options["prompts_a_kind"] = args.prompts or (_OF_ONE_KIND if len(texts) == 1 else _OF_EACH_KIND)
    tokenizer = named.tokenizer()
    if args.chat:
        check_chats(tokenizer)
    comparison = compare(named.model(), tokenizer, texts, methods, **options)
    print(f"{comparison}\n\nThe report is {args.out}/report.md.")


@_command(
    *_LOADING,
    _DATA,
    _FIELD,
    _PROMPTS,
    _number("max-length", "most tokens of a text; the rest is cut off", 512),
)
def exit_report(args: Namespace) -> None:
    """Show how well each layer of a model predicts the next token."""
    from .. import exit_report
    from ..train.loading import texts

    named = _named(args)
    rows, tokenizer = texts(args.data, args.field)[: args.prompts], named.tokenizer()
    report = exit_report(named.model(), tokenizer, rows, max_length=args.max_length)
    print(report)


@_command(
    *_LOADING,
    _option("prompt", "the prompt to answer or to continue, otherwise the standard input"),
    *_CHAT,
    _option(
        "spec",
        "selfspec, lookup, quantized, mtp, layerskip, swift or adaspeed; a folder that was saved or fitted; or an "
        'expression such as "SelfSpec.layerskip(8)"',
        default="selfspec",
    ),
    _max_new_tokens(256),
    _TEMPERATURE,
    _SEED,
)
def generate(args: Namespace) -> None:
    """Generate text, shown as it is generated."""
    import torch
    from transformers import TextStreamer

    from ..model.encoding import as_prompts, encoded
    from .methods import read_spec

    named = _named(args)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature:
        options["temperature"] = args.temperature
    text = sys.stdin.read() if args.prompt is None else args.prompt
    drafts, tokenizer = read_spec(args.spec), named.tokenizer()
    (prompt,) = as_prompts(tokenizer, [text], args.chat)
    model = named.model()
    torch.manual_seed(args.seed)
    as_text = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    options |= {"streamer": TextStreamer(tokenizer, skip_prompt=True, **as_text), "assistant": drafts}
    try:
        model.generate(**encoded(tokenizer, prompt, model.device), **options)
    except BaseException:  # also an interrupt, whose message gets a line of its own
        print(flush=True)
        raise
    if (stats := drafts.stats) is not None:  # on stderr, so that only the text goes into a file
        counts = (
            f"[{stats.tokens} tokens, {stats.tokens / stats.total_seconds:.1f} tokens/s; {stats.rounds} rounds, "
            f"{stats.accepted / max(stats.rounds, 1):.2f} drafted tokens accepted in each]"
        )
        print(str(stats) if stats.left_to_generate else counts, file=sys.stderr)


@_command(
    _option("model", "folder of the model, or its name on the Hub"),
    _REVISION,
    _option("head", "folder of a head, or its name on the Hub, which is shown in place of a model or before it"),
)
def inspect(args: Namespace) -> None:
    """Show what a model is made of and what is supported with it, or what a head is; no weights are loaded."""
    from .. import SettingError, inspect_model
    from ..drafts.attached import describe_head
    from ..train.loading import NamedModel

    if args.head is None and args.model is None:
        raise SettingError("inspect needs --model or --head.")
    if args.head is not None:
        print(describe_head(args.head))
    if args.model is not None:
        print(inspect_model(NamedModel(args.model, revision=args.revision).config))
