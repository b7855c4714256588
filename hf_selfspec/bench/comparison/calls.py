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

from ...selfspec import SelfSpec
from ...stats import GenerationStats
from ...transfer import wait_for
from .prompts import Batch
from .ways import Way

# So many tokens in a row that occurred before are a repetition.
_REPETITION = 12
# Tokens up to which verification is free in the simulated figure.
FREE = 32


@dataclass(frozen=True)
class Rounds:
    """The drafts of a call and how many of them were accepted; siblings in a tree do not count.

    Attributes:
        rounds: verification passes, of each row.
        drafted: drafted tokens, ``None`` where it is not known.
        accepted: drafted tokens that were kept.
        histogram: how often a round kept that many drafted tokens.
        cost_where_free: the rounds' cost if ``FREE`` tokens took as long as one, in forwards over one token;
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
        way: name of the way of generating.
        condition, turn, prompt: indices of the condition, of the pass over the stream and of the prompt.
        kind: kind of the prompt or batch.
        prompt_tokens: number of tokens in each row's prompt.
        ids: new tokens of each row, up to the end of the text.
        wall, cpu: wall time and CPU time of the process, in seconds.
        wall_to_first, cpu_to_first: the same until the first tokens.
        first_tokens: number of tokens of all rows that came then.
        looping: share of the tokens that repeat the row's own text.
        in_process: number of the way's earlier calls in this process.
        graphs: number of graphs that were compiled.
        peak_memory: peak of the device's allocated memory in bytes, ``None`` where this is not known.
        rounds: rounds and drafts, ``None`` without drafts.
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
        """New tokens after the first ones."""
        return self.tokens - self.first_tokens

    def seconds(self, clock: str) -> float:
        """Seconds of the whole call, by the clock ``cpu`` or ``wall``."""
        return self.cpu if clock == "cpu" else self.wall

    def decoding(self, clock: str) -> float:
        """Seconds after the first tokens, by the clock ``cpu`` or ``wall``."""
        return self.cpu - self.cpu_to_first if clock == "cpu" else self.wall - self.wall_to_first

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Call:
        """Restores a call from what :meth:`as_json` returned."""
        rounds = line.get("rounds")
        if rounds is not None:
            histogram = {int(length): count for length, count in rounds["histogram"].items()}
            rounds = Rounds(**{**rounds, "histogram": histogram})
        return cls(**{**line, "rounds": rounds})

    def as_json(self) -> dict[str, Any]:
        """The call in a form for JSON."""
        return asdict(self)


class _Arrivals(BaseStreamer):
    """Records when the first tokens came, and how many tokens of a row came at once."""

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
        seed: seed of sampling; all ways begin a prompt with the same state of the random generator.
        longest: tokens of the longest prompt and its answer, the size of static caches.
        stats: statistics of the last call with a ``SelfSpec``.
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
        """Makes a call that is not recorded."""
        self._generate(way, batch, options, None, _Arrivals(self.model.device))

    def call(
        self,
        way: Way,
        batch: Batch,
        place: tuple[int, int, int],
        options: Mapping[str, Any],
        spec: SelfSpec | None = None,
    ) -> Call:
        """Makes one timed call.

        Args:
            way: the way of generating.
            batch: the prompts.
            place: indices of the condition, the pass and the prompt.
            options: arguments of ``generate``.
            spec: the ``SelfSpec``, for ways that have one.
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
    """The cost of rounds if ``FREE`` tokens took as long as one, in forwards over one token.

    Args:
        round_sizes: for each round, the number of tokens that it verified and the number that it emitted.
    """
    return sum(max(1.0, nodes / FREE) for nodes, _ in round_sizes)


def _looping(rows: Sequence[Sequence[int]]) -> float:
    tokens = sum(map(len, rows))
    return sum(looping_share(row) * len(row) for row in rows) / tokens if tokens else 0.0


def _first_tokens(sizes: Sequence[int], ids: Sequence[Sequence[int]]) -> int:
    """Number of tokens of all rows that came first; a row may end among them."""
    first = sizes[0] if sizes else 0
    return sum(min(first, len(row)) for row in ids)


def _of_stats(stats: GenerationStats | None) -> Rounds | None:
    if stats is None or stats.left_to_generate:
        return None
    sizes = stats.round_sizes
    free = cost_where_free(sizes) if len(stats.from_draft) == 1 and len(sizes) == stats.rounds else None
    return Rounds(stats.rounds, stats.drafted, stats.accepted, dict(sorted(stats.accepted_lengths.items())), free)


def _of_arrivals(way: Way, sizes: Sequence[int]) -> Rounds | None:
    """Rounds of transformers' assisted loop, which streams the tokens of each round; what it drafted is not known."""
    if "prompt_lookup_num_tokens" not in way.options:
        return None
    accepted = Counter(size - 1 for size in sizes[1:])
    kept = sum(length * count for length, count in accepted.items())
    return Rounds(sum(accepted.values()), None, kept, dict(sorted(accepted.items())))


def _graphs() -> int:
    """Number of graphs that torch has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
