"""``hf-selfspec bench``: whether self-speculation pays with a model and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .options import ModelOptions, PromptFieldOption, takes_options

# Options that are settings of the same name.
_SETTINGS = ("max_new_tokens", "top_p", "top_k", "seed", "clock", "passes", "first_calls")


@dataclass(frozen=True)
class StreamOptions:
    """Which prompts."""

    data: Annotated[
        list[str],
        typer.Option(
            help="A .jsonl file of prompts, a .txt file with a prompt in each line, or a dataset of the Hub; repeat it "
            "for more."
        ),
    ]
    out: Annotated[str, typer.Option(help="Folder for the report. The same command resumes from it.")]
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="For each --data: spec-bench, humaneval, gsm8k, editing, text, or auto, which goes by the columns and "
            "treats texts as your own prompts."
        ),
    ] = None
    field: PromptFieldOption = None
    kinds: Annotated[list[str] | None, typer.Option(help="Only these kinds of prompts, separated by commas.")] = None
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each kind; by default 20 for a single kind, 5 each for several."),
    ] = None
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue beginnings of texts instead of answering chats.")] = False
    variants: Annotated[bool, typer.Option("--variants", help="Add a variant of each prompt, later on.")] = False
    repeat: Annotated[bool, typer.Option("--repeat", help="Run the whole stream twice.")] = False


@dataclass(frozen=True)
class MethodOptions:
    """Which ways of generating, and how."""

    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="prompt-lookup, static-compiled, selfspec, selfspec-compiled, or a value of generate's --spec, "
            "separated by commas; by default all that fit."
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 128
    temperature: Annotated[list[float] | None, typer.Option(help="0, the default, for greedy; repeat it for more.")] = (
        None
    )
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Prompts in a batch, 1 by default; repeat it for more.")
    ] = None
    top_p: Annotated[float, typer.Option(help="Top-p of sampling.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Top-k of sampling.")] = 0
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling and of the choice of prompts.")] = 0
    clock: Annotated[
        str, typer.Option(help="wall, cpu, or auto: CPU time with one thread on a CPU, otherwise wall time.")
    ] = "auto"
    passes: Annotated[
        int, typer.Option(help="Runs of the stream, each with a new SelfSpec; the last one counts (3 for graphs).")
    ] = 1
    first_calls: Annotated[int, typer.Option(help="Prompts with a new SelfSpec each, after the stream.")] = 0
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out parts of SelfSpec: kernels, trees, suffix, successors, costs.")
    ] = None
    free_verification: Annotated[
        bool, typer.Option("--free-verification", help="Make drafts as large as if verification were free.")
    ] = False
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure each way's peak memory in a process of its own (on a CPU).")
    ] = False
    trace: Annotated[bool, typer.Option("--trace", help="Write statistics of each call to trace.jsonl.")] = False


@takes_options
def bench(which: ModelOptions, stream: StreamOptions, how: MethodOptions) -> None:
    """Compare all ways of generating on your prompts: which is fastest, and are the tokens the same?"""
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
