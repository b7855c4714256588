"""Timed calls of ``generate``: all methods on each prompt, in rotating order, as a service would see the prompts."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..errors import SettingError
from ..learned.files import check_folder, read_text, reported
from ..model.kernels.linear import few_token_linears
from ..model.transfer import wait_for
from ..selfspec import SelfSpec
from ..stats import GenerationStats
from .differences import Difference, first_differences
from .methods import LAYERS, LOOKUP_GROUP, Method
from .request import Batch, Prompt, Settings

FILE = "calls.jsonl"
# New tokens of a call that warms up one of transformers' own methods.
_WARM_UP = 8
# So many tokens in a row that occurred before are a repetition.
_REPETITION = 12
# A method's name, and the indices of the condition, of the pass over the stream and of the prompt.
Place = tuple[str, int, int, int]


@dataclass(frozen=True)
class Call:
    """One call of ``generate``, in a form for JSON."""

    method: str
    condition: int
    turn: int
    prompt: int
    kind: str
    prompt_tokens: list[int]  # of each row
    ids: list[list[int]]  # new ones of each row, up to the end of the text
    seconds: dict[str, float]  # by clock, ``wall`` or ``cpu`` (of the process)
    to_first: dict[str, float]  # the same until the first tokens
    first_tokens: int  # tokens of all rows that came then
    is_first: bool = False  # of the method in this process
    peak_memory: int | None = None  # allocated bytes, where the device reports them
    # Verification passes, tokens drafted (siblings in a tree are not) and kept, and how many passes kept how many.
    rounds: dict[str, Any] | None = None
    left_to_generate: str = ""  # why a ``SelfSpec`` left the call to plain generate

    def whole(self, clock: str) -> tuple[int, float]:
        return sum(map(len, self.ids)), self.seconds[clock]

    def decoding(self, clock: str) -> tuple[int, float]:
        """Tokens and seconds after the first tokens."""
        return sum(map(len, self.ids)) - self.first_tokens, self.seconds[clock] - self.to_first[clock]

    @property
    def looping(self) -> float:
        """Share of the tokens that repeat the row's own text."""
        return sum(map(repetitions, self.ids)) / max(sum(map(len, self.ids)), 1)


class _Arrivals(BaseStreamer):
    """Records when the first tokens came, and how many tokens of a row came at once."""

    is_stateless = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: list[int] = []
        self.first: dict[str, float] = {}
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.first = self.first or _now(self.device)
            self.sizes.append(value.shape[-1] if value.dim() > 1 else 1)  # ``[b]`` holds a token of each row
        self._has_prompt = True

    def end(self) -> None:
        pass


def timed(
    model: PreTrainedModel, method: Method, batch: Batch, place: Place, options: Mapping[str, Any], is_first: bool
) -> Call:
    """Makes one timed call with the arguments ``options`` of ``generate``."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    arrivals, begun = _Arrivals(device), _now(device)
    output: torch.Tensor = model.generate(batch.ids, attention_mask=batch.mask, streamer=arrivals, **options)
    end = _now(device)
    first = arrivals.first or end
    eos = model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    rows = output[:, batch.ids.shape[1] :].tolist()
    ids = [row[: next((at for at, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]
    spec = options.get("assistant")
    stats: GenerationStats | None = None if spec is None else spec.stats
    return Call(
        *place,
        batch.kind,
        batch.mask.sum(1).tolist(),
        ids,
        seconds={clock: end[clock] - begun[clock] for clock in end},
        to_first={clock: first[clock] - begun[clock] for clock in end},
        # A row may end among the first tokens.
        first_tokens=sum(min(arrivals.sizes[0] if arrivals.sizes else 0, len(row)) for row in ids),
        is_first=is_first,
        peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        rounds=_rounds(method, stats, arrivals.sizes),
        left_to_generate="" if stats is None else stats.left_to_generate,
    )


def repetitions(ids: Sequence[int]) -> int:
    """Number of tokens that are in repetitions of ``_REPETITION`` or more earlier tokens of ``ids``."""
    earlier: set[tuple[int, ...]] = set()
    repeats: set[int] = set()
    for end in range(_REPETITION, len(ids) + 1):
        piece = tuple(ids[end - _REPETITION : end])
        if piece in earlier:
            repeats.update(range(end - _REPETITION, end))
        earlier.add(piece)
    return len(repeats)


def _rounds(method: Method, stats: GenerationStats | None, sizes: Sequence[int]) -> dict[str, Any] | None:
    """The rounds by statistics, or of transformers' loop, which streams the tokens of each, not what it drafted."""
    if stats is not None and not stats.left_to_generate:
        lengths = stats.accepted_lengths
        counts: dict[str, Any] = {"rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}
    elif stats is None and method.group == LOOKUP_GROUP:
        lengths = Counter(size - 1 for size in sizes[1:])
        counts = {"rounds": lengths.total(), "drafted": None, "accepted": sum(lengths.elements())}
    else:
        return None
    return counts | {"histogram": {str(length): lengths[length] for length in sorted(lengths)}}


def _now(device: torch.device) -> dict[str, float]:
    """Seconds on each clock, when the device has finished its work."""
    wait_for(device)
    return {"wall": perf_counter(), "cpu": process_time()}


class Journal:
    """All calls so far, in memory and in a file, which a new run continues if its header of settings is the same."""

    def __init__(self, header: Mapping[str, Any], folder: Path | None = None) -> None:
        self.calls: dict[Place, Call] = {}
        self._folder = folder
        if folder is None:
            return
        check_folder("the folder of results", folder, [FILE])
        if (folder / FILE).exists():
            self._read(folder / FILE, json.loads(_line(header)))
        if not self.calls:
            with reported(folder):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / FILE).write_text(_line(header), encoding="utf-8")

    def add(self, call: Call) -> None:
        self.calls[call.method, call.condition, call.turn, call.prompt] = call
        if self._folder is not None:
            path = self._folder / FILE
            with reported(path), path.open("a", encoding="utf-8") as file:
                file.write(_line(asdict(call)))
                file.flush()
                os.fsync(file.fileno())

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        try:
            text = read_text(path)
            whole = text[: text.rfind("\n") + 1]  # without a line that was cut short when its process ended
            written, *lines = map(json.loads, whole.splitlines())
            changed = [name for name, value in header.items() if written.get(name) != value]
            calls = [Call(**line) for line in lines]
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingError(
                f"{path} is not a file of measured calls ({error}). Move it away, or give another folder."
            ) from error
        if changed:
            other = "; ".join(f"{name}: {written.get(name)!r}, now {header[name]!r}" for name in changed)
            raise SettingError(
                f"{path} was measured with other settings ({other}), which cannot be combined with these. Give another "
                "folder, or the settings from before."
            )
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        self.calls = {(call.method, call.condition, call.turn, call.prompt): call for call in calls}


class Part(NamedTuple):
    """What is measured under one condition: the stream, and the methods that support its batch size."""

    number: int
    temperature: float  # 0 for greedy
    batch_size: int
    batches: Sequence[Batch]
    methods: Sequence[Method]


class Stream:
    """Makes the calls that a journal does not have yet, each pass with new ``SelfSpec``s, which would else draft from
    their own answers; graphs stay with the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Settings,
        prompts: Sequence[Prompt],
        methods: Sequence[Method],
        pad: int,
        journal: Journal,
    ) -> None:
        self.model, self.settings, self.pad, self.journal = model, settings, pad, journal
        self.parts = []
        for index, (temperature, size) in enumerate(settings.conditions):
            starts = range(0, len(prompts) - size + 1, size)
            batches = [Batch.of(prompts[start : start + size], pad, model.device) for start in starts]
            # transformers' prompt lookup takes no batches
            usable = [method for method in methods if size == 1 or "prompt_lookup_num_tokens" not in method.options]
            self.parts.append(Part(index, temperature, size, batches, usable))
        self._cache_size = max(len(prompt.ids) for prompt in prompts) + settings.max_new_tokens
        self._called: set[str] = set()
        self._warm: set[tuple[int, str]] = set()

    def run(self, progress: bool) -> None:
        total = sum(self.settings.passes * len(part.batches) * len(part.methods) for part in self.parts)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
        text = TextColumn("{task.description}")
        with Progress(*columns, text, console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("", total=total, completed=len(self.journal.calls))
            for part in self.parts:
                for turn in range(self.settings.passes):
                    for call in self._pass(part, turn):
                        bar.update(task, advance=1, description=f"{call.kind}, {call.method}")

    def _pass(self, part: Part, turn: int) -> Iterator[Call]:
        specs = {method.name: method.make() for method in part.methods if method.make is not None}
        for prompt in range(len(part.batches)):
            first = prompt % len(part.methods)
            for method in (*part.methods[first:], *part.methods[:first]):
                place = method.name, part.number, turn, prompt
                if place not in self.journal.calls:
                    yield self._call(part, method, place, specs.get(method.name))

    def _call(self, part: Part, method: Method, place: Place, spec: SelfSpec | None) -> Call:
        batch = part.batches[place[-1]]
        options = {**self.settings.options(part.temperature, self.pad), **method.options}
        if method.is_static:
            options["max_cache_len"] = self._cache_size
        elif spec is not None:
            options["assistant"] = spec
        elif (part.number, method.name) not in self._warm:
            self._warm.add((part.number, method.name))
            few = options | {"max_new_tokens": _WARM_UP, "min_new_tokens": None}
            with _layers(self.model, method):
                self.model.generate(batch.ids, attention_mask=batch.mask, **few)
        torch.manual_seed(self.settings.seed + place[-1])  # all methods begin a prompt with the same state of it
        with _layers(self.model, method):
            call = timed(self.model, method, batch, place, options, is_first=method.name not in self._called)
        self._called.add(method.name)
        self.journal.add(call)
        return call

    def differences(self, part: Part, plain: Call, call: Call) -> list[Difference]:
        if call.ids == plain.ids:
            return []
        batch = part.batches[call.prompt]
        longest = max(map(len, [*call.ids, *plain.ids]))

        def padded(text: list[list[int]]) -> torch.Tensor:
            rows = [[*row, *[self.pad] * (longest - len(row))] for row in text]
            return torch.cat([batch.ids, torch.tensor(rows, device=batch.ids.device)], dim=1)

        return first_differences(self.model, padded(plain.ids), padded(call.ids), batch.mask)


def _layers(model: PreTrainedModel, method: Method) -> AbstractContextManager[None]:
    return few_token_linears(model, lambda: True) if method.name == LAYERS else nullcontext()


def _line(content: Any) -> str:
    return json.dumps(content, default=str) + "\n"
