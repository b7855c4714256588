"""``hf-selfspec measure``: figures of the engine itself, each with options of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import PROGRAM

# All arguments go to the figure's own parser, --help among them.
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_FIGURES = """engine        efficiency on random models whose exit agrees at a set rate
context       cost per token by context
batch         speed by batch size
memory        peak memory
training      step time and peak memory of training with EarlyExitLoss and LayerDropout
known-answer  how well searches find the half of the blocks that hardly matters
forward       our forwards over 1 to 32 tokens relative to transformers' own over one
compiled      compiled rounds of a small model compared with eager ones
exits         a trained model's early exits, and what is attainable with them
searches      searches for layers to skip on a stream
fitted        stop rules, adapters and exit heads
grammar       JSON by a schema, with xgrammar
gpu           checks and timings of an accelerator"""
_HELP = f"""Usage: {PROGRAM} measure FIGURE [OPTIONS]

Figures of the engine itself, as Markdown tables; `{PROGRAM} bench` shows whether it pays on your prompts.

{_FIGURES}

`{PROGRAM} measure FIGURE --help` shows the options of one."""


def measure(words: Annotated[list[str] | None, typer.Argument(help="The figure and its options.")] = None) -> int:
    """Measure the engine itself: forwards, exits, searches, memory, training, an accelerator."""
    given = list(words or ())
    if not given or given[0] == "--help":
        print(_HELP)
        return 0
    from hf_selfspec.bench.figures import main

    return main(given, f"{PROGRAM} measure")
