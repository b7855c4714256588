"""``hf-selfspec tune``: the blocks to skip, searched in advance."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import MaxNewTokensOption, ModelOptions, TextOptions, takes_options


@takes_options
def tune(
    model: ModelOptions,
    data: TextOptions,
    out: Annotated[
        str, typer.Option(help="Folder for the result, and for the steps, from which a stopped search goes on.")
    ],
    max_prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt that count, the first ones.")] = 256,
    max_new_tokens: MaxNewTokensOption = 64,
    steps: Annotated[int, typer.Option(help="Sets of blocks to time.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the random sets.")] = 0,
) -> None:
    """Finds the blocks to skip for a kind of text by timing drafts on it (Self-SD)."""
    from hf_selfspec import OfflineSearch, tune
    from hf_selfspec.files import check_folder
    from hf_selfspec.saving import FILE_NAME
    from hf_selfspec.settings import check_count

    check_count("--steps", steps)
    check_count("--max-prompt-tokens", max_prompt_tokens)
    check_folder("--out", out, [FILE_NAME])
    texts, named = data.read(), model.find()
    tokenizer = named.tokenizer()
    spec = tune(
        model.load(named),
        tokenizer,
        texts,
        search=OfflineSearch(max_steps=steps, seed=seed),
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        folder=out,
    )
    print(f"{spec.draft}\n{spec.stop}\n\nUse it so:\n")
    print(f"model.generate(**inputs, assistant=SelfSpec.from_pretrained({out!r}))")
