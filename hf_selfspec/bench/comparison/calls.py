"""One timed call of ``generate``, and what is kept of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ...search.costs import wait_for
from ...selfspec import SelfSpec
from ...stats import GenerationStats
from .prompts import Batch
from .ways import Way

# A stretch of so many tokens that came before is a repetition.
_REPETITION = 12
# Tokens up to which verification is free in the simulated figure.
FREE = 32


@dataclass(frozen=True)
class Rounds:
    """What drafts of a call brought; tokens of siblings in a tree do not count.

    Attributes:
        rounds: verification passes, of each row.
        drafted: drafted tokens, ``None`` where it is not known.
        accepted: drafted tokens that were kept.
        histogram: how often a round kept that many drafted tokens.
        cost_where_free: what the rounds cost where ``FREE`` tokens take as long as one, in forwards over one token;
            ``None`` where it is not known.
    """

    rounds: int
    drafted: int | None
    accepted: int
    histogram: dict[int, int]
    cost_where_free: float | None = None


@dataclass(frozen=True)
class Call:
    """One call of ``generate``.

    Attributes:
        way: its name.
        condition, turn, prompt: places of the condition, of the pass over the stream and of the prompt.
        kind: of the prompt, or of the batch.
        prompt_tokens: of each row.
        ids: new tokens of each row, up to the end of the text.
        wall, cpu: seconds, and those of the process's CPU time.
        wall_to_first, cpu_to_first: until the first tokens.
        first_tokens: how many tokens of all rows came then.
        looping: share of the tokens that repeat the row's own text.
        in_process: which call of the way in this process it is, from 0.
        graphs: graphs that were compiled.
        peak_memory: bytes that the device had allocated at most, ``None`` where this is not known.
        rounds: what drafts brought, ``None`` without drafts.
        left_to_generate: why a ``SelfSpec`` left the call to plain generate, empty where it did not.
    """

    way: str
    condition: int
    turn: int
    prompt: int
    kind: str
    prompt_tokens: list[int]
    ids: list[list[int]]
    wall: float
    cpu: float
    wall_to_first: float
    cpu_to_first: float
    first_tokens: int
    looping: float
    in_process: int
    graphs: int = 0
    peak_memory: int | None = None
    rounds: Rounds | None = None
    left_to_generate: str = ""

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.ids))

    @property
    def decoded(self) -> int:
        """Tokens behind the first ones."""
        return self.tokens - self.first_tokens

    def seconds(self, clock: str) -> float:
        """Of the whole call."""
        return self.cpu if clock == "cpu" else self.wall

    def decoding(self, clock: str) -> float:
        """Seconds behind the first tokens."""
        return self.cpu - self.cpu_to_first if clock == "cpu" else self.wall - self.wall_to_first

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Call:
        """What :meth:`as_json` has returned."""
        rounds = line.get("rounds")
        if rounds is not None:
            histogram = {int(length): count for length, count in rounds["histogram"].items()}
            rounds = Rounds(**{**rounds, "histogram": histogram})
        return cls(**{**line, "rounds": rounds})

    def as_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class _Arrivals(BaseStreamer):
    """Notes when tokens came, and how many of a row together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: list[int] = []
        self.first: tuple[float, float] | None = None
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self.first is None:
            wait_for(self.device)
            self.first = perf_counter(), process_time()
        self.sizes.append(value.shape[-1] if value.dim() > 1 else 1)  # ``[b]`` holds a token of each row

    def end(self) -> None:
        pass


@dataclass
class Caller:
    """Makes timed calls.

    Attributes:
        model: the model.
        eos: ids that end a text.
        seed: of drawn tokens; each prompt begins with the same state of the generator in all ways.
        longest: tokens of the longest prompt and its answer, the size of static caches.
        stats: of the last call with a ``SelfSpec``.
    """

    model: PreTrainedModel
    seed: int
    longest: int
    eos: frozenset[int] = field(init=False)
    stats: GenerationStats | None = None
    _made: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        eos = self.model.generation_config.eos_token_id
        self.eos = frozenset() if eos is None else frozenset(eos if isinstance(eos, list) else [eos])

    def warm_up(self, way: Way, batch: Batch, options: Mapping[str, Any]) -> None:
        """A call that does not count."""
        self._generate(way, batch, options, None, _Arrivals(self.model.device))

    def call(
        self,
        way: Way,
        batch: Batch,
        place: tuple[int, int, int],
        options: Mapping[str, Any],
        spec: SelfSpec | None = None,
    ) -> Call:
        """One call.

        Args:
            way: how.
            batch: the prompts.
            place: of the condition, the pass and the prompt.
            options: arguments of ``generate``.
            spec: of a way of ours.
        """
        device = self.model.device
        torch.manual_seed(self.seed + place[2])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        arrivals, graphs = _Arrivals(device), _graphs()
        wait_for(device)
        wall, cpu = perf_counter(), process_time()
        output = self._generate(way, batch, options, spec, arrivals)
        wait_for(device)
        end_wall, end_cpu = perf_counter(), process_time()
        first = arrivals.first or (end_wall, end_cpu)
        ids = [self._until_end(row) for row in output[:, batch.ids.shape[1] :].tolist()]
        self.stats = None if spec is None else spec.stats
        made = self._made[way.name]
        self._made[way.name] += 1
        return Call(
            way.name,
            *place,
            batch.kind,
            batch.lengths,
            ids,
            wall=end_wall - wall,
            cpu=end_cpu - cpu,
            wall_to_first=first[0] - wall,
            cpu_to_first=first[1] - cpu,
            first_tokens=_first_tokens(arrivals.sizes, ids),
            looping=_looping(ids),
            in_process=made,
            graphs=_graphs() - graphs,
            peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            rounds=_of_stats(self.stats) if spec is not None else _of_arrivals(way, arrivals.sizes),
            left_to_generate="" if self.stats is None else self.stats.left_to_generate,
        )

    def _generate(
        self, way: Way, batch: Batch, options: Mapping[str, Any], spec: SelfSpec | None, streamer: BaseStreamer
    ) -> torch.Tensor:
        own = dict(way.options) | ({"max_cache_len": self.longest} if way.is_static else {})
        if spec is not None:
            own["assistant"] = spec
        found = self.model.generate(batch.ids, attention_mask=batch.mask, streamer=streamer, **{**options, **own})
        assert isinstance(found, torch.Tensor)
        return found

    def _until_end(self, row: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(row) if token in self.eos), len(row))
        return row[: end + 1]


def looping_share(ids: Sequence[int]) -> float:
    """Share of the tokens that are in repetitions of ``_REPETITION`` or more earlier tokens of ``ids``."""
    seen: set[tuple[int, ...]] = set()
    repeats: set[int] = set()
    for end in range(_REPETITION, len(ids) + 1):
        piece = tuple(ids[end - _REPETITION : end])
        if piece in seen:
            repeats.update(range(end - _REPETITION, end))
        seen.add(piece)
    return len(repeats) / len(ids) if ids else 0.0


def cost_where_free(round_sizes: Sequence[tuple[int, int]]) -> float:
    """What rounds cost where ``FREE`` tokens take as long as one, in forwards over one token.

    Args:
        round_sizes: for each round how many tokens it verified and how many it gave.
    """
    return sum(max(1.0, nodes / FREE) for nodes, _ in round_sizes)


def _looping(rows: Sequence[Sequence[int]]) -> float:
    tokens = sum(map(len, rows))
    return sum(looping_share(row) * len(row) for row in rows) / tokens if tokens else 0.0


def _first_tokens(sizes: Sequence[int], ids: Sequence[Sequence[int]]) -> int:
    """Tokens of all rows that came first; a row may end among them."""
    first = sizes[0] if sizes else 0
    return sum(min(first, len(row)) for row in ids)


def _of_stats(stats: GenerationStats | None) -> Rounds | None:
    if stats is None or stats.left_to_generate:
        return None
    sizes = stats.round_sizes
    free = cost_where_free(sizes) if len(stats.from_draft) == 1 and len(sizes) == stats.rounds else None
    return Rounds(stats.rounds, stats.drafted, stats.accepted, dict(sorted(stats.accepted_lengths.items())), free)


def _of_arrivals(way: Way, sizes: Sequence[int]) -> Rounds | None:
    """Of transformers' assisted loop, which streams what each round gave; it tells nothing about what it drafted."""
    if "prompt_lookup_num_tokens" not in way.options:
        return None
    accepted = Counter(size - 1 for size in sizes[1:])
    kept = sum(length * count for length, count in accepted.items())
    return Rounds(sum(accepted.values()), None, kept, dict(sorted(accepted.items())))


def _graphs() -> int:
    """Graphs that torch has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
