"""``hf_selfspec.compare``: measures whether self-speculation pays, for Python and for ``hf-selfspec bench``."""

from __future__ import annotations

import platform
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SettingError
from ..learned.files import path_of
from ..model.anatomy import causal_lm, max_positions
from ..model.encoding import Prompt as TextOrChat
from ..model.encoding import as_prompts, checked_texts, token_ids
from ..model.kernels.linear import few_token_linears
from ..model.patching import evaluating
from ..model.transfer import wait_for
from ..train.prompts import read_rows
from ..validation import StrPath, check_count
from .comparison import Call, Comparison, measures
from .differences import first_differences
from .methods import LAYERS, PLAIN, Method, Methods, fitting, methods_of

# New tokens of a call that warms up one of transformers' own methods.
_WARM_UP = 8
# The column of a data file that names the kind of a prompt, and the kind of prompts without one.
_COLUMN, KIND = "kind", "text"


class Prompt(NamedTuple):
    """The kind of task, such as ``math``, and the token ids of one prompt."""

    kind: str
    ids: list[int]


class Batch(NamedTuple):
    """Prompts that are generated together: ``ids`` and ``mask`` are ``[b, s]``, padded on the left."""

    kind: str
    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Prompt], pad: int, device: torch.device) -> Batch:
        rows = [torch.tensor(prompt.ids, device=device) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        return cls(prompts[0].kind if len(prompts) == 1 else f"batch of {len(prompts)}", ids, mask)


def compare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[TextOrChat] | Mapping[str, Sequence[TextOrChat]],
    methods: Methods | None = None,
    *,
    max_new_tokens: int = 128,
    max_prompt_tokens: int | None = None,
    temperature: float = 0.0,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    out: StrPath | None = None,
    progress: bool = True,
) -> Comparison:
    """Measures whether self-speculation pays: all methods of generating on the same prompts, in turn.

    The prompts are one stream, as a service would see them: a ``SelfSpec`` is kept over the stream, and is not warmed
    up. All methods see a prompt before the next one comes, in rotating order, so that disturbances of the machine
    affect all of them. The first prompt does not count where there are several. Times are CPU time with one thread on a
    CPU, else wall time.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        tokenizer: the model's tokenizer.
        texts: prompts like those that the model will see: strings, or chats as lists of messages. A mapping has those
            of several kinds, which come in turn and have figures of their own.
        methods: names of methods and ``SelfSpec`` objects, or a mapping to them from names for the table; plain
            generate is always among them. ``None`` for plain generate, prompt lookup at several settings, static and
            compiled decoding where the device compiles, and every preset that fits the model.
        max_new_tokens: the most new tokens for each prompt, at least 2.
        max_prompt_tokens: longer prompts are left out; ``None`` for those that the model cannot take.
        temperature: 0 for greedy; else drawn texts have ``max_new_tokens`` tokens each.
        batch_size: prompts that are generated together.
        seed: seed of sampling.
        chat: whether a string is a message of a user, by default where there is a chat template.
        out: folder for the report.
        progress: whether stderr shows a bar with the time left.

    Returns:
        The comparison, with a table, a plot and all figures.

    Raises:
        SettingError, SettingTypeError: an argument is not allowed, or a method does not fit the model.
    """
    inner = causal_lm(model, "compare")
    check_count("compare(max_new_tokens)", max_new_tokens, least=2)
    check_count("compare(batch_size)", batch_size)
    check_count("compare(seed)", seed, least=0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < torch.inf:
        raise SettingError(f"compare(temperature) must be a number of at least 0 (0 for greedy), got {temperature!r}.")
    positions = max_positions(inner.config.get_text_config(decoder=True)) or sys.maxsize
    longest = positions - max_new_tokens
    if max_prompt_tokens is not None:
        check_count("compare(max_prompt_tokens)", max_prompt_tokens)
        longest = min(longest, max_prompt_tokens)
    kinds = texts if isinstance(texts, Mapping) else {KIND: texts}
    if not kinds:
        raise SettingError("compare(texts) has no kinds of prompts. Give at least one: {'questions': [...]}.")
    checked = {str(kind): checked_texts("compare", of_kind, chats=True) for kind, of_kind in kinds.items()}
    encoded = [
        [Prompt(kind, token_ids(tokenizer, text)) for text in as_prompts(tokenizer, each, chat)]
        for kind, each in checked.items()
    ]
    in_turn = [prompt for together in zip_longest(*encoded) for prompt in together if prompt is not None]
    prompts = [prompt for prompt in in_turn if 0 < len(prompt.ids) <= longest]
    if len(prompts) < batch_size:
        raise SettingError(
            f"{len(prompts)} of {len(in_turn)} prompts fit the model, for batches of {batch_size}. Give shorter or "
            "more prompts, fewer max_new_tokens, or smaller batches."
        )
    pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    starts = range(0, len(prompts) - batch_size + 1, batch_size)
    batches = [Batch.of(prompts[start : start + batch_size], pad, inner.device) for start in starts]
    chosen = None if methods is None else methods_of(methods)
    if batch_size > 1 and chosen is not None:  # transformers' prompt lookup takes no batches
        chosen = [method for method in chosen if "prompt_lookup_num_tokens" not in method.options]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
    if temperature:
        options |= {"do_sample": True, "temperature": float(temperature), "min_new_tokens": max_new_tokens}
        options |= {"top_p": 1.0, "top_k": 0}
    with evaluating(inner):
        compared, left_out = fitting(inner, chosen, batches[0])
        stream = Stream(inner, batches, compared, options, seed)
        calls = stream.run(progress)
        differing = {name: stream.differences(calls[PLAIN], each) for name, each in calls.items() if not temperature}
    about = {
        **_about(inner),
        "prompts": dict(Counter(prompt.kind for prompt in prompts)),
        "prompts_left_out": len(in_turn) - len(prompts),
        **{"max_new_tokens": max_new_tokens, "temperature": temperature, "batch_size": batch_size, "seed": seed},
        "clock": stream.clock,
    }
    comparison = Comparison({"about": about, "left_out": left_out, **measures(compared, calls, differing)})
    if out is not None:
        comparison.save(path_of(out))
    return comparison


class Stream:
    """Makes the calls of all methods on all batches, in rotating order."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Batch],
        methods: Sequence[Method],
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.model, self.batches, self.methods, self.options, self.seed = model, batches, methods, options, seed
        self.clock = "cpu" if model.device.type == "cpu" and torch.get_num_threads() == 1 else "wall"
        self._cache_size = max(batch.ids.shape[1] for batch in batches) + options["max_new_tokens"]
        self._specs = {method.name: method.make() for method in methods if method.make is not None}
        self._warm = set[str]()

    def run(self, progress: bool) -> dict[str, list[Call]]:
        """Returns the calls of each method, in the order of the batches."""
        calls = {method.name: list[Call]() for method in self.methods}
        columns = (BarColumn(), MofNCompleteColumn(), "left", TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("", total=len(self.batches) * len(self.methods))
            for index, method in self._order():
                calls[method.name].append(self._call(index, method))
                bar.update(task, advance=1, description=method.name)
        return calls

    def _order(self) -> Iterator[tuple[int, Method]]:
        for index in range(len(self.batches)):
            first = index % len(self.methods)
            yield from ((index, method) for method in (*self.methods[first:], *self.methods[:first]))

    def _call(self, index: int, method: Method) -> Call:
        batch, spec = self.batches[index], self._specs.get(method.name)
        options: dict[str, Any] = {**self.options, **method.options}
        if method.is_static:
            options["max_cache_len"] = self._cache_size
        with _layers(self.model, method):
            if spec is not None:
                options["assistant"] = spec
            elif method.name not in self._warm:
                self._warm.add(method.name)
                few = options | {"max_new_tokens": _WARM_UP, "min_new_tokens": None}
                self.model.generate(batch.ids, attention_mask=batch.mask, **few)
            torch.manual_seed(self.seed + index)  # all methods begin a prompt with the same state of it
            begun = self._now()
            output: torch.Tensor = self.model.generate(batch.ids, attention_mask=batch.mask, **options)
            seconds = self._now() - begun
        eos = self.model.generation_config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        rows = output[:, batch.ids.shape[1] :].tolist()
        ids = [row[: next((at for at, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]
        if spec is None or spec.stats is None:
            return Call(batch.kind, ids, seconds)
        stats = spec.stats
        rounds = None if stats.left_to_generate else (stats.rounds, stats.drafted, stats.accepted)
        return Call(batch.kind, ids, seconds, rounds, stats.left_to_generate)

    def _now(self) -> float:
        wait_for(self.model.device)
        return process_time() if self.clock == "cpu" else perf_counter()

    def differences(self, plain_calls: Sequence[Call], calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Where texts differ from plain generate's, and whether rounding explains that."""
        found, pad = [], self.options["pad_token_id"]
        for index, (batch, plain, call) in enumerate(zip(self.batches, plain_calls, calls, strict=True)):
            if call.ids == plain.ids:
                continue
            longest = max(map(len, [*call.ids, *plain.ids]))

            def padded(text: list[list[int]], batch: Batch = batch, longest: int = longest) -> torch.Tensor:
                rows = [[*row, *[pad] * (longest - len(row))] for row in text]
                return torch.cat([batch.ids, torch.tensor(rows, device=batch.ids.device)], dim=1)

            for one in first_differences(self.model, padded(plain.ids), padded(call.ids), batch.mask):
                place = {"prompt": index, "row": one.row, "position": one.column - batch.ids.shape[1]}
                found.append({**place, "margin": one.margin, "near_tie": one.is_near_tie})
        return found


def _layers(model: PreTrainedModel, method: Method) -> AbstractContextManager[None]:
    return few_token_linears(model, lambda: True) if method.name == LAYERS else nullcontext()


def texts_of(data: Iterable[str], column: str | None = None) -> dict[str, list[TextOrChat]]:
    """Returns the prompts of data files by kind; ``column`` holds them, by default the first that usually does."""
    texts: dict[str, list[TextOrChat]] = {}
    for path in data:
        for row in read_rows(path, column):
            texts.setdefault(str(row.columns.get(_COLUMN) or KIND), []).append(row.prompt(column))
    return texts


def drawn(texts: Mapping[str, Sequence[TextOrChat]], count: int, seed: int) -> dict[str, list[TextOrChat]]:
    """Returns ``count`` prompts of each kind, drawn by ``seed``."""
    draw = random.Random(seed)
    return {kind: draw.sample(list(each), min(count, len(each))) for kind, each in texts.items()}


def machine(device: torch.device) -> str:
    """Returns one line about the machine and the versions behind a figure."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    info = Path("/proc/cpuinfo")
    line = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    name = line[1] if line else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} thread(s), {versions}"


def _about(model: PreTrainedModel) -> dict[str, Any]:
    from .. import __version__

    return {
        "model": model.config.name_or_path or type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "machine": machine(model.device),
        "hf_selfspec": __version__,
    }
