"""Options that several commands take, declared once."""

from typing import Annotated, Literal

import typer

MODEL = "Folder of the model, or its name on the Hub."
Model = Annotated[str, typer.Option(help=MODEL)]
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
DTYPE = "Data type of the model's weights."
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32", "float64"], typer.Option(help=DTYPE)]
Device = Annotated[
    str | None, typer.Option(help="E.g. cpu, cuda or cuda:1; by default the accelerator, if there is one.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of torch threads on the CPU.")]
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
