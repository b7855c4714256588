"""``hf-selfspec audit``: is it exact with this model, dtype and these prompts?"""

from __future__ import annotations

from typing import Annotated

import typer

from .options import ChatOption, MaxNewTokensOption, MethodsOption, ModelOptions, TextOptions, takes_options
from .output import progress


@takes_options
def audit(
    model: ModelOptions,
    data: TextOptions,
    chat: ChatOption = None,
    methods: MethodsOption = ("selfspec",),  # type: ignore[assignment]
    max_new_tokens: MaxNewTokensOption = 64,
    max_prompt_tokens: Annotated[int, typer.Option(help="Tokens of a raw prompt that count, the first ones.")] = 512,
    sample: Annotated[
        bool, typer.Option("--sample", help="Test the distribution of the first drawn tokens, on short prompts.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Of drawn tokens.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Share of the probability from which tokens are drawn.")] = None,
    draws: Annotated[int, typer.Option(help="For each prompt, with --sample.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of drawn tokens.")] = 0,
) -> None:
    """Compares texts with plain generate's; exit code 1 where a difference is no near tie."""
    from hf_selfspec import audit
    from hf_selfspec.loading import set_seed
    from hf_selfspec.prompts import as_prompts
    from hf_selfspec.spec_text import read_spec, split

    names = split(methods)
    specs = [read_spec(name, "--methods") for name in names]
    texts, named = data.read(), model.find()
    tokenizer = named.tokenizer()
    prompts = as_prompts(tokenizer, texts, chat)
    network = model.load(named)
    set_seed(seed)
    all_passed = True
    for name, spec in zip(names, specs, strict=True):
        with progress(f"audit of {name}", len(prompts)) as advance:
            found = audit(
                network,
                tokenizer,
                prompts,
                spec,
                max_new_tokens=max_new_tokens,
                max_prompt_tokens=max_prompt_tokens,
                sample=sample,
                temperature=temperature,
                top_p=top_p,
                draws=draws,
                name=name,
                after_prompt=advance,
            )
        print(f"{found}\n")
        all_passed &= found.passed
    if not all_passed:
        raise typer.Exit(1)
