"""Drafting with a user's own ``CandidateGenerator`` of transformers."""

import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.candidate_generator import CandidateGenerator

from ..batch import Draft, Text, Verdict
from ..errors import SettingError, UnsupportedOptionError
from .source import Drafter, DraftSource, Session


@dataclass(frozen=True)
class Candidates(DraftSource):
    """Drafts with a ``CandidateGenerator`` of transformers."""

    generator: CandidateGenerator

    @property
    def fixed_because(self) -> str:
        return f"{type(self.generator).__name__} drafts as many tokens as it returns, in a line"

    def __post_init__(self) -> None:
        if getattr(self.generator, "requires_model_outputs", False):
            raise SettingError(
                f"SelfSpec(draft={type(self.generator).__name__}) is not possible: it drafts from what the model's "
                "forwards return (requires_model_outputs), but a SelfSpec passes only ids to a generator. Use "
                "transformers' own loop: generate(use_mtp=True) or generate(assistant_model=...)."
            )

    def start(self, session: Session) -> Drafter:
        session.target.cache.reserve(session.max_draft + 1)
        return CandidateDraft(one_for_each_row(self.generator, session.num_rows), session)


def one_for_each_row(generator: CandidateGenerator, rows: int) -> list[CandidateGenerator]:
    """A generator for each row of a batch: ``generator`` itself, then deep copies that share its modules."""
    if rows == 1:
        return [generator]
    held = getattr(generator, "__dict__", {}).values()
    modules = {id(module): module for module in held if isinstance(module, nn.Module)}
    try:
        return [generator, *(copy.deepcopy(generator, dict(modules)) for _ in range(rows - 1))]
    except (TypeError, RuntimeError, copy.Error) as error:
        raise UnsupportedOptionError(
            f"{type(generator).__name__} cannot draft for a batch of {rows} rows: each row needs its own copy, and "
            f"copy.deepcopy failed ({error}). Give it a __deepcopy__, or generate for one row at a time."
        ) from error


class CandidateDraft(Drafter):
    """Drafts each row's tokens with a ``CandidateGenerator`` of its own, called with ids ``[1, s]`` without padding;
    logits that it returns, ``[1, t, v]``, are used only where tokens were sampled."""

    def __init__(self, generators: list[CandidateGenerator], session: Session) -> None:
        self.generators, self.scorer, self.vocabulary = generators, session.scorer, session.vocabulary
        self.longest = session.cap_by_logit_memory(session.max_draft)
        # For each row that took part the column at which its text begins, its length, and how many tokens were drafted.
        self._requests: list[tuple[int, int, int] | None] = [None] * len(generators)

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        rows: list[torch.Tensor] = []
        known: list[torch.Tensor] = []  # what was sampled from; where a row does not tell, all of them count as named
        for row, most in enumerate(max_new):
            start = max(0, -text.base[row])
            ids = text.ids[row : row + 1, start : text.lengths[row]]
            drafted, scores = self._candidates(row, ids) if most else (ids[0, :0], ids.new_zeros(1, 0, self.vocabulary))
            count = min(most, self.longest, len(drafted))
            self._requests[row] = (start, text.lengths[row], count) if most else None
            rows.append(drafted[:count])
            if scores is not None and self.scorer.do_sample:
                known.append(scores[0, :count].to(ids.device, torch.float32).softmax(-1))
        self.steps += 1
        tokens = pad_sequence(rows, batch_first=True)
        q = pad_sequence(known, batch_first=True) if known and len(known) == len(rows) else None
        return Draft(tokens, [len(drafted) for drafted in rows], q=q)

    def _candidates(self, row: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a row's generator drafts after ``ids`` ``[1, s]``: tokens ``[t]``, and their logits ``[1, t, v]``."""
        name, vocabulary = f"{type(self.generators[row]).__name__}.get_candidates", self.vocabulary
        candidates, scores = self.generators[row].get_candidates(ids)
        drafted = candidates[0, ids.shape[1] :].to(ids.device)
        # Placeholders of images may have ids beyond the vocabulary; such an id that was copied ends the draft.
        copied = (drafted >= vocabulary) & torch.isin(drafted, ids[0])
        count = int(copied.int().argmax()) if copied.any() else len(drafted)
        drafted, scores = drafted[:count], None if scores is None else scores[:, :count]
        is_continued = candidates.shape[0] == 1 and torch.equal(candidates[:, : ids.shape[1]].to(ids.device), ids)
        are_tokens = not count or 0 <= int(drafted.min()) <= int(drafted.max()) < vocabulary
        if not (is_continued and are_tokens and (scores is None or scores.shape == (1, count, vocabulary))):
            raise SettingError(
                f"{name} must return the given ids [1, {ids.shape[1]}] followed by drafted tokens, from 0 to "
                f"{vocabulary - 1}, and None or [1, tokens, {vocabulary}], the processed logits that each was drawn "
                f"from; got ids {list(candidates.shape)} that end with {drafted.tolist()}, and "
                f"{'None' if scores is None else list(scores.shape)}."
            )
        return drafted, scores

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Reports to each generator what was accepted, as assisted generation does, but with the model's logits where a
        logits processor looks at the text: it must not be called for tokens that are not emitted."""
        for row, (generator, request) in enumerate(zip(self.generators, self._requests, strict=True)):
            if request is not None:
                start, length, drafted = request
                scores = self.scorer.roughly(logits[row : row + 1, : drafted + 1])
                # Tokens beyond its draft are not the generator's.
                kept = min(text.lengths[row] - length - 1, drafted)
                generator.update_candidate_strategy(text.prefix(row)[:, start:], scores, kept)
