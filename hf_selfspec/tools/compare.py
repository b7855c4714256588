"""``hf_selfspec.compare``: measures whether self-speculation pays, for Python and for ``hf-selfspec bench``."""

from __future__ import annotations

import math
import os
import platform
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingError
from ..learned.files import path_of
from ..model.anatomy import causal_lm, max_positions
from ..model.encoding import Prompt as TextOrChat
from ..model.encoding import as_prompts, checked_texts, token_ids
from ..model.linear import few_token_linears
from ..model.patching import evaluating
from ..model.transfer import wait_for
from ..train.loading import read_rows
from ..validation import StrPath, check_count
from .audits import Difference, differences_of, new_tokens
from .comparison import Call, Comparison, measures
from .methods import LAYERS, PLAIN, STATIC, Method, Methods, fitting, methods_of

# The column of a data file that names the kind of a prompt, and the kind of prompts without one.
_COLUMN, KIND = "kind", "text"


class Prompt(NamedTuple):
    """The kind of task, such as ``math``, and the token ids of one prompt."""

    kind: str
    ids: list[int]


class Batch(NamedTuple):
    """Prompts that are generated together: ids and mask ``[b, s]``, padded on the left."""

    kind: str
    inputs: dict[str, torch.Tensor]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], pad: int, device: torch.device) -> Batch:
        rows = [torch.tensor(prompt.ids, device=device) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        kind = prompts[0].kind if len(prompts) == 1 else f"batch of {len(prompts)}"
        return cls(kind, {"input_ids": ids, "attention_mask": mask})


def compare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[TextOrChat] | Mapping[str, Sequence[TextOrChat]],
    methods: Methods | None = None,
    *,
    max_new_tokens: int = 128,
    max_prompt_tokens: int | None = None,
    prompts_a_kind: int | None = None,
    temperature: float = 0.0,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    out: StrPath | None = None,
) -> Comparison:
    """Measures whether self-speculation pays: all methods of generating on the same prompts, with a progress bar.

    The prompts are one stream, as a service would see them, over which a ``SelfSpec`` is kept. All methods see a prompt
    before the next one comes, in rotating order, so that disturbances of the machine affect all of them. The first
    prompt warms up, and does not count where there are several. Times are CPU time with one thread on a CPU, else wall
    time.

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
        prompts_a_kind: how many are drawn by ``seed`` from those of each kind that fit; ``None`` for all.
        temperature: 0 for greedy; else drawn texts have ``max_new_tokens`` tokens each.
        batch_size: prompts that are generated together.
        seed: seed of sampling, and of the choice of prompts.
        chat: whether a string is a message of a user, by default where there is a chat template.
        out: folder for the report.

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
    if prompts_a_kind is not None:
        check_count("compare(prompts_a_kind)", prompts_a_kind)
    draw, found, too_long = random.Random(seed), list[list[Prompt]](), 0
    for kind, of_kind in kinds.items():
        candidates = as_prompts(tokenizer, checked_texts("compare", of_kind, chats=True), chat)
        if prompts_a_kind is not None:
            draw.shuffle(candidates)
        found.append([])
        for ids in (token_ids(tokenizer, text) for text in candidates):
            if not 0 < len(ids) <= longest:
                too_long += 1
            elif len(found[-1]) == prompts_a_kind:
                break
            else:
                found[-1].append(Prompt(str(kind), ids))
    prompts = [prompt for together in zip_longest(*found) for prompt in together if prompt is not None]
    if len(prompts) < batch_size:
        raise SettingError(
            f"{len(prompts)} of {len(prompts) + too_long} prompts fit the model, for batches of {batch_size}. "
            "Give shorter or more prompts, fewer max_new_tokens, or smaller batches."
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
    clock = "cpu" if inner.device.type == "cpu" and torch.get_num_threads() == 1 else "wall"
    with evaluating(inner):
        compared, left_out = fitting(inner, chosen, batches[0])
        calls = _calls(inner, batches, compared, options, seed, clock)
        differing = {} if temperature else _differences(inner, batches, calls, options)
    from .. import __version__

    about = {
        "model": inner.config.name_or_path or type(inner).__name__,
        "parameters": sum(weight.numel() for weight in inner.parameters()),
        "dtype": str(inner.dtype).removeprefix("torch."),
        "device": str(inner.device),
        "machine": machine(inner.device),
        "hf_selfspec": __version__,
        "prompts": dict(Counter(prompt.kind for prompt in prompts)),
        "prompts_left_out": too_long,
        **{"max_new_tokens": max_new_tokens, "temperature": temperature, "batch_size": batch_size, "seed": seed},
        "clock": clock,
    }
    comparison = Comparison({"about": about, "left_out": left_out, **measures(compared, calls, differing)})
    if out is not None:
        comparison.save(path_of(out))
    return comparison


def _calls(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    methods: Sequence[Method],
    options: Mapping[str, Any],
    seed: int,
    clock: str,
) -> dict[str, list[Call]]:
    """The calls of all methods on all batches: those of each method, in the order of the batches."""
    specs = {method.name: method.make() for method in methods if method.make is not None}
    cache_size = max(batch.inputs["input_ids"].shape[1] for batch in batches) + options["max_new_tokens"]
    calls = {method.name: list[Call]() for method in methods}

    def now() -> float:
        wait_for(model.device)
        return process_time() if clock == "cpu" else perf_counter()

    with logging.tqdm(total=len(batches) * len(methods), desc="comparing", unit="call") as bar:
        for index, batch in enumerate(batches):
            first = index % len(methods)
            for method in (*methods[first:], *methods[:first]):
                own = dict(method.options)
                if method.name == STATIC:
                    own["max_cache_len"] = cache_size  # one size in all calls, so that graphs can be reused
                if spec := specs.get(method.name):
                    own["assistant"] = spec
                layers = few_token_linears(model, lambda: True) if method.name == LAYERS else nullcontext()
                with layers:
                    torch.manual_seed(seed + index)  # all methods begin a prompt with the same state of it
                    begun = now()
                    output: torch.Tensor = model.generate(**batch.inputs, **options, **own)
                    seconds = now() - begun
                ids = new_tokens(model, output, batch.inputs["input_ids"].shape[1])
                stats = None if spec is None else spec.stats
                rounds = None
                if stats is not None and not stats.left_to_generate:
                    rounds = stats.rounds, stats.drafted, stats.accepted, stats.siblings
                calls[method.name].append(Call(batch.kind, ids, seconds, rounds))
                bar.update()
    return calls


def _differences(
    model: PreTrainedModel, batches: Sequence[Batch], calls: Mapping[str, Sequence[Call]], options: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Where greedy texts of each method differ from plain generate's, and whether rounding explains that."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in calls}
    for index, batch in enumerate(batches):
        known: dict[Any, list[Difference]] = {}  # methods mostly part from it at one place
        for name, of_method in calls.items():
            pairs = zip(calls[PLAIN][index].ids, of_method[index].ids, strict=True)
            parted = [
                next(at for at, (expected, token) in enumerate(zip_longest(*pair)) if expected != token)
                for pair in pairs
                if pair[0] != pair[1]
            ]
            limit = 1 + max(parted, default=-1)
            texts = tuple(tuple(row[:limit]) for row in of_method[index].ids)
            if limit and texts not in known:
                known[texts] = differences_of(model, batch.inputs, {**options, "max_new_tokens": limit}, texts)
            for one in known[texts] if limit else ():
                place = {"prompt": index, "row": one.row, "position": one.column}
                margin = one.margin if one.margin < math.inf else None  # which JSON does not have
                found[name].append({**place, "margin": margin, "near_tie": one.is_near_tie})
    return found


def texts_of(data: Iterable[str], column: str | None = None) -> dict[str, list[TextOrChat]]:
    """Returns the prompts of data files by kind; ``column`` holds them, by default the first that usually does."""
    texts: dict[str, list[TextOrChat]] = {}
    for path in data:
        for row in read_rows(path, column):
            texts.setdefault(str(row.columns.get(_COLUMN) or KIND), []).append(row.prompt(column))
    return texts


# Instruction sets by which what pays differs, as Linux calls them.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def machine(device: torch.device) -> str:
    """Returns one line about the machine and the versions behind a figure."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    line, words = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE), set(info.split())
    name = line[1] if line else platform.processor() or platform.machine()
    uses = f"torch uses {torch.backends.cpu.get_cpu_capability()}"
    sets = ", ".join([*filter(words.__contains__, _INSTRUCTIONS), uses])
    return f"{name} ({sets}), {torch.get_num_threads()} thread(s) of {os.cpu_count()} core(s), {versions}"
