"""``hf-selfspec bench``: whether self-speculation pays with a model and prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .options import ModelOptions, PromptFieldOption, takes_options

# Prompts in a stream of one kind, twice as many as an interval needs, and of each kind if there are several.
_OF_ONE_KIND, _OF_EACH_KIND = 20, 5
# Options that are settings of the same name.
_SETTINGS = ("max_new_tokens", "top_p", "top_k", "seed", "clock", "passes")


@dataclass(frozen=True)
class StreamOptions:
    """Which prompts."""

    data: Annotated[
        list[str],
        typer.Option(
            help="A .jsonl file of prompts, a .txt file with a prompt in each line, or a dataset of the Hub; repeat it "
            "for more. A column `kind` groups prompts."
        ),
    ]
    out: Annotated[str, typer.Option(help="Folder for the report. The same command resumes from it.")]
    field: PromptFieldOption = None
    kinds: Annotated[list[str] | None, typer.Option(help="Only these kinds of prompts, separated by commas.")] = None
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each kind; by default 20 for a single kind, 5 each for several."),
    ] = None
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts instead of answering chats.")] = False
    repeat: Annotated[bool, typer.Option("--repeat", help="Run the whole stream twice.")] = False


@dataclass(frozen=True)
class MethodOptions:
    """Which methods of generating, and how."""

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


@takes_options
def bench(which: ModelOptions, stream: StreamOptions, how: MethodOptions) -> None:
    """Compare all methods of generating on your prompts: which is fastest, and are the tokens the same?"""
    from ..bench.compare import longest_prompt, measured
    from ..bench.methods import methods_of
    from ..bench.prompts import Encoder, repeated, stream_of, texts_of
    from ..bench.settings import Settings
    from ..data.prompts import has_chats
    from ..errors import SettingError
    from ..learned.files import check_folder, path_of
    from .spec_text import split

    shared: dict[str, Any] = {name: getattr(how, name) for name in _SETTINGS}
    lists = tuple(how.temperature or (0.0,)), tuple(how.batch_size or (1,))
    settings = Settings(temperatures=lists[0], batch_sizes=lists[1], **shared)
    check_folder("--out", stream.out)
    methods = methods_of(how.methods or ()) or None
    texts = texts_of(stream.data, stream.field)  # before the model, so that errors in files are reported at once
    kinds = list(split(stream.kinds or ())) or list(texts)
    unknown = [kind for kind in kinds if kind not in texts]
    if unknown:
        raise SettingError(f"--kinds {', '.join(unknown)}: --data has no such prompts, only {', '.join(texts)}.")
    named = which.find()
    tokenizer, longest = named.tokenizer(), longest_prompt(named.config(), settings)
    chat = has_chats(tokenizer) and not stream.raw
    encoder = Encoder(tokenizer, min(longest, stream.max_prompt_tokens or longest), chat)
    count = stream.prompts or (_OF_ONE_KIND if len(kinds) == 1 else _OF_EACH_KIND)
    prompts = stream_of({kind: texts[kind] for kind in kinds}, encoder, count, random.Random(settings.seed))
    about = {"prompts_left_out": dict(+encoder.left_out), "data": stream.data, "prompts_per_kind": count, "chat": chat}
    if stream.repeat:
        prompts = repeated(prompts)
    found = measured(which.load(named), tokenizer, prompts, settings, methods, path_of(stream.out), about)
    print(f"{found}\n\nThe whole report is {stream.out}/report.html.")
