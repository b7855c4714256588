"""``hf-selfspec tune``: searches in advance for the blocks to skip."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    MaxNewTokensOption,
    MaxPromptTokensOption,
    ModelOptions,
    SeedOption,
    TextOptions,
    takes_options,
)


@takes_options
def tune(
    model: ModelOptions,
    data: TextOptions,
    out: Annotated[
        str, typer.Option(help="Folder for the result, and for the steps from which a stopped search resumes.")
    ],
    max_prompt_tokens: MaxPromptTokensOption = 256,
    max_new_tokens: MaxNewTokensOption = 64,
    steps: Annotated[int, typer.Option(min=1, help="Sets of blocks to time.")] = 100,
    seed: SeedOption = 0,
) -> None:
    """Find the blocks to skip for a kind of text by timing drafts on it (Self-SD)."""
    from .. import OfflineSearch, tune
    from ..learned.files import check_folder
    from ..learned.saving import FILE_NAME

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
    print(f"{spec.draft}\n{spec.stop}\n\nTo use it:\n")
    print(f"model.generate(**inputs, assistant=SelfSpec.from_pretrained({out!r}))")
