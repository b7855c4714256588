"""Audits: whether a ``SelfSpec`` leaves the output unchanged on a given model, dtype and set of prompts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingTypeError
from ..generate.streaming import sampling
from ..model.anatomy import Anatomy, causal_lm
from ..model.attention.invariance import differing_part, price_of
from ..model.encoding import Prompt, checked_texts, encoded
from ..selfspec import SelfSpec
from ..validation import check_count, check_positive
from .differences import Difference, difference_at
from .distribution import ChiSquared, Sampling
from .tables import as_text

# Where the text with a ``SelfSpec`` diverges from that of plain ``generate``.
Parting = Difference

# Only the beginning of sampled texts can be counted. The first token comes from the prefill, which leaves room for a
# draft of two tokens, then of one.
_STEPS, _SHORT_PROMPT = 4, 16
# A correct implementation falls below this p-value once in ten thousand audits.
_SIGNIFICANCE = 1e-4
# The promise that allows no near-ties.
_EXACT = "bit for bit"
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
class Audit:
    """How texts with a ``SelfSpec`` compare with those of plain ``generate``; ``str`` of it is a table.

    Attributes:
        method: name of what was audited.
        model_name, dtype, device: the model's.
        prompts: number of prompts.
        tokens: number of tokens generated with the ``SelfSpec``.
        drafted, accepted: numbers of drafted tokens and of those that were kept. Where nothing is drafted, an audit
            shows little.
        promise: how far ids are plain's, see :class:`GenerationStats`, with what exact results of a bfloat16 model
            would cost.
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
    promise: str = ""
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
        return all(parting.is_near_tie and self.promise != _EXACT for parting in self.partings)

    def __str__(self) -> str:
        how = "greedy" if self.tests is None else "sampled"
        kept = self.accepted / self.drafted if self.drafted else 0.0
        head = [
            f"{self.method} against plain generate: {self.model_name}, {self.dtype}, {self.device}, {how}",
            f"{self.prompts} prompts, {self.tokens} tokens; {self.drafted} drafted, {kept:.0%} of them accepted",
            f"promise: {self.promise}",
        ]
        if not self.drafted:
            head.append("nothing was drafted, so this shows little: use more tokens, or another method")
        lines = self._greedy() if self.tests is None else self._sampled(self.tests, sum(self.tests, ChiSquared()))
        return "\n".join([*head, *lines])

    def _greedy(self) -> list[str]:
        rows = []
        for parting in self.partings:
            tokens = ["(end)" if text is None else repr(text) for text in parting.texts]
            numbers = [f"{parting.margin:.2g}", f"{parting.tolerance:.2g}"]
            verdict = "near tie" if parting.is_near_tie else "DIFFERENT"
            rows.append([str(parting.row + 1), str(parting.column + 1), *tokens, *numbers, verdict])
        head = ["prompt", "token", "plain", "ours", "gap", "rounding", "verdict"]
        wrong = sum(not parting.is_near_tie for parting in self.partings)
        verdict = f"{wrong} differ where rounding does not explain it: NOT exact"
        if self.passed:
            ties = "no error found: the others diverge where both tokens' logits are within rounding of the highest"
            verdict = ties if self.partings else "exact"
        equal = self.prompts - len(self.partings)
        table = ["", as_text(head, rows, right=True)] if rows else []
        return [*table, "", f"{equal} of {self.prompts} prompts have equal ids; {verdict}"]

    def _sampled(self, tests: Sequence[ChiSquared], total: ChiSquared) -> list[str]:
        rows = [
            [str(name), str(test.draws), f"{test.statistic:.1f}", str(test.degrees_of_freedom), f"{test.p_value:.2g}"]
            for name, test in [*enumerate(tests, start=1), ("all", total)]
        ]
        verdict = f"consistent with plain generate's distribution (p above {_SIGNIFICANCE:g})"
        if not self.passed:
            verdict = f"NOT plain generate's distribution (p at most {_SIGNIFICANCE:g})"
        elif not total.degrees_of_freedom:
            verdict = "no continuation is likely enough to be counted in so few draws, so this shows nothing"
        table = as_text(["prompt", "draws", "chi2", "freedom", "p"], rows, right=True)
        return ["", table, "", f"first {_STEPS} tokens: {verdict}"]


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
) -> Audit:
    """Compares texts generated with a ``SelfSpec`` with those of plain ``generate``, with a progress bar.

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

    Returns:
        The comparison; ``passed`` is the verdict.

    Raises:
        SettingError, SettingTypeError: there are no prompts, or a setting is not allowed.
    """
    inner, prompts = causal_lm(model, "audit"), checked_texts("audit", texts, chats=True, empty=True)
    check_count("audit(max_new_tokens)", max_new_tokens)
    check_count("audit(max_prompt_tokens)", max_prompt_tokens)
    spec = SelfSpec() if spec is None else spec
    if not isinstance(spec, SelfSpec):
        raise SettingTypeError(f"audit(spec) must be a SelfSpec or None, got {spec!r}.")
    if sample is not None and not isinstance(sample, SampleTest):
        raise SettingTypeError(f"audit(sample) must be SampleTest(...) or None, got {sample!r}.")
    longest = max_prompt_tokens if sample is None else min(max_prompt_tokens, _SHORT_PROMPT)
    rows = [encoded(tokenizer, prompt, inner.device, longest)["input_ids"] for prompt in prompts]
    counts = dict.fromkeys(("tokens", "drafted", "accepted"), 0)
    promises: dict[str, None] = {}

    def count() -> None:
        assert spec.stats is not None
        for count_name in counts:
            counts[count_name] += getattr(spec.stats, count_name)
        promises[spec.stats.promise] = None

    partings: list[Parting] = []
    tests: list[ChiSquared] = []
    for index, ids in enumerate(logging.tqdm(rows, desc=f"audit of {name or 'SelfSpec'}", leave=False)):
        if sample is None:
            partings += _partings(inner, tokenizer, spec, index, ids, max_new_tokens)
            count()
        else:
            drawn = Sampling(inner, ids, _STEPS, sample.draws, sample.options())
            tests.append(drawn.test(spec, count))
    if sample is None and inner.dtype is torch.bfloat16 and _EXACT not in promises:
        part = differing_part(inner, anatomy := Anatomy.of(inner))
        why = f"not to be had here: {part} differs" if part else f"for {price_of(inner, anatomy):.0%} of a forward"
        promises[f"{_EXACT} with exact=True {why}"] = None
    return Audit(
        method=name or repr(spec),
        model_name=type(inner).__name__,
        dtype=str(inner.dtype).removeprefix("torch."),
        device=str(inner.device),
        prompts=len(rows),
        **counts,
        promise=", ".join(promises),
        partings=tuple(partings),
        tests=None if sample is None else tuple(tests),
    )


def _partings(
    model: PreTrainedModel, tokenizer: Any, spec: SelfSpec, prompt: int, ids: torch.Tensor, max_new_tokens: int
) -> list[Parting]:
    """Where the two texts after a prompt diverge, with the scores of plain ``generate``, processors included."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": max_new_tokens}
    plain: Any = model.generate(ids, assistant=False, return_dict_in_generate=True, output_scores=True, **options)
    ours: Any = model.generate(ids, assistant=spec, **options)
    pairs = list(zip_longest(plain.sequences[0].tolist(), ours[0].tolist(), fillvalue=_NOTHING))
    column = next((index for index, (expected, token) in enumerate(pairs) if expected != token), None)
    if column is None:
        return []
    position = column - ids.shape[1]
    scores = plain.scores[min(position, len(plain.scores) - 1)][0]
    parting = difference_at(prompt, position, *pairs[column], model, plain.sequences[:, :column], scores)
    plain_text, our_text = (None if token == _NOTHING else str(tokenizer.decode([token])) for token in pairs[column])
    return [replace(parting, texts=(plain_text, our_text))]
