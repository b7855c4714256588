"""The settings of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...errors import SettingError
from ...settings import check_count, check_share

Clock = Literal["auto", "wall", "cpu"]
_CLOCKS = ("auto", "wall", "cpu")


@dataclass(frozen=True)
class Condition:
    """One kind of call.

    Attributes:
        temperature: 0 for greedy.
        batch_size: prompts that are generated together.
    """

    temperature: float
    batch_size: int

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen."""
        return self.temperature == 0

    def __str__(self) -> str:
        drawn = "greedy" if self.is_greedy else f"temperature {self.temperature:g}"
        return drawn if self.batch_size == 1 else f"{drawn}, batch {self.batch_size}"


@dataclass(frozen=True)
class Settings:
    """How ways of generating are compared.

    Attributes:
        max_new_tokens: the most new tokens for each prompt; with sampling exactly this many, since texts differ.
        temperatures: one or several, 0 for greedy.
        batch_sizes: one or several numbers of prompts that are generated together.
        top_p, top_k: settings of sampling.
        seed: seed of sampling and of the choice of prompts.
        clock: the clock of the main figures; ``auto`` is the CPU time of the process with one thread on a CPU, which
            other users of the machine disturb less, and otherwise wall time.
        passes: how often the stream runs, each time with new ``SelfSpec``s; the last pass counts, since graphs are
            compiled in the first two.
        first_calls: number of prompts after the stream, each with a new ``SelfSpec``.

    Raises:
        SettingError, SettingTypeError: a value is not allowed.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    clock: Clock = "auto"
    passes: int = 1
    first_calls: int = 0

    def __post_init__(self) -> None:
        # One token comes with the prompt, so that decoding begins with the second.
        check_count("max_new_tokens", self.max_new_tokens, least=2)
        check_count("passes", self.passes)
        check_count("top_k", self.top_k, least=0)
        check_count("seed", self.seed, least=0)
        check_count("first_calls", self.first_calls, least=0)
        check_share("top_p", self.top_p, zero=False, one=True)
        for size in self.batch_sizes:
            check_count("batch_size", size)
        for temperature in self.temperatures:
            _check_temperature(temperature)
        drawing = [name for name, usual in (("top_p", 1.0), ("top_k", 0)) if getattr(self, name) != usual]
        if drawing and not any(self.temperatures):
            raise SettingError(f"{drawing[0]} has no effect on greedy decoding: give a temperature, or leave it out.")
        if not self.batch_sizes or not self.temperatures:
            raise SettingError("batch_size and temperature need at least one value each.")
        if self.clock not in _CLOCKS:
            raise SettingError(f"clock must be one of {', '.join(_CLOCKS)}, got {self.clock!r}.")

    @property
    def conditions(self) -> list[Condition]:
        """All kinds of calls, in order."""
        return [
            Condition(float(temperature), size)
            for size in dict.fromkeys(self.batch_sizes)
            for temperature in dict.fromkeys(self.temperatures)
        ]

    def options(self, condition: Condition, pad: int) -> dict[str, Any]:
        """Arguments of ``generate`` that are the same for all ways."""
        found = {"max_new_tokens": self.max_new_tokens, "do_sample": not condition.is_greedy, "pad_token_id": pad}
        if condition.is_greedy:
            return found
        drawn = {"temperature": condition.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return found | drawn | {"min_new_tokens": self.max_new_tokens}

    def as_json(self) -> Mapping[str, Any]:
        """The settings in a form for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def _check_temperature(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise SettingError(f"temperature must be a number of at least 0 (0 for greedy), got {value!r}.")
