"""The statistics of one call of ``generate``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# How the characters of a plan are shown as two lines, one of attention and one of MLP blocks.
_ATTENTION, _MLP = str.maketrans("#am.", "■■□□"), str.maketrans("#am.", "■□■□")


@dataclass
class GenerationStats:
    """What one call of ``generate`` did.

    Attributes:
        tokens: tokens generated, all rows; 0 where a call was left to plain ``generate``.
        rounds: verification passes, counted for each row that took part; the prefill does not count.
        drafted: drafting steps, all rows (siblings in a tree do not count).
        accepted: drafted tokens that were kept.
        siblings: how many of these were siblings in a tree, which took no drafting step of their own.
        accepted_lengths: for each number of drafted tokens how many rounds kept that many.
        draft_steps: forwards of the draft, each counted once for the whole batch.
        verify_passes: forwards of verification, each counted once for the whole batch.
        prefill_seconds, draft_seconds, verify_seconds, search_seconds, total_seconds: wall-clock time; verification
            includes bringing the last drafted token and siblings to the first layer that the draft altered, and search
            is everything from which the draft learns. On CUDA, prefill, draft and verification end when the device has
            done their work, by its events in a few rounds, like which others are divided. On other devices with a queue
            they end when the work has been handed over, and the wait for it is in :attr:`other_seconds`.
        forward_seconds: time inside the model's forwards, prefill included (on a GPU: until they were launched).
        from_draft: for each row and generated token whether it came from the draft.
        plan: one character per layer: ``#`` runs, ``a`` attention only, ``m`` MLP only, ``.`` nothing.
        phase: phase of a search for blocks to skip, ``optimization`` or ``acceleration`` (SWIFT, Figure 4), else empty.
        matchness: matchness of the sets that such a search tried, in order, including those of earlier calls.
        promise: how far ids equal plain ``generate``'s: ``bit for bit`` (:attr:`SelfSpec.exact`), ``token for token``
            (float32), others where logits are ``near-ties`` (16 bits, or float32 that may be multiplied in TF32 or
            bfloat16 by torch's flags), or the ``distribution`` alone of drawn ones.
        left_to_generate: why the call was left to plain ``generate``, empty where it was not. Nothing was drafted,
            verified or counted then.
        checked: the parts of the model that this package's tests do not cover, so that drafting was first compared with
            plain ``generate``; empty where there are none. ``left_to_generate`` has what failed.
        together_for: what may keep a state or change the model between tokens, so that all rows advanced together.
        exit_layers: for drafts that choose an exit for each token, how many tokens were drafted at each exit.
        round_sizes: for each verification pass the number of drafted nodes per row, and the number of tokens that all
            rows gained.
        timeline: after each round the number of tokens of all rows so far and the seconds since the call began.
    """

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    siblings: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    draft_steps: int = 0
    verify_passes: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    search_seconds: float = 0.0
    total_seconds: float = 0.0
    forward_seconds: float = 0.0
    from_draft: list[list[bool]] = field(default_factory=list, repr=False)
    plan: str = ""
    phase: str = ""
    matchness: list[float] = field(default_factory=list, repr=False)
    promise: str = ""
    left_to_generate: str = ""
    checked: str = ""
    together_for: str = ""
    exit_layers: Counter[int] = field(default_factory=Counter)
    round_sizes: list[tuple[int, int]] = field(default_factory=list, repr=False)
    timeline: list[tuple[int, float]] = field(default_factory=list, repr=False)

    @classmethod
    def of_plain(cls, seconds: float, why: str) -> GenerationStats:
        """Statistics of a call that plain ``generate`` has served."""
        return cls(total_seconds=seconds, left_to_generate=why, promise="bit for bit")

    @property
    def acceptance_rate(self) -> float:
        """α, accepted draft tokens but siblings / drafting steps (0 if nothing was drafted)."""
        return (self.accepted - self.siblings) / self.drafted if self.drafted else 0.0

    @property
    def mean_generated_length(self) -> float:
        """M, tokens per verification pass and row (0 before the first)."""
        after_prefill = self.tokens - len(self.from_draft)
        return after_prefill / self.rounds if self.rounds else 0.0

    def ctar(self, w: int) -> float:
        """CTAR(w), the share of rounds in which ``w`` drafted tokens in a row were kept."""
        long_enough = sum(count for length, count in self.accepted_lengths.items() if length >= w)
        return long_enough / self.rounds if self.rounds else 0.0

    @property
    def other_seconds(self) -> float:
        """Time outside prefill, drafting, verification and search."""
        parts = self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.search_seconds
        return self.total_seconds - parts

    def __str__(self) -> str:
        if self.left_to_generate:
            return f"left to plain generate, since {self.left_to_generate}: {self.total_seconds:.2f} seconds"
        seconds = (
            f"{self.total_seconds:.2f} = prefill {self.prefill_seconds:.2f} + draft {self.draft_seconds:.2f}"
            f" + verify {self.verify_seconds:.2f} + search {self.search_seconds:.2f} + rest {self.other_seconds:.2f}"
        )
        lines = [
            ("tokens", f"{self.tokens} in {self.rounds} rounds"),
            ("drafted", f"{self.drafted}, accepted {self.accepted}"),
            ("acceptance rate α", f"{self.acceptance_rate:.3f}"),
            ("mean generated length M", f"{self.mean_generated_length:.2f}"),
            ("CTAR(1), (2), (4)", ", ".join(f"{self.ctar(w):.2f}" for w in (1, 2, 4))),
            ("seconds", seconds),
            ("plain generate's ids", self.promise),
        ]
        if self.together_for:
            lines.append(("rows advance together", f"since {self.together_for} may keep a state"))
        if self.exit_layers:
            taken = ", ".join(f"{count} at {layer}" for layer, count in sorted(self.exit_layers.items()))
            lines.append(("exits", taken))
        if self.phase:
            last = f", last of {len(self.matchness)} trials {self.matchness[-1]:.2f}" if self.matchness else ""
            lines.append(("search", f"{self.phase}{last}"))
        if self.plan:
            lines.append(("attention blocks", self.plan.translate(_ATTENTION)))
            lines.append(("MLP blocks", self.plan.translate(_MLP)))
        return "\n".join(f"{name:<24} {value}" for name, value in lines)
