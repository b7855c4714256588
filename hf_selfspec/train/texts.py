"""Texts of fits: packed into rows of tokens, some of which are held out, or written by the model itself."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SettingError, SettingTypeError, brief
from ..learned.files import path_of, read_text, reported, written_whole
from ..model.anatomy import Anatomy, causal_lm
from ..model.encoding import Prompt, as_prompts, checked_texts, token_ids
from ..model.fingerprint import Fingerprint
from ..model.module_tools import is_tensor_parallel
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
    check_dataset(name, texts)
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


def check_dataset(name: str, dataset: object) -> None:
    """Raises if a dataset is something else than a list of rows."""
    is_rows = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")  # as torch's map-style datasets
    if not is_rows or isinstance(dataset, (str, bytes, Mapping)):
        raise SettingTypeError(f"{name} takes a list of texts or a dataset with a `text` column, got {dataset!r}.")


def divided(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to train on, and those at the end that are held out."""
    count = len(rows) - min(MOST_HELD_OUT, len(rows) // HELD_OUT)
    return rows[:count], rows[count:]


def _tokens(tokenizer: Tokenizer, text: Any, name: str) -> list[int]:
    if isinstance(text, Mapping):
        if "input_ids" in text:
            return [int(token) for token in text["input_ids"]]
        text = text.get("text")
    if not isinstance(text, str) or tokenizer is None:
        raise SettingTypeError(
            f"{name} takes strings, or rows with a `text` (and the tokenizer) or with `input_ids`; got {text!r}."
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

    What a model writes itself is what its drafts have to foresee, so fits to it draft best. A call that was stopped is
    resumed by the same call.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        tokenizer: its tokenizer.
        prompts: texts or chats.
        file: JSON lines with ``input_ids`` (and ``made_by``: the model and the length), as ``dataset`` of any fit.
        answer_tokens: the most tokens of an answer.

    Returns:
        The rows of the file, a prompt with its answer each, in the order of the prompts.

    Raises:
        SettingError, SettingTypeError: there are no prompts, they are too long for the model, or the file has something
            else.
    """
    check_count("write_answers(answer_tokens)", answer_tokens)
    texts = as_prompts(tokenizer, checked_texts("write_answers", prompts, chats=True, name="prompts"))
    prompt_ids = [token_ids(tokenizer, text) for text in texts]
    return answered(causal_lm(model, "write_answers"), prompt_ids, answer_tokens, path_of(file), "write_answers")


def answered(
    model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int, file: Path | None, name: str = "fit_mtp"
) -> list[dict[str, Any]]:
    """Returns rows of prompts with the model's answers. A file keeps them, so that writing can be resumed.

    Of several processes the first one writes, and sends each batch to the others, which would draw other answers.
    """
    limit, longest = Anatomy.of(model).position_limit, max(map(len, prompts))
    if limit is not None and longest + new_tokens > limit:
        raise SettingError(
            f"{name}(answer_tokens={new_tokens}): with the longest prompt, of {longest} tokens, these are more than "
            f"the {limit} positions of the model. Give fewer, or shorter prompts."
        )
    made_by = f"{Fingerprint.of_decoder(model).name}, {new_tokens} tokens"
    texts = _of_first_process(lambda: [] if file is None else _begun(file, made_by, prompts))
    spec = SelfSpec()

    def write(begin: int) -> list[list[int]]:
        torch.manual_seed(begin)
        is_drawn = bool(begin // AT_ONCE % 2)
        settings = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=is_drawn,
            temperature=_TEMPERATURE if is_drawn else None,
            pad_token_id=0,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
        )
        batch = continued(model, prompts[begin : begin + AT_ONCE], generation_config=settings, assistant=spec)
        if file is not None and PartialState().is_main_process:
            with reported(file), file.open("a", encoding="utf-8") as lines:
                lines.write(_lines(map(row_of, batch)))
        return batch

    def row_of(text: list[int]) -> dict[str, Any]:
        return {"input_ids": text, "made_by": made_by}

    with evaluating(model), torch.random.fork_rng(), torch.no_grad():
        for begin in range(len(texts), len(prompts), AT_ONCE):
            texts += _of_first_process(partial(write, begin), is_tensor_parallel(model))
    return list(map(row_of, texts))


def _of_first_process(make: Callable[[], list[list[int]]], is_for_all: bool = False) -> list[list[int]]:
    """Returns in all processes what the first one makes, or raises its error. If ``is_for_all``, all run ``make``, as
    those of tensor parallelism have to."""
    outcome: list[Any] = [None]
    if is_for_all or PartialState().is_main_process:
        try:
            outcome = [make()]
        except Exception as error:  # the other processes have to learn of any
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return cast(list[list[int]], outcome[0])


def _begun(file: Path, made_by: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The answers in a file, which is made ready for further ones: a batch that was not completed is removed."""
    rows: list[dict[str, Any]] = []
    if file.exists():
        try:
            rows = [json.loads(line) for line in read_text(file).split("\n")[:-1]]
            texts = [row["input_ids"] for row in rows]
            if not all(isinstance(text, list) and all(type(token) is int for token in text) for text in texts):
                raise ValueError("there is something else than tokens")
            is_same = {row["made_by"] for row in rows} <= {made_by}
        except (KeyError, TypeError, ValueError) as error:
            raise SettingError(f"{file} was cut short or changed ({brief(error)}). Remove it.") from error
        begun = [text[: len(prompt)] for text, prompt in zip(texts, prompts, strict=False)]
        if begun != prompts[: len(texts)] or not is_same:
            raise SettingError(
                f"{file} has answers to other prompts, of another model or of another length: remove it, or repeat the "
                "settings that it was made with."
            )
        if len(rows) < len(prompts):
            rows = rows[: len(rows) // AT_ONCE * AT_ONCE]
    with reported(file), written_whole(file) as beside:
        beside.write_text(_lines(rows), encoding="utf-8")
    return [row["input_ids"] for row in rows[: len(prompts)]]


def _lines(values: Iterable[Any]) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


@contextmanager
def greedily(model: PreTrainedModel, new_tokens: int) -> Iterator[None]:
    """Generates greedily and without other settings of the model's own."""
    usual = model.generation_config
    try:
        model.generation_config = GenerationConfig(
            max_new_tokens=new_tokens,
            bos_token_id=usual.bos_token_id,
            eos_token_id=usual.eos_token_id,
            pad_token_id=min(ends_of(model), default=0),
        )
        yield
    finally:
        model.generation_config = usual


def ends_of(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def continued(model: PreTrainedModel, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """The tokens of prompts with what the model writes after them, up to the first one that ends a text."""
    longest, device = max(map(len, prompts)), model.get_input_embeddings().weight.device
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    rows, ends = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist(), ends_of(model)
    lengths = [next((place for place, token in enumerate(row, 1) if token in ends), len(row)) for row in rows]
    return [prompt + row[:length] for prompt, row, length in zip(prompts, rows, lengths, strict=True)]
