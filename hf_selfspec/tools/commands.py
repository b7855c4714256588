"""The commands, but for those that fit, which wrap functions of the package, and the options that they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console

if TYPE_CHECKING:
    from .. import Piece

# Options that several commands take.
MODEL = "Folder of the model, or its name on the Hub."
Model = Annotated[str, typer.Option(help=MODEL)]
REVISION = "Branch, tag or commit of the model on the Hub."
Revision = Annotated[str | None, typer.Option(help=REVISION)]
_Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
DTYPES = get_args(_Dtype)
DTYPE = "Data type of the model's weights."
ATTENTION = "Attention of transformers, e.g. sdpa or flash_attention_2."
DATA = "A .jsonl or .txt file, or a dataset of the Hub."
Data = Annotated[str, typer.Option(help=DATA)]
FIELD = "Column of the text, `text` by default."
Field = Annotated[str | None, typer.Option(help=FIELD)]
PROMPT_DATA = "A .jsonl file of prompts, a .txt file with a prompt in each line, or a dataset of the Hub"
PromptField = Annotated[
    str | None,
    typer.Option(
        help="Column of the prompt, a text or a chat; by default messages, prompt, text, question or instruction, the "
        "first one that is there."
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Whether a prompt is a chat message or a text to continue; by default a chat message if the model has a "
        "chat template.",
    ),
]
Prompts = Annotated[int, typer.Option(min=1, help="The number of texts to take, from the beginning of the data.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")]
MaxPromptTokens = Annotated[
    int, typer.Option(min=1, help="The most tokens of a prompt; the rest is cut off, except of chats.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]

# Prompts in a stream of one kind, twice as many as an interval needs, and of each kind if there are several.
_OF_ONE_KIND, _OF_EACH_KIND = 20, 5
# The colour of accepted drafts on a terminal.
_DRAFTED = "green"
_ASK = "> "


def _named_model(
    model: Model,
    revision: Revision = None,
    dtype: Annotated[_Dtype, typer.Option(help=DTYPE)] = "auto",
    attn_implementation: Annotated[str | None, typer.Option(help=ATTENTION)] = None,
    device: Annotated[
        str | None, typer.Option(help="E.g. cpu, cuda or cuda:1; by default the accelerator, if there is one.")
    ] = None,
    device_map: Annotated[
        str | None, typer.Option(help="How to spread the model over devices instead, e.g. auto or balanced.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads on the CPU.")] = None,
) -> Any:
    """Sets up the process of a command; returns its model, of which nothing is loaded yet."""
    from .. import SettingError
    from ..train.loading import NamedModel, set_up

    if device is not None and device_map is not None:
        raise SettingError("--device and --device-map are both given: give one of the two.")
    place = set_up(device, threads)
    weights = {"dtype": dtype, "attn_implementation": attn_implementation, "device_map": device_map}
    return NamedModel(model, place if device_map is None else None, revision, **weights)


def _on_model(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :func:`_named_model` in the place of its first argument, the model."""
    loading = signature(_named_model, eval_str=True).parameters
    _, *others = signature(command, eval_str=True).parameters.values()

    def run(**options: Any) -> None:
        command(_named_model(**{name: options.pop(name) for name in loading}), **options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [option.replace(kind=option.KEYWORD_ONLY) for option in (*loading.values(), *others)]
    vars(run)["__signature__"] = Signature(parameters)  # of which typer makes the options
    return run


@_on_model
def audit(
    named: Any,
    data: Annotated[str, typer.Option(help=f"{PROMPT_DATA}.")],
    field: PromptField = None,
    prompts: Prompts = 8,
    chat: Chat = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="As generate's --spec; several separated by commas or by repeating the option; selfspec by default."
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 64,
    max_prompt_tokens: MaxPromptTokens = 512,
) -> None:
    """Compare texts with those of plain generate; exit with 1 if a difference is not a near tie."""
    from .. import audit
    from ..model.encoding import as_prompts
    from ..train.prompts import read_prompts
    from .spec_text import read_spec, split

    settings = {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens}
    specs = {name: read_spec(name, "--methods") for name in split(methods or ["selfspec"])}
    texts, tokenizer = read_prompts(data, field)[:prompts], named.tokenizer()
    chats, network = as_prompts(tokenizer, texts, chat), named.model()
    all_passed = True
    for name, spec in specs.items():
        report = audit(network, tokenizer, chats, spec, name=name, **settings)
        print(f"{report}\n")
        all_passed &= report.passed
    if not all_passed:
        raise typer.Exit(1)


@_on_model
def bench(
    named: Any,
    data: Annotated[
        list[str], typer.Option(help=f"{PROMPT_DATA}; repeat it for more. A column `kind` groups prompts.")
    ],
    out: Annotated[str, typer.Option(help="Folder for the report.")],
    field: PromptField = None,
    kinds: Annotated[list[str] | None, typer.Option(help="Only these kinds of prompts, separated by commas.")] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each kind; by default 20 for a single kind, 5 each for several."),
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts instead of answering chats.")] = False,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="prompt-lookup, static-compiled, selfspec, or a value of generate's --spec, separated by commas; by "
            "default all that fit."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt, at least 2.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Prompts in a batch.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the choice of prompts.")] = 0,
) -> None:
    """Compare all methods of generating on your prompts: which is fastest, and are the tokens the same?"""
    from .. import SettingError, compare
    from ..learned.files import check_folder
    from .compare import drawn, texts_of
    from .methods import methods_of
    from .spec_text import split

    check_folder("--out", out)
    compared = split(methods or ()) or None
    if compared is not None:
        methods_of(compared)  # before the model, so that errors are reported at once, as those in files
    texts = texts_of(data, field)
    chosen = split(kinds or ()) or list(texts)
    unknown = [kind for kind in chosen if kind not in texts]
    if unknown:
        raise SettingError(f"--kinds {', '.join(unknown)}: --data has no such prompts, only {', '.join(texts)}.")
    count = prompts or (_OF_ONE_KIND if len(chosen) == 1 else _OF_EACH_KIND)
    comparison = compare(
        named.model(),
        named.tokenizer(),
        drawn({kind: texts[kind] for kind in chosen}, count, seed),
        compared,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperature=temperature,
        batch_size=batch_size,
        seed=seed,
        chat=False if raw else None,
        out=out,
    )
    print(f"{comparison}\n\nThe whole report is {out}/report.md.")


@_on_model
def exit_report(
    named: Any,
    data: Data,
    field: Field = None,
    prompts: Prompts = 8,
    max_length: Annotated[int, typer.Option(min=2, help="The most tokens of a text; the rest is cut off.")] = 512,
    plot: Annotated[str | None, typer.Option(help="File for a plot, e.g. exits.png; needs matplotlib.")] = None,
) -> None:
    """Show how well each layer of a model predicts the next token."""
    from .. import exit_report
    from ..train.prompts import texts

    rows, tokenizer = texts(data, field)[:prompts], named.tokenizer()
    report = exit_report(named.model(), tokenizer, rows, max_length=max_length)
    print(report)
    if plot is not None:
        report.plot(plot)


@_on_model
def generate(
    named: Any,
    prompt: Annotated[str | None, typer.Option(help="The prompt to answer or to continue.")] = None,
    file: Annotated[str | None, typer.Option(help="A text file with the prompt.")] = None,
    chat: Chat = None,
    spec: Annotated[
        str,
        typer.Option(
            help="selfspec, lookup, quantized, mtp, layerskip, swift or adaspeed; a folder that was saved or fitted; "
            'or an expression such as "SelfSpec.layerskip(8)".'
        ),
    ] = "selfspec",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling; 0 for greedy decoding.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Top-p of sampling.")] = None,
    seed: Seed = 0,
) -> None:
    """Generate text; accepted drafts are green on a terminal. Without a prompt, chat."""
    import torch

    from .. import SettingError, stream
    from ..generate.streaming import sampling
    from ..model.encoding import check_chats, has_chats
    from ..train.prompts import content
    from .spec_text import read_spec

    sampling("generate", temperature, top_p)
    if prompt is not None and file is not None:
        raise SettingError("--prompt and --file are both given: give one of the two.")
    prompt = prompt if file is None else content("--file", file)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    drafts, tokenizer = read_spec(spec), named.tokenizer()
    is_chat = prompt is None or (has_chats(tokenizer) if chat is None else chat)
    if is_chat:
        check_chats(tokenizer)
    network, console = named.model(), Console(highlight=False)

    def write(piece: Piece) -> None:
        if console.is_terminal:
            console.out(piece.text, style=_DRAFTED if piece.from_draft else None, highlight=False, end="")
        else:
            sys.stdout.write(piece.text)
        sys.stdout.flush()

    torch.manual_seed(seed)
    messages: list[dict[str, Any]] = []
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    for text in _typed_lines() if prompt is None else [prompt]:
        messages.append({"role": "user", "content": text})
        try:
            answer = stream(network, tokenizer, messages if is_chat else text, write, spec=drafts, **options)
        except KeyboardInterrupt:
            print(flush=True)  # the message about it gets a line of its own
            raise
        print(flush=True)
        if (stats := drafts.stats) is not None:  # on stderr, so that only the text goes into a file
            print(
                f"[{stats.tokens} tokens, {stats.tokens / stats.total_seconds:.1f} tokens/s; {stats.rounds} rounds, "
                f"{stats.accepted / max(stats.rounds, 1):.2f} drafted tokens accepted in each]",
                file=sys.stderr,
            )
        messages.append({"role": "assistant", "content": answer})


def _typed_lines() -> Iterator[str]:
    """Yields what the user types, until the end of the input."""
    while True:
        try:
            text = input(_ASK)
        except EOFError:
            print()
            return
        if text.strip():
            yield text


def inspect(model: Model, revision: Revision = None) -> None:
    """Show what a model is made of and what is supported with it; no weights are loaded."""
    from .. import inspect_model
    from ..train.loading import NamedModel

    print(inspect_model(NamedModel(model, revision=revision).config))


@_on_model
def tune(
    named: Any,
    data: Data,
    out: Annotated[str, typer.Option(help="Folder for the result.")],
    field: Field = None,
    prompts: Prompts = 8,
    max_prompt_tokens: MaxPromptTokens = 256,
    max_new_tokens: MaxNewTokens = 64,
    steps: Annotated[int, typer.Option(min=1, help="Sets of blocks to time.")] = 100,
    seed: Seed = 0,
) -> None:
    """Find the blocks to skip for a kind of text by timing drafts on it (Self-SD)."""
    from .. import OfflineSearch, tune
    from ..learned.files import check_folder
    from ..learned.saving import FILE_NAME
    from ..train.prompts import texts

    check_folder("--out", out, [FILE_NAME])
    rows, tokenizer = texts(data, field)[:prompts], named.tokenizer()
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens}
    network = named.model()
    spec = tune(network, tokenizer, rows, search=OfflineSearch(max_steps=steps, seed=seed), **limits)
    spec.save_pretrained(out, network)
    print(f"{spec.draft}\n{spec.stop}\n\nTo use it:\n")
    print(f"model.generate(**inputs, assistant=SelfSpec.from_pretrained({out!r}))")
