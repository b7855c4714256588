"""``hf-selfspec generate``: streams text and marks the tokens that were accepted drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import options

if TYPE_CHECKING:
    from .. import Piece

# The colour of accepted drafts on a terminal.
_DRAFTED = "green"
_ASK = "> "


def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option(help="The prompt to answer or to continue.")] = None,
    file: Annotated[str | None, typer.Option(help="A text file with the prompt.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    chat: options.Chat = None,
    spec: Annotated[
        str,
        typer.Option(
            help="selfspec, lookup, quantized, mtp, layerskip, swift or adaspeed; a folder that was saved or fitted; "
            'or an expression such as "SelfSpec.layerskip(8)".'
        ),
    ] = "selfspec",
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling; 0 for greedy decoding.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Top-p of sampling.")] = None,
    seed: options.Seed = 0,
) -> None:
    """Generate text; accepted drafts are green on a terminal. Without a prompt, chat."""
    import torch

    from .. import SettingError, stream
    from ..data.loading import NamedModel, set_up
    from ..data.prompts import check_chats, has_chats
    from ..data.texts import content
    from ..streaming import sampling
    from .spec_text import read_spec

    sampling("generate", temperature, top_p)
    if prompt is not None and file is not None:
        raise SettingError("--prompt and --file are both given: give one of the two.")
    given = prompt if file is None else content("--file", file)
    if given is None and not sys.stdin.isatty():
        given = sys.stdin.read()
    drafts, place, named = read_spec(spec), set_up(device, threads), NamedModel(model)
    tokenizer = named.tokenizer()
    is_chat = given is None or (has_chats(tokenizer) if chat is None else chat)
    if is_chat:
        check_chats(tokenizer)
    network, console = named.model(dtype, place), Console(highlight=False)

    def write(piece: Piece) -> None:
        if console.is_terminal:
            console.out(piece.text, style=_DRAFTED if piece.from_draft else None, highlight=False, end="")
        else:
            sys.stdout.write(piece.text)
        sys.stdout.flush()

    torch.manual_seed(seed)
    messages: list[dict[str, Any]] = []
    wanted: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    for text in _asked() if given is None else [given]:
        messages.append({"role": "user", "content": text})
        try:
            answer = stream(network, tokenizer, messages if is_chat else text, write, spec=drafts, **wanted)
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


def _asked() -> Iterator[str]:
    """Yields what the user types, until the end of the input."""
    while True:
        try:
            text = input(_ASK)
        except EOFError:
            print()
            return
        if text.strip():
            yield text
