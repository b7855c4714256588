"""Texts of fits: packed into rows of tokens, some of which are held out, or written by the model itself."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from accelerate import PartialState
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SettingError, SettingTypeError, UnsupportedOptionError, brief
from ..learned.files import path_of, reported
from ..model.anatomy import Anatomy, causal_lm
from ..model.encoding import Prompt, as_prompts, checked_texts, token_ids
from ..model.patching import evaluating
from ..selfspec import SelfSpec
from ..validation import StrPath, check_count

Tokenizer: TypeAlias = PreTrainedTokenizerBase | None
# One row in so many is held out of the training to measure the fit, and the most rows that are held out.
HELD_OUT, MOST_HELD_OUT = 20, 64
# Prompts that are answered at once; every second time answers are drawn, at this temperature.
AT_ONCE, _TEMPERATURE = 16, 0.7


def packed(tokenizer: Tokenizer, texts: Iterable[Any], length: int, name: str = "fit") -> torch.Tensor:
    """Texts, joined with end-of-text tokens, as rows ``[n, length]``; an incomplete last row is dropped."""
    check_count(f"{name}(block_size)", length)
    is_rows = isinstance(texts, Iterable) or hasattr(texts, "__getitem__")  # as torch's map-style datasets
    if not is_rows or isinstance(texts, (str, bytes, Mapping)):
        raise SettingTypeError(f"{name} takes a list of texts or a dataset with a `text` column, got {texts!r}.")
    tokens, end = list[int](), getattr(tokenizer, "eos_token_id", None)
    for text in texts:
        ids = _tokens(tokenizer, text, name)
        tokens += ids if end is None or ids[-1:] == [end] else [*ids, end]
    if not tokens:
        raise SettingError(f"{name} was given no text: the dataset is empty. Give texts that the model is used for.")
    if len(tokens) < length:
        raise SettingError(
            f"{name} was given {len(tokens)} tokens, fewer than one row of block_size={length}. Give more text or "
            "a smaller block_size."
        )
    return torch.tensor(tokens[: len(tokens) // length * length], device="cpu").view(-1, length)


def divided(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to train on, and those at the end that are held out."""
    count = len(rows) - min(MOST_HELD_OUT, len(rows) // HELD_OUT)
    return rows[:count], rows[count:]


def _tokens(tokenizer: Tokenizer, row: Any, name: str) -> list[int]:
    text = row.get("text") if isinstance(row, Mapping) else row
    if isinstance(row, Mapping) and "input_ids" in row:
        with suppress(TypeError, ValueError):
            return [int(token) for token in row["input_ids"]]
    if not isinstance(text, str) or tokenizer is None:
        raise SettingTypeError(
            f"{name} takes strings, or rows with a `text` (and the tokenizer) or with `input_ids`; got "
            f"{brief(repr(row))}."
        )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def write_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    file: StrPath,
    answer_tokens: int = 256,
) -> list[dict[str, Any]]:
    """Has a model answer prompts, in batches and every second time drawn at 0.7, and writes prompts with answers.

    What a model writes itself is what its drafts have to foresee, so fits to it draft best.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        tokenizer: its tokenizer.
        prompts: texts or chats.
        file: a new file of JSON lines with ``input_ids``, to which each batch is written when it is done.
        answer_tokens: the most tokens of an answer.

    Returns:
        The rows of the file, a prompt with its answer each, in the order of the prompts: the ``dataset`` of any fit.

    Raises:
        SettingError, SettingTypeError: there are no prompts, they are too long for the model, or the file exists.
        UnsupportedOptionError: this runs in several processes.
    """
    check_count("write_answers(answer_tokens)", answer_tokens)
    inner = causal_lm(model, "write_answers")
    texts = as_prompts(tokenizer, checked_texts("write_answers", prompts, chats=True, name="prompts"))
    ids = [token_ids(tokenizer, text) for text in texts]
    if PartialState().num_processes > 1:  # others would draw others
        raise UnsupportedOptionError(
            "write_answers runs in one process alone. Have one write the answers before, and give all of them its rows."
        )
    limit, longest = Anatomy.of(inner).position_limit, max(map(len, ids))
    if limit is not None and longest + answer_tokens > limit:
        raise SettingError(
            f"write_answers(answer_tokens={answer_tokens}): with the longest prompt, of {longest} tokens, these are "
            f"more than the {limit} positions of the model. Give fewer, or shorter prompts."
        )
    rows, spec = list[dict[str, Any]](), SelfSpec()
    with (
        reported(file),
        path_of(file).open("x", encoding="utf-8") as lines,
        evaluating(inner),
        torch.random.fork_rng(),
        torch.no_grad(),
    ):
        for begin in range(0, len(ids), AT_ONCE):
            torch.manual_seed(begin)
            settings = one_text_each(answer_tokens, _TEMPERATURE if begin // AT_ONCE % 2 else None)
            batch = [{"input_ids": text} for text in continued(inner, ids[begin : begin + AT_ONCE], settings, spec)]
            lines.writelines(f"{json.dumps(row)}\n" for row in batch)
            lines.flush()
            rows += batch
    return rows


def one_text_each(new_tokens: int, temperature: float | None = None) -> GenerationConfig:
    """Settings with which ``generate`` gives ids of one text a prompt, greedily or drawn at a temperature; others stay
    the model's own."""
    return GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=temperature is not None,
        temperature=temperature,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
        pad_token_id=0,
    )


def ends_of(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def continued(
    model: PreTrainedModel, prompts: Sequence[list[int]], settings: GenerationConfig, assistant: SelfSpec | bool = False
) -> list[list[int]]:
    """The tokens of prompts with what the model writes after them, up to the first one that ends a text."""
    longest, device = max(map(len, prompts)), model.get_input_embeddings().weight.device
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    output: Any = model.generate(ids, attention_mask=mask, generation_config=settings, assistant=assistant)
    rows, ends = output[:, longest:].tolist(), ends_of(model)
    lengths = [next((place for place, token in enumerate(row, 1) if token in ends), len(row)) for row in rows]
    return [prompt + row[:length] for prompt, row, length in zip(prompts, rows, lengths, strict=True)]
