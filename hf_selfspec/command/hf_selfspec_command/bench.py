"""``hf-selfspec bench``: whether self-speculation pays on a model and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .options import ModelOptions, PromptFieldOption, takes_options

# Options that are settings by the same name.
_SETTINGS = ("max_new_tokens", "top_p", "top_k", "seed", "clock", "passes", "first_calls")


@dataclass(frozen=True)
class StreamOptions:
    """Which prompts."""

    data: Annotated[
        list[str],
        typer.Option(
            help="A .jsonl file of prompts, a .txt file with a prompt in each line, or a dataset of the Hub; again for "
            "more."
        ),
    ]
    out: Annotated[str, typer.Option(help="Folder for the report. The same command goes on with what is in it.")]
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="For each --data spec-bench, humaneval, gsm8k, editing, text or auto, which goes by the columns and "
            "never takes your own prompts for editing."
        ),
    ] = None
    field: PromptFieldOption = None
    kinds: Annotated[list[str] | None, typer.Option(help="Only these kinds of prompts, with commas between.")] = None
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each kind; without it 20 of a single kind, 5 of each of several."),
    ] = None
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Go on with beginnings of texts in place of chats.")] = False
    variants: Annotated[bool, typer.Option("--variants", help="Each prompt and, later, a variant of it.")] = False
    repeat: Annotated[bool, typer.Option("--repeat", help="The whole stream twice.")] = False


@dataclass(frozen=True)
class MethodOptions:
    """Which ways of generating, and how."""

    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="prompt-lookup, static-compiled, selfspec, selfspec-compiled, or as --spec of other commands, with "
            "commas between them; every one that fits if not given."
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 128
    temperature: Annotated[list[float] | None, typer.Option(help="0, the default, for greedy; again for another.")] = (
        None
    )
    batch_size: Annotated[list[int] | None, typer.Option(help="Prompts at once, 1 by default; again for another.")] = (
        None
    )
    top_p: Annotated[float, typer.Option(help="Where tokens are drawn.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Where tokens are drawn.")] = 0
    seed: Annotated[int, typer.Option(min=0, help="Of drawn tokens and of the choice of prompts.")] = 0
    clock: Annotated[
        str, typer.Option(help="wall, cpu, or auto: the CPU time on one thread of a CPU, otherwise the wall's.")
    ] = "auto"
    passes: Annotated[
        int, typer.Option(help="Times that the stream runs, each with a new SelfSpec; the last counts (3 for graphs).")
    ] = 1
    first_calls: Annotated[int, typer.Option(help="Prompts with a new SelfSpec each, behind the stream.")] = 0
    without: Annotated[
        list[str] | None, typer.Option(help="Leave parts of ours out: kernels, trees, suffix, successors, costs.")
    ] = None
    free_verification: Annotated[
        bool, typer.Option("--free-verification", help="Drafts as large as where verification is free.")
    ] = False
    memory: Annotated[
        bool, typer.Option("--memory", help="Each way's peak memory in a process of its own (on a CPU).")
    ] = False
    trace: Annotated[bool, typer.Option("--trace", help="Write our statistics of each call to trace.jsonl.")] = False


@takes_options
def bench(which: ModelOptions, stream: StreamOptions, how: MethodOptions) -> None:
    """Compare all ways of generating on your prompts: what is fastest, and are the tokens the same?"""
    from hf_selfspec.bench.comparison.request import BenchRequest
    from hf_selfspec.bench.comparison.settings import Settings
    from hf_selfspec.spec_text import split

    given: dict[str, Any] = {**vars(which), **vars(stream), **vars(how)}
    settings: dict[str, Any] = {name: given.pop(name) for name in _SETTINGS}
    settings["temperatures"] = tuple(given.pop("temperature") or (0.0,))
    settings["batch_sizes"] = tuple(given.pop("batch_size") or (1,))
    lists = {name: given.pop(name) or () for name in ("suite", "methods", "kinds", "without")}
    given |= {"suites": lists["suite"], "methods": lists["methods"]}
    given |= {name: split(lists[name]) for name in ("kinds", "without")}
    found = BenchRequest(**given, settings=Settings(**settings)).run()
    print(f"{found}\n\nThe whole report is {stream.out}/report.html.")
