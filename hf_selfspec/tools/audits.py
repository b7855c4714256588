"""Where greedy texts of one model diverge, and whether rounding explains it; audits of a ``SelfSpec``."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingTypeError
from ..model.anatomy import Anatomy, causal_lm
from ..model.attention.invariance import differing_part
from ..model.encoding import Prompt, checked_texts, encoded
from ..model.prompt import cache_name
from ..selfspec import SelfSpec
from ..validation import check_count
from .figures import as_text

# Noise is measured over the likeliest tokens, since smaller logits have finer steps, with the text's last tokens going
# through the model one at a time: after fewer than 16 it is smaller than in whole texts of plain ``generate``.
_LIKELIEST, _STEPS = 64, 32
# Of 2,183 positions of bfloat16 texts (the demo model, SmolLM2-135M) the gap of the two likeliest tokens changed by
# more than this many times the noise in 9 when five tokens went through together; 5 % and 17 % of gaps are smaller.
_NOISES = 6
# The promise that allows no near-ties.
_EXACT = "bit for bit"
# Stands where one text has ended and the other has not.
_ENDED = -1


@dataclass(frozen=True)
class Difference:
    """The first position at which one row of two texts differs.

    Attributes:
        row, column: where; in an :class:`Audit` the index of the prompt, and that of the generated token.
        expected, token: the two tokens; negative where a text has ended.
        margin: how far the lower one's logit is below the full model's highest; infinite where a token is forbidden, or
            where one text has ended.
        tolerance: the largest margin that rounding can explain: six times the noise that was measured there, between
            the logits of tokens that go through the model one at a time and together, and one step of their dtype, to
            which both logits are rounded.
        texts: the two tokens as text, in an :class:`Audit`; ``None`` where a text has ended.
    """

    row: int
    column: int
    expected: int
    token: int
    margin: float
    tolerance: float
    texts: tuple[str | None, str | None] = (None, None)

    @property
    def is_near_tie(self) -> bool:
        """Whether kernels that round differently may choose either token."""
        return self.margin <= self.tolerance


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
        promise: how far ids equal plain ``generate``'s, see :class:`GenerationStats`, and what exact=True would add.
        differences: one for each text that diverges.
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
    differences: tuple[Difference, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether texts diverge only at near ties, and nowhere if ids are promised bit for bit."""
        return all(difference.is_near_tie and self.promise != _EXACT for difference in self.differences)

    def __str__(self) -> str:
        kept = self.accepted / self.drafted if self.drafted else 0.0
        lines = [
            f"{self.method} against plain generate: {self.model_name}, {self.dtype}, {self.device}, greedy",
            f"{self.prompts} prompts, {self.tokens} tokens; {self.drafted} drafted, {kept:.0%} of them accepted",
            f"promise: {self.promise}",
        ]
        if not self.drafted:
            lines.append("nothing was drafted, so this shows little: use more tokens, or another method")
        rows = []
        for one in self.differences:
            tokens = ["(end)" if text is None else repr(text) for text in one.texts]
            verdict = "near tie" if one.is_near_tie else "DIFFERENT"
            places = [str(one.row + 1), str(one.column + 1)]
            rows.append([*places, *tokens, f"{one.margin:.2g}", f"{one.tolerance:.2g}", verdict])
        if rows:
            head = ["prompt", "token", "plain", "ours", "gap", "rounding", "verdict"]
            lines += ["", as_text(head, rows, right=True)]
        wrong = len(rows) if self.promise == _EXACT else sum(not one.is_near_tie for one in self.differences)
        verdict = "exact"
        if wrong:
            verdict = f"{wrong} differ where rounding does not explain it: NOT exact"
        elif rows:
            verdict = "no error found: the others diverge where both tokens' logits are within rounding of the highest"
        return "\n".join(
            [*lines, "", f"{self.prompts - len(rows)} of {self.prompts} prompts have equal ids; {verdict}"]
        )


def audit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Prompt],
    spec: SelfSpec | None = None,
    *,
    max_new_tokens: int = 64,
    max_prompt_tokens: int = 512,
    name: str = "",
) -> Audit:
    """Compares texts generated with a ``SelfSpec`` with those of plain ``generate``, with a progress bar.

    Greedy texts must have equal ids, except where both tokens' logits are within rounding of the full model's highest.

    Args:
        model: a causal LM of transformers, or a PEFT model around one, in the dtype and on the device of interest.
        tokenizer: the model's tokenizer.
        texts: prompts, as strings or as chats (lists of messages).
        spec: what is audited, ``SelfSpec()`` by default.
        max_new_tokens: tokens to generate for each prompt.
        max_prompt_tokens: a prompt that is a string is cut after this many tokens.
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
    rows = [encoded(tokenizer, prompt, inner.device, max_prompt_tokens)["input_ids"] for prompt in prompts]
    counts = dict.fromkeys(("tokens", "drafted", "accepted"), 0)
    promises, differences = dict[str, None](), list[Difference]()
    for index, ids in enumerate(logging.tqdm(rows, desc=f"audit of {name or 'SelfSpec'}", leave=False)):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        ours = new_tokens(inner, inner.generate(**inputs, **options, assistant=spec), ids.shape[1])
        for one in differences_of(inner, inputs, options, ours):
            plain_text, our_text = (
                None if token == _ENDED else str(tokenizer.decode([token])) for token in (one.expected, one.token)
            )
            differences.append(replace(one, row=index, texts=(plain_text, our_text)))
        assert spec.stats is not None
        for count_name in counts:
            counts[count_name] += getattr(spec.stats, count_name)
        promises[spec.stats.promise] = None
    if inner.dtype is torch.bfloat16 and _EXACT not in promises:
        part = differing_part(inner, Anatomy.of(inner))
        promises[f"{_EXACT} with exact=True" + (f" not to be had here: {part} differs" if part else "")] = None
    return Audit(
        method=name or repr(spec),
        model_name=type(inner).__name__,
        dtype=str(inner.dtype).removeprefix("torch."),
        device=str(inner.device),
        prompts=len(rows),
        **counts,
        promise=", ".join(promises),
        differences=tuple(differences),
    )


def new_tokens(model: PreTrainedModel, sequences: torch.Tensor, width: int) -> list[list[int]]:
    """The tokens of each row ``[b, s]`` after a prompt of that width, up to the first one that ends a text."""
    eos = model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    rows = sequences[:, width:].tolist()
    return [row[: next((at for at, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]


def differences_of(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    ours: Iterable[Sequence[int]],
) -> list[Difference]:
    """Where rows of new tokens diverge from those of plain ``generate`` with these inputs and options, by its scores,
    processors included; columns count new tokens."""
    with_scores = {"assistant": False, "return_dict_in_generate": True, "output_scores": True}
    plain: Any = model.generate(**inputs, **options, **with_scores)
    width, differences = inputs["input_ids"].shape[1], list[Difference]()
    for row, texts in enumerate(zip(new_tokens(model, plain.sequences, width), ours, strict=True)):
        pairs = enumerate(zip_longest(*texts, fillvalue=_ENDED))
        for column, pair in [(column, pair) for column, pair in pairs if pair[0] != pair[1]][:1]:
            start = int(inputs["attention_mask"][row].argmax())  # without the padding on the left
            text = plain.sequences[row : row + 1, start : width + column]
            scores = plain.scores[min(column, len(plain.scores) - 1)][row]
            differences.append(difference_at(row, column, *pair, model, text, scores))
    return differences


@torch.no_grad()
def difference_at(
    row: int,
    column: int,
    expected: int,
    token: int,
    model: PreTrainedModel,
    text: torch.Tensor,
    scores: torch.Tensor,
) -> Difference:
    """The difference between two tokens that a model chose after ``text`` ``[1, s]``, by their ``scores`` ``[v]``."""
    stepwise, together = _last_logits(model, text, _STEPS), _last_logits(model, text, 0)
    likeliest = stepwise.topk(min(_LIKELIEST, len(stepwise))).indices
    # What all logits have in common chooses no other token.
    noise = float((together.float() - stepwise.float())[likeliest].std(correction=0))
    step = torch.finfo(stepwise.dtype).eps * 2.0 ** (math.frexp(float(stepwise.max()))[1] - 1)
    lower = -math.inf if min(expected, token) < 0 else float(scores[[expected, token]].min())
    return Difference(row, column, expected, token, float(scores.max()) - lower, _NOISES * noise + step)


def _last_logits(model: PreTrainedModel, text: torch.Tensor, steps: int) -> torch.Tensor:
    """The logits ``[v]`` behind a text ``[1, s]`` whose last ``steps`` tokens go through the model one at a time."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    forward = partial(model, **{cache_name(model): cache, "use_cache": True})
    first = max(1, text.shape[1] - steps)  # tokens that go through together
    logits: torch.Tensor = forward(text[:, :first]).logits
    for column in range(first, text.shape[1]):
        logits = forward(text[:, column : column + 1]).logits
    return logits[0, -1]
