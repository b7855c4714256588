"""``hf-selfspec bench``: whether self-speculation pays with a model and prompts."""

import random
from typing import Annotated, Literal

import typer

from . import options

# Prompts in a stream of one kind, twice as many as an interval needs, and of each kind if there are several.
_OF_ONE_KIND, _OF_EACH_KIND = 20, 5


def bench(
    model: options.Model,
    data: Annotated[
        list[str], typer.Option(help=f"{options.PROMPT_DATA}; repeat it for more. A column `kind` groups prompts.")
    ],
    out: Annotated[str, typer.Option(help="Folder for the report. The same command resumes from it.")],
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    field: options.PromptField = None,
    kinds: Annotated[list[str] | None, typer.Option(help="Only these kinds of prompts, separated by commas.")] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each kind; by default 20 for a single kind, 5 each for several."),
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts instead of answering chats.")] = False,
    repeat: Annotated[bool, typer.Option("--repeat", help="Run the whole stream twice.")] = False,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="prompt-lookup, static-compiled, selfspec, selfspec-compiled, or a value of generate's --spec, "
            "separated by commas; by default all that fit."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt, at least 2.")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0, the default, for greedy; repeat it for more.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Prompts in a batch; repeat it for more.")] = None,
    top_p: Annotated[float, typer.Option(help="Top-p of sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k of sampling.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the choice of prompts.")] = 0,
    clock: Annotated[
        Literal["auto", "wall", "cpu"],
        typer.Option(help="auto is CPU time with one thread on a CPU, otherwise wall time."),
    ] = "auto",
    passes: Annotated[
        int, typer.Option(help="Runs of the stream, each with a new SelfSpec; the last counts (3 for graphs).")
    ] = 1,
) -> None:
    """Compare all methods of generating on your prompts: which is fastest, and are the tokens the same?"""
    from .. import SettingError
    from ..bench.compare import longest_prompt, measured
    from ..bench.methods import methods_of
    from ..bench.request import Encoder, Settings, repeated, stream_of, texts_of
    from ..data.loading import NamedModel, set_up
    from ..data.prompts import has_chats
    from ..learned.files import check_folder, path_of
    from .spec_text import split

    temperatures, batch_sizes = tuple(temperature or (0.0,)), tuple(batch_size or (1,))
    settings = Settings(max_new_tokens, temperatures, batch_sizes, top_p, top_k, seed, clock, passes)
    check_folder("--out", out)
    wanted = methods_of(named_methods) if (named_methods := split(methods or ())) else None
    texts = texts_of(data, field)  # before the model, so that errors in files are reported at once
    chosen = split(kinds or ()) or list(texts)
    unknown = [kind for kind in chosen if kind not in texts]
    if unknown:
        raise SettingError(f"--kinds {', '.join(unknown)}: --data has no such prompts, only {', '.join(texts)}.")
    place, named = set_up(device, threads), NamedModel(model)
    tokenizer, longest = named.tokenizer(), longest_prompt(named.config, settings)
    chat = has_chats(tokenizer) and not raw
    encoder = Encoder(tokenizer, min(longest, max_prompt_tokens or longest), chat)
    count = prompts or (_OF_ONE_KIND if len(chosen) == 1 else _OF_EACH_KIND)
    stream = stream_of({kind: texts[kind] for kind in chosen}, encoder, count, random.Random(seed))
    if repeat:
        stream = repeated(stream)
    about = {"prompts_left_out": dict(+encoder.left_out), "data": data, "prompts_per_kind": count, "chat": chat}
    found = measured(named.model(dtype, place), tokenizer, stream, settings, wanted, path_of(out), about)
    print(f"{found}\n\nThe whole report is {out}/report.html.")
