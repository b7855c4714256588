"""The settings of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import SettingError
from ..validation import check_count, check_share

Clock = Literal["auto", "wall", "cpu"]
_CLOCKS = ("auto", "wall", "cpu")


class Condition(NamedTuple):
    """One kind of call: its temperature, 0 for greedy, and how many prompts are generated together."""

    temperature: float
    batch_size: int

    def __str__(self) -> str:
        return f"{f'temperature {self.temperature:g}' if self.temperature else 'greedy'}, batch {self.batch_size}"


@dataclass(frozen=True)
class Settings:
    """How methods are compared; see :func:`~hf_selfspec.compare` and the options of ``hf-selfspec bench``."""

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    clock: Clock = "auto"
    passes: int = 1

    def __post_init__(self) -> None:
        # One token comes with the prompt, so that decoding begins with the second.
        for name, least in {"max_new_tokens": 2, "passes": 1, "top_k": 0, "seed": 0}.items():
            check_count(name, getattr(self, name), least=least)
        check_share("top_p", self.top_p, zero=False, one=True)
        for size in self.batch_sizes:
            check_count("batch_size", size)
        for value in self.temperatures:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise SettingError(f"temperature must be a number of at least 0 (0 for greedy), got {value!r}.")
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
        sizes, temperatures = dict.fromkeys(self.batch_sizes), dict.fromkeys(self.temperatures)
        return [Condition(float(temperature), size) for size in sizes for temperature in temperatures]

    def options(self, condition: Condition, pad: int) -> dict[str, Any]:
        """Arguments of ``generate`` that are the same for all methods; drawn texts differ, so all get one length."""
        found: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "pad_token_id": pad}
        if condition.temperature:
            found |= {"do_sample": True, "temperature": condition.temperature, "top_p": self.top_p, "top_k": self.top_k}
            found |= {"min_new_tokens": self.max_new_tokens}
        return found
