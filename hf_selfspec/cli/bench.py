"""``hf-selfspec bench``: whether self-speculation pays with a model and prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

import typer

from ..bench.settings import Settings
from ..errors import SettingError
from .options import ModelOptions, PromptFieldOption, takes_options

# Prompts in a stream of one kind, twice as many as an interval needs, and of each kind if there are several.
_OF_ONE_KIND, _OF_EACH_KIND = 20, 5


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


@takes_options
def bench(
    which: ModelOptions,
    stream: StreamOptions,
    settings: Settings,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="prompt-lookup, static-compiled, selfspec, selfspec-compiled, or a value of generate's --spec, "
            "separated by commas; by default all that fit."
        ),
    ] = None,
) -> None:
    """Compare all methods of generating on your prompts: which is fastest, and are the tokens the same?"""
    from ..bench.compare import longest_prompt, measured
    from ..bench.methods import methods_of
    from ..bench.prompts import Encoder, repeated, stream_of, texts_of
    from ..data.prompts import has_chats
    from ..learned.files import check_folder, path_of
    from .spec_text import split

    check_folder("--out", stream.out)
    named_methods = methods_of(methods or ()) or None
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
    found = measured(which.load(named), tokenizer, prompts, settings, named_methods, path_of(stream.out), about)
    print(f"{found}\n\nThe whole report is {stream.out}/report.html.")
