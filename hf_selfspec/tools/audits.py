"""Audits: whether a ``SelfSpec`` leaves the output unchanged on a given model, dtype and set of prompts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingTypeError
from ..model.anatomy import Anatomy, causal_lm
from ..model.attention.invariance import differing_part, price_of
from ..model.encoding import Prompt, checked_texts, encoded
from ..selfspec import SelfSpec
from ..validation import check_count
from .differences import Difference, difference_at
from .tables import as_text

# Where the text with a ``SelfSpec`` diverges from that of plain ``generate``.
Parting = Difference

# The promise that allows no near-ties.
_EXACT = "bit for bit"
# Stands where one text has ended and the other has not.
_NOTHING = -1


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
        partings: one for each text that diverges.
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

    @property
    def passed(self) -> bool:
        """Whether texts diverge only at near ties."""
        return all(parting.is_near_tie and self.promise != _EXACT for parting in self.partings)

    def __str__(self) -> str:
        kept = self.accepted / self.drafted if self.drafted else 0.0
        head = [
            f"{self.method} against plain generate: {self.model_name}, {self.dtype}, {self.device}, greedy",
            f"{self.prompts} prompts, {self.tokens} tokens; {self.drafted} drafted, {kept:.0%} of them accepted",
            f"promise: {self.promise}",
        ]
        if not self.drafted:
            head.append("nothing was drafted, so this shows little: use more tokens, or another method")
        rows = []
        for parting in self.partings:
            tokens = ["(end)" if text is None else repr(text) for text in parting.texts]
            numbers = [f"{parting.margin:.2g}", f"{parting.tolerance:.2g}"]
            verdict = "near tie" if parting.is_near_tie else "DIFFERENT"
            rows.append([str(parting.row + 1), str(parting.column + 1), *tokens, *numbers, verdict])
        names = ["prompt", "token", "plain", "ours", "gap", "rounding", "verdict"]
        wrong = sum(not parting.is_near_tie for parting in self.partings)
        verdict = f"{wrong} differ where rounding does not explain it: NOT exact"
        if self.passed:
            ties = "no error found: the others diverge where both tokens' logits are within rounding of the highest"
            verdict = ties if self.partings else "exact"
        equal = self.prompts - len(self.partings)
        table = ["", as_text(names, rows, right=True)] if rows else []
        return "\n".join([*head, *table, "", f"{equal} of {self.prompts} prompts have equal ids; {verdict}"])


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
    promises: dict[str, None] = {}

    partings: list[Parting] = []
    for index, ids in enumerate(logging.tqdm(rows, desc=f"audit of {name or 'SelfSpec'}", leave=False)):
        partings += _partings(inner, tokenizer, spec, index, ids, max_new_tokens)
        assert spec.stats is not None
        for count_name in counts:
            counts[count_name] += getattr(spec.stats, count_name)
        promises[spec.stats.promise] = None
    if inner.dtype is torch.bfloat16 and _EXACT not in promises:
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
