"""One timed call of ``generate``, and what is kept of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..model.transfer import wait_for
from ..stats import GenerationStats
from .methods import LOOKUP_GROUP, Method
from .request import Batch

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
    graphs: int = 0  # that were compiled
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

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: list[int] = []
        self.first: dict[str, float] | None = None
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self.first is None:
            self.first = _now(self.device)
        self.sizes.append(value.shape[-1] if value.dim() > 1 else 1)  # ``[b]`` holds a token of each row

    def end(self) -> None:
        pass


def timed(
    model: PreTrainedModel, method: Method, batch: Batch, place: Place, options: Mapping[str, Any], is_first: bool
) -> Call:
    """Makes one timed call with the arguments ``options`` of ``generate``."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    arrivals, graphs, begun = _Arrivals(device), _graphs(), _now(device)
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
        graphs=_graphs() - graphs,
        peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        rounds=_rounds(method, stats, arrivals.sizes),
        left_to_generate="" if stats is None else stats.left_to_generate,
    )


def repetitions(ids: Sequence[int]) -> int:
    """Number of tokens that are in repetitions of ``_REPETITION`` or more earlier tokens of ``ids``."""
    seen: set[tuple[int, ...]] = set()
    repeats: set[int] = set()
    for end in range(_REPETITION, len(ids) + 1):
        piece = tuple(ids[end - _REPETITION : end])
        if piece in seen:
            repeats.update(range(end - _REPETITION, end))
        seen.add(piece)
    return len(repeats)


def _rounds(method: Method, stats: GenerationStats | None, sizes: Sequence[int]) -> dict[str, Any] | None:
    """The rounds by statistics, or of transformers' loop, which streams the tokens of each, not what it drafted."""
    if stats is not None and not stats.left_to_generate:
        lengths = stats.accepted_lengths
        found: dict[str, Any] = {"rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}
    elif stats is None and method.group == LOOKUP_GROUP:
        lengths = Counter(size - 1 for size in sizes[1:])
        found = {"rounds": lengths.total(), "drafted": None, "accepted": sum(lengths.elements())}
    else:
        return None
    return found | {"histogram": {str(length): lengths[length] for length in sorted(lengths)}}


def _now(device: torch.device) -> dict[str, float]:
    """Seconds on each clock, when the device has finished its work."""
    wait_for(device)
    return {"wall": perf_counter(), "cpu": process_time()}


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
