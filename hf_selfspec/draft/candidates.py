"""A user's own ``CandidateGenerator`` as the draft."""

from __future__ import annotations

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..errors import SettingError
from ..types import Draft, GenerationStats, Text, Verdict


class CandidateDraft:
    """Asks a ``CandidateGenerator`` for each row's tokens.

    Args:
        generator: called as ``get_candidates(input_ids [1, s])`` with one row's text, left padding removed; it returns
            ``[1, s + t]`` ids and, where tokens were drawn at random, their processed logits ``[1, t, v]``.
        vocabulary: ``v``, number of token ids.
        longest: most tokens that are taken over.
        do_sample: whether generation samples; logits are of no use when it does not.
    """

    def __init__(self, generator: CandidateGenerator, vocabulary: int, longest: int, do_sample: bool) -> None:
        self.generator = generator
        self.vocabulary = vocabulary
        self.longest = longest
        self.do_sample = do_sample
        self.steps = 0

    def propose(self, text: Text, room: list[int]) -> Draft:
        """Drafts after each row's last token; see :meth:`PartialDraft.propose`."""
        rows: list[torch.Tensor] = []
        logits: list[torch.Tensor | None] = []
        for row in range(text.batch_size):
            start = max(0, -text.base[row])
            ids = text.ids[row : row + 1, start : text.lengths[row]]
            if room[row] == 0:
                rows.append(ids[0, :0])
                logits.append(None)
                continue
            candidates, scores = self.generator.get_candidates(ids)
            if candidates.shape[0] != 1 or not torch.equal(candidates[:, : ids.shape[1]].to(ids.device), ids):
                raise SettingError(
                    f"{type(self.generator).__name__}.get_candidates must return the given ids [1, {ids.shape[1]}] "
                    f"followed by the drafted tokens, got a tensor of shape {list(candidates.shape)}."
                )
            self._check(candidates[0, ids.shape[1] :], scores)
            count = min(room[row], self.longest, candidates.shape[1] - ids.shape[1])
            rows.append(candidates[0, ids.shape[1] : ids.shape[1] + count].to(ids.device))
            logits.append(None if scores is None else scores[0, :count].to(ids.device))
        self.steps += 1
        lengths = [len(tokens) for tokens in rows]
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long, device=text.ids.device)
        for row, drafted in enumerate(rows):
            tokens[row, : len(drafted)] = drafted
        return Draft(tokens=tokens, lengths=lengths, siblings=[], q=self._q(logits, tokens, lengths))

    def _check(self, drafted: torch.Tensor, scores: torch.Tensor | None) -> None:
        name = f"{type(self.generator).__name__}.get_candidates"
        if len(drafted) and not 0 <= int(drafted.min()) <= int(drafted.max()) < self.vocabulary:
            raise SettingError(
                f"{name} returned token ids from {int(drafted.min())} to {int(drafted.max())}, but the model has ids 0 "
                f"to {self.vocabulary - 1}."
            )
        expected = (1, len(drafted), self.vocabulary)
        if scores is not None and tuple(scores.shape) != expected:
            raise SettingError(
                f"{name} returned logits of shape {list(scores.shape)} for {len(drafted)} drafted tokens. Return "
                f"{list(expected)}, the processed logits that each token was drawn from, or None."
            )

    def _q(self, logits: list[torch.Tensor | None], tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor | None:
        known = [scores for scores in logits if scores is not None]
        if not self.do_sample or not known:
            return None
        q = torch.zeros(len(logits), max(lengths), known[0].shape[-1], device=known[0].device)
        for row, scores in enumerate(logits):
            if scores is not None and lengths[row]:
                q[row, : lengths[row]] = scores[: lengths[row]].float().softmax(-1)
            else:
                q[row].scatter_(1, tokens[row, :, None], 1.0)
        return q

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Tells the generator how its tokens fared, in batches of one as its interface has it."""
        if text.batch_size == 1:
            start = max(0, -text.base[0])
            matches = len(verdicts[0].tokens) - 1
            self.generator.update_candidate_strategy(text.prefix(0)[:, start:], logits, matches)

    def finish(self, text: Text) -> None:
        """Nothing to tell: the generator has seen all."""

    def report(self, stats: GenerationStats) -> None:
        """Nothing to say: which blocks run is not known."""
