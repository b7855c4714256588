"""Audits: whether a ``SelfSpec`` leaves the output unchanged on a given model, dtype and set of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import Prompt, checked_texts, encoded
from ..errors import SettingTypeError
from ..model.anatomy import causal_lm
from ..selfspec import SelfSpec
from ..streaming import sampling
from ..validation import check_count, check_positive
from .differences import Difference, difference_at
from .distribution import ChiSquared, Expected, draw

# Only the beginning of sampled texts can be counted. The first token comes from the prefill, which leaves room for a
# draft of two tokens, then of one.
_STEPS, _SHORT_PROMPT = 4, 16
# A correct implementation falls below this p-value once in ten thousand audits.
_SIGNIFICANCE = 1e-4
_GREEDY = "{:>6} {:>6} {:>16} {:>16} {:>10} {:>10}  {}"
_SAMPLED = "{:>6} {:>7} {:>9} {:>8} {:>9}"
# Stands where one text has ended and the other has not.
_NOTHING = -1


@dataclass(frozen=True)
class SampleTest:
    """How sampled tokens are tested.

    Args:
        temperature: sampling temperature.
        top_p: share of the probability to sample from (nucleus sampling); the generation config's by default.
        draws: number of sampled continuations for each prompt.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    temperature: float = 1.0
    top_p: float | None = None
    draws: int = 1000

    def __post_init__(self) -> None:
        check_positive("SampleTest(temperature)", self.temperature)
        check_count("SampleTest(draws)", self.draws)
        self.options()

    def options(self) -> dict[str, Any]:
        """The options of ``generate`` for such sampling."""
        return sampling("SampleTest", self.temperature, self.top_p)


@dataclass(frozen=True)
class Parting:
    """Where the text with a ``SelfSpec`` diverges from that of plain ``generate``.

    Attributes:
        prompt: index of the prompt.
        token: index of the generated token.
        expected, got: the two tokens as text; ``None`` where a text has ended.
        difference: how far they are from the highest logit there, and whether rounding explains it.
    """

    prompt: int
    token: int
    expected: str | None
    got: str | None
    difference: Difference


@dataclass(frozen=True)
class Audit:
    """How texts with a ``SelfSpec`` compare with those of plain ``generate``; ``str`` of it is a table.

    Attributes:
        method: name of what was audited.
        model_name, dtype, device: the model's.
        prompts: number of prompts.
        tokens: number of tokens generated with the ``SelfSpec``.
        drafted, accepted: numbers of drafted tokens and of those that were kept. Where nothing is drafted, an audit
            shows little.
        partings: for greedy texts, one for each text that diverges.
        tests: for sampled texts, one for each prompt; ``None`` where texts are greedy.
    """

    method: str
    model_name: str
    dtype: str
    device: str
    prompts: int
    tokens: int
    drafted: int
    accepted: int
    partings: tuple[Parting, ...] = ()
    tests: tuple[ChiSquared, ...] | None = None

    @property
    def test(self) -> ChiSquared | None:
        """The test of all prompts together, for sampled texts."""
        return None if self.tests is None else sum(self.tests, ChiSquared())

    @property
    def passed(self) -> bool:
        """Whether texts diverge only at near ties, or sampled ones have the distribution of plain ``generate``."""
        test = self.test
        if test is not None:
            return test.p_value > _SIGNIFICANCE
        return all(parting.difference.is_near_tie for parting in self.partings)

    def __str__(self) -> str:
        how = "greedy" if self.tests is None else "sampled"
        kept = self.accepted / self.drafted if self.drafted else 0.0
        head = [
            f"{self.method} against plain generate: {self.model_name}, {self.dtype}, {self.device}, {how}",
            f"{self.prompts} prompts, {self.tokens} tokens; {self.drafted} drafted, {kept:.0%} of them accepted",
        ]
        if not self.drafted:
            head.append("nothing was drafted, so this shows little: use more tokens, or another method")
        return "\n".join([*head, *(self._greedy() if self.tests is None else self._sampled())])

    def _greedy(self) -> list[str]:
        lines = ["", _GREEDY.format("prompt", "token", "plain", "ours", "gap", "rounding", "verdict")]
        for one in self.partings:
            told = one.difference
            numbers = (f"{told.margin:.2g}", f"{told.tolerance:.2g}", "near tie" if told.is_near_tie else "DIFFERENT")
            lines.append(_GREEDY.format(one.prompt + 1, one.token + 1, _shown(one.expected), _shown(one.got), *numbers))
        equal = self.prompts - len(self.partings)
        wrong = sum(not one.difference.is_near_tie for one in self.partings)
        verdict = f"{wrong} differ where rounding does not explain it: NOT exact"
        if self.passed:
            ties = "no error found: the others diverge where both tokens' logits are within rounding of the highest"
            verdict = ties if self.partings else "exact"
        lines = [*lines, ""] if self.partings else [""]
        return [*lines, f"{equal} of {self.prompts} prompts have equal ids; {verdict}"]

    def _sampled(self) -> list[str]:
        tests, total = self.tests, self.test
        assert tests is not None
        assert total is not None
        lines = ["", _SAMPLED.format("prompt", "draws", "chi2", "freedom", "p")]
        for name, one in [*enumerate(tests, start=1), ("all", total)]:
            lines.append(_SAMPLED.format(name, one.draws, f"{one.statistic:.1f}", one.freedom, f"{one.p_value:.2g}"))
        verdict = f"consistent with plain generate's distribution (p above {_SIGNIFICANCE:g})"
        if not self.passed:
            verdict = f"NOT plain generate's distribution (p at most {_SIGNIFICANCE:g})"
        elif not total.freedom:
            verdict = "no continuation is likely enough to be counted in so few draws, so this shows nothing"
        return [*lines, "", f"first {_STEPS} tokens: {verdict}"]


def _shown(token: str | None) -> str:
    return "(end)" if token is None else repr(token)


def audit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Prompt],
    spec: SelfSpec | None = None,
    *,
    max_new_tokens: int = 64,
    max_prompt_tokens: int = 512,
    sample: SampleTest | None = None,
    name: str = "",
    after_prompt: Callable[[], None] | None = None,
) -> Audit:
    """Compares texts generated with a ``SelfSpec`` with those of plain ``generate``.

    Greedy texts must have equal ids, except where both tokens' logits are within rounding of the full model's highest.
    The first tokens of sampled texts must have the distribution of plain ``generate``, by a chi-squared test.

    Args:
        model: a causal LM of transformers, or a PEFT model around one, in the dtype and on the device of interest.
        tokenizer: the model's tokenizer.
        texts: prompts, as strings or as chats (lists of messages).
        spec: what is audited, ``SelfSpec()`` by default.
        max_new_tokens: tokens to generate for each prompt; sampled texts have 4.
        max_prompt_tokens: a prompt that is a string is cut after this many tokens, at most 16 for sampled texts.
        sample: how sampled tokens are tested, ``None`` for greedy texts.
        name: name of the method in the table, the settings of ``spec`` by default.
        after_prompt: called after each prompt, for a progress bar.

    Returns:
        The comparison; ``passed`` is the verdict.

    Raises:
        SettingError, SettingTypeError: there are no prompts, or a setting is not allowed.
    """
    inner, prompts = causal_lm(model, "audit"), checked_texts("audit", texts, chats=True)
    check_count("audit(max_new_tokens)", max_new_tokens)
    check_count("audit(max_prompt_tokens)", max_prompt_tokens)
    if spec is None:
        spec = SelfSpec()
    if not isinstance(spec, SelfSpec):
        raise SettingTypeError(f"audit(spec) must be a SelfSpec or None, got {spec!r}.")
    if sample is not None and not isinstance(sample, SampleTest):
        raise SettingTypeError(f"audit(sample) must be SampleTest(...) or None, got {sample!r}.")
    longest = max_prompt_tokens if sample is None else min(max_prompt_tokens, _SHORT_PROMPT)
    rows = [encoded(tokenizer, prompt, inner.device, longest)["input_ids"] for prompt in prompts]
    run = _Run(inner, tokenizer, spec, name or repr(spec), after_prompt or (lambda: None))
    return run.greedy(rows, max_new_tokens) if sample is None else run.sampled(rows, sample)


class _Run:
    """One audit."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        spec: SelfSpec,
        name: str,
        after_prompt: Callable[[], None],
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self.name = name
        self.options: dict[str, Any] = {}
        self.after_prompt = after_prompt
        self._tokens = self._drafted = self._accepted = 0

    def greedy(self, rows: Sequence[torch.Tensor], max_new_tokens: int) -> Audit:
        """Compares ids."""
        self.options = {"do_sample": False, "max_new_tokens": max_new_tokens}
        partings = []
        for index, ids in enumerate(rows):
            plain, ours = self._generate(ids, assistant=False), self._generate(ids, assistant=self.spec)
            self._count()
            partings += self._compared(index, ids, plain[0].tolist(), ours[0].tolist())
            self.after_prompt()
        return self._audit(len(rows), partings=tuple(partings))

    def sampled(self, rows: Sequence[torch.Tensor], test: SampleTest) -> Audit:
        """Compares distributions."""
        ends, options, draws = _ends(self.model), test.options(), test.draws
        tests = []
        for ids in rows:
            expected = Expected.of(self.model, ids, _STEPS, draws, ends, options)
            with_spec = options | {"assistant": self.spec}
            tests.append(expected.test(draw(self.model, ids, _STEPS, draws, ends, with_spec, self._count)))
            self.after_prompt()
        return self._audit(len(rows), tests=tuple(tests))

    def _audit(self, prompts: int, **found: Any) -> Audit:
        return Audit(
            method=self.name,
            model_name=type(self.model).__name__,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            prompts=prompts,
            tokens=self._tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            **found,
        )

    def _count(self) -> None:
        stats = self.spec.stats
        assert stats is not None
        self._tokens += stats.tokens
        self._drafted += stats.drafted
        self._accepted += stats.accepted

    def _generate(self, ids: torch.Tensor, **options: Any) -> Any:
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **self.options, **options)

    def _compared(self, prompt: int, ids: torch.Tensor, plain: list[int], ours: list[int]) -> list[Parting]:
        """Where two texts diverge, with the scores of plain ``generate``, processors included."""
        if plain == ours:
            return []
        width, longest = ids.shape[1], max(len(plain), len(ours))
        pair = [row + [_NOTHING] * (longest - len(row)) for row in (plain, ours)]
        column = next(index for index, (one, other) in enumerate(zip(*pair, strict=True)) if one != other)
        output = self._generate(ids, assistant=False, return_dict_in_generate=True, output_scores=True)
        step = min(column - width, len(output.scores) - 1)
        scores, tokens = output.scores[step][0], (pair[0][column], pair[1][column])
        difference = difference_at(0, column, *tokens, scores, self.model.dtype)
        expected, got = (None if token == _NOTHING else str(self.tokenizer.decode([token])) for token in tokens)
        return [Parting(prompt, column - width, expected, got, difference)]


def _ends(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a text."""
    found = None if model.generation_config is None else model.generation_config.eos_token_id
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)
