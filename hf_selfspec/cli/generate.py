"""``hf-selfspec generate``: streams text and marks the tokens that were accepted drafts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .options import ChatOption, MaxNewTokensOption, ModelOptions, SeedOption, SpecOption, takes_options

if TYPE_CHECKING:
    from .. import GenerationStats, Piece

# The colour of accepted drafts on a terminal.
_DRAFTED = "green"
_ASK = "> "


@takes_options
def generate(
    model: ModelOptions,
    prompt: Annotated[str | None, typer.Option(help="The prompt to answer or to continue.")] = None,
    file: Annotated[str | None, typer.Option(help="A text file with the prompt.")] = None,
    chat: ChatOption = None,
    spec: SpecOption = "selfspec",
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling; 0 for greedy decoding.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Top-p of sampling.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Generate text; accepted drafts are green on a terminal. Without a prompt, chat."""
    import torch

    from .. import stream
    from ..data.prompts import check_chats, has_chats
    from ..streaming import sampling
    from .spec_text import read_spec

    sampling("generate", temperature, top_p)
    given, drafts = _given(prompt, file), read_spec(spec)
    named = model.find()
    tokenizer = named.tokenizer()
    is_chat = has_chats(tokenizer) if chat is None else chat
    if is_chat or given is None:
        check_chats(tokenizer)
    network, write = model.load(named), _writer()
    torch.manual_seed(seed)
    messages: list[dict[str, Any]] = []
    for text in _asked() if given is None else [given]:
        messages.append({"role": "user", "content": text})
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        asked = messages if is_chat or given is None else text
        try:
            answer = stream(network, tokenizer, asked, write, spec=drafts, **options)
        except KeyboardInterrupt:
            print(flush=True)  # the message about it gets a line of its own
            raise
        print(flush=True)
        _summarize(drafts.stats)
        messages.append({"role": "assistant", "content": answer})


def _given(prompt: str | None, file: str | None) -> str | None:
    """The prompt, ``None`` for a chat."""
    from .. import SettingError
    from ..learned.files import path_of, read_text

    if prompt is not None and file is not None:
        raise SettingError("--prompt and --file are both given: give one of the two.")
    if file is not None:
        try:
            return read_text(path_of(file))
        except FileNotFoundError as error:
            raise SettingError(f"--file {file}: there is no such file.") from error
        except ValueError as error:
            raise SettingError(f"--file {file} cannot be read as text in UTF-8 ({error}).") from error
    if prompt is None and not sys.stdin.isatty():
        return sys.stdin.read()
    return prompt


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


def _writer() -> Callable[[Piece], None]:
    console = Console(highlight=False)

    def write(piece: Piece) -> None:
        if console.is_terminal:
            console.out(piece.text, style=_DRAFTED if piece.from_draft else None, highlight=False, end="")
        else:
            sys.stdout.write(piece.text)
        sys.stdout.flush()

    return write


def _summarize(stats: GenerationStats | None) -> None:
    """Prints one line about the text on stderr, so that only the text goes into a file."""
    if stats is not None:
        print(
            f"[{stats.tokens} tokens, {stats.tokens / stats.total_seconds:.1f} tokens/s; {stats.rounds} rounds, "
            f"{stats.accepted / max(stats.rounds, 1):.2f} drafted tokens accepted in each]",
            file=sys.stderr,
        )
