"""Drafting with part of the model: what every draft that is a :class:`LayerPlan` does while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..errors import SettingTypeError
from ..grammar.rows import Constraint
from ..model.partial import LayerPlan
from ..model.target import Target
from ..search.costs import MANY, Stopwatch
from ..stop.fitted import check_fitted_rule
from ..stop.rules import FixedLength, RunningRule, StopRule, start
from ..transfer import RowNumbers, read
from ..types import Draft, GenerationStats, Text, Verdict
from ..verify.sampling import draw_without_replacement
from ..verify.scoring import Scorer
from .source import Limits, Session


@dataclass
class DraftStep:
    """What the part that drafts predicts after one token.

    Attributes:
        logits: ``[b, v]``.
        state: ``[b, d]`` the state behind them, for stop rules.
        prefix_state: ``[b, n, d]`` the states from which verification can start, ``None`` where it cannot.
        is_sure: for each row whether it proposes a token; all do by default.
    """

    logits: torch.Tensor
    state: torch.Tensor
    prefix_state: torch.Tensor | None
    is_sure: list[bool] | None = None


class PartialDraft(CandidateGenerator):
    """Proposes tokens by running part of the target model.

    In this package's loop :meth:`propose` is called on the shared cache. As a ``CandidateGenerator`` of transformers it
    keeps a cache of its own and serves any loop that calls :meth:`get_candidates`.

    Args:
        target: the model with the cache to use.
        plan: which blocks run.
        limits: stop rule, longest draft, tree.
        scorer: logits processors and the decoding mode.

    Attributes:
        plan, limits: as given.
        skips_forced: tokens that grammars force are drafted without a step, so that the next one takes several.
        reuse_from: drafted tokens from which on verification starts from their states behind the exact prefix.
    """

    skips_forced = True

    def __init__(self, target: Target, plan: LayerPlan, limits: Limits, scorer: Scorer) -> None:
        self.target = target
        self.plan = plan
        self.limits = limits
        self.scorer = scorer
        self.constraint = Constraint(scorer.grammars, limits.eos_tokens)
        self.steps = 0
        self.reuse_from = 0
        self._seen: list[int] = []
        self._running: tuple[StopRule, RunningRule] | None = None
        self._drafted: list[int] = []

    @classmethod
    def of(cls, session: Session, plan: LayerPlan, limits: Limits, name: str) -> PartialDraft:
        """The draft of one generation.

        Args:
            session: the generation.
            plan: which blocks run.
            limits: of drafts.
            name: of the source, for errors.

        Raises:
            SettingError: the stop rule was fitted to other states.
        """
        check_fitted_rule(session.stop, plan, name, session.scorer.do_sample, session.knowledge.fingerprint)
        draft = cls(session.target, plan, limits, session.scorer)
        draft.reserve(session)
        return draft

    def reserve(self, session: Session, least: int = 0) -> None:
        """Reserves cache slots for drafts behind the text, at least so many."""
        target = self.target
        slots = max(self.limits.slots(session.new_tokens, session.vocabulary), least, target.anatomy.num_layers)
        target.cache.reserve(slots)

    @torch.no_grad()
    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """Drafts after each row's last token.

        Args:
            text: the batch; what each row's KV holds is everything before its last token.
            max_new: for each row the most tokens wanted (0: the row rides along).

        Returns:
            The draft, with the hidden states that verification starts from.
        """
        b = text.batch_size
        roots = text.last_slots()
        prefix = self.plan.first_altered if self.target.anatomy.replay else 0
        limit = min(self.limits.longest, max(max_new))
        drafting = [count > 0 for count in max_new]
        lengths = [0] * b
        self._rule(b).begin()
        waiting = [text.last_tokens()]  # what the part has not seen yet
        line: list[torch.Tensor] = []
        beside: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        qs: list[torch.Tensor] = []
        reach = torch.ones(b, device=text.ids.device)
        while len(line) < limit and any(drafting):
            depth = len(line)
            if (forced := self._forced(text, depth, drafting, qs)) is not None:
                lengths = [length + on for length, on in zip(lengths, drafting, strict=True)]
                text.write_draft(forced[:, 0], depth)
                line.append(forced[:, 0])
                beside.append(forced[:, 1:])
                waiting.append(forced)
                drafting = [on and depth + 1 < wanted for on, wanted in zip(drafting, max_new, strict=True)]
                continue
            first = depth + 1 - len(waiting)
            step = self._step(text, torch.cat(waiting, dim=1), roots.ahead(first), drafting)
            self.steps += 1
            if step.is_sure is not None:
                drafting = [on and sure for on, sure in zip(drafting, step.is_sure, strict=True)]
                if not any(drafting):
                    break
            # A draft that overflows (float16) has nothing to say, nor has one where processors forbid everything; the
            # full model goes on from there.
            sound, logits = _sound(step.logits.to(text.ids.device, torch.float32))
            scores = self.scorer.ahead(text, depth, logits, drafting)
            if not self.scorer.prefix_free:
                allowed, scores = _sound(scores)
                sound = sound & allowed
            width = 1
            if self.limits.tree is not None:
                top = logits.softmax(-1).topk(min(self.limits.tree.most, logits.shape[-1])).values
                here = slice(None) if all(drafting) else [row for row, on in enumerate(drafting) if on]
                width = min(self.limits.tree.width(top[here], reach[here]), top.shape[-1])
                reach = reach * top[:, 0]
            picks = self._pick(scores, width, qs)
            text.write_draft(picks[:, 0], depth)
            line.append(picks[:, 0])
            beside.append(picks[:, 1:])
            if prefix:
                assert step.prefix_state is not None
                states.append(step.prefix_state)
            waiting = [picks[:, :1]]
            ended = self._ended(text, picks[:, 0], logits, step.state.to(logits.device), depth)
            counts, ends = _outcome(sound, ended)
            lengths = [length + (on and new) for length, on, new in zip(lengths, drafting, counts, strict=True)]
            drafting = [
                on and new and not end and depth + 1 < wanted
                for on, new, end, wanted in zip(drafting, counts, ends, max_new, strict=True)
            ]
        self._drafted = lengths
        return self._draft(text, line, beside, qs, states, lengths, prefix)

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        """Runs the part that drafts over one more token of each row.

        Args:
            text: the batch.
            feed: ``[b, 1]`` the tokens; ``[b, n]`` where those before were forced, see :attr:`skips_forced`.
            cursors: the slots of the first of them.
            drafting: rows whose drafts go on; the others ride along.
        """
        prefix = self.plan.first_altered if self.target.anatomy.replay else -1
        step = self.target.step(feed, cursors, self.plan, capture=prefix or -1)
        assert step.logits is not None
        assert step.exit_state is not None
        return DraftStep(step.logits[:, -1], step.exit_state[:, -1], step.prefix_state)

    def _forced(self, text: Text, depth: int, drafting: list[bool], qs: list[torch.Tensor]) -> torch.Tensor | None:
        """``[b, 1]`` the tokens at one depth where grammars force all rows, which then need no step; else ``None``."""
        tokens = self.constraint.forced(text, depth, drafting) if self.skips_forced else None
        if tokens is None:
            return None
        forced = torch.tensor(tokens, device=text.ids.device)[:, None]
        if self.scorer.do_sample:
            qs.append(
                torch.zeros(len(tokens), self.constraint.vocabulary, device=forced.device).scatter_(1, forced, 1.0)
            )
        return forced

    def _pick(self, scores: torch.Tensor, width: int, qs: list[torch.Tensor]) -> torch.Tensor:
        """``[b, width]`` tokens for one depth, the one to extend first."""
        if not self.scorer.do_sample:
            return scores.topk(width, dim=-1).indices if width > 1 else scores.argmax(-1, keepdim=True)
        q = scores.softmax(-1)
        qs.append(q)
        return draw_without_replacement(q, width)

    def _ended(
        self, text: Text, tokens: torch.Tensor, logits: torch.Tensor, state: torch.Tensor, depth: int
    ) -> torch.Tensor | None:
        """``[b]`` whether each row's draft ends with its token, ``None`` if a fixed length alone decides."""
        eos_tokens = self.limits.eos_tokens
        if isinstance(self.limits.stop, FixedLength) and not eos_tokens:
            return None
        done = self._rule(text.batch_size)(text.with_draft(depth + 1), logits, state)
        if not isinstance(done, torch.Tensor) or done.shape != tokens.shape or not _is_countable(done):
            raise SettingTypeError(
                f"the stop rule {self.limits.stop!r} must return a BoolTensor [{len(tokens)}], one value per row, got "
                f"{done!r}."
            )
        ended = done.bool().to(tokens.device)
        for token in eos_tokens:
            ended = ended | (tokens == token)
        return ended

    def _rule(self, rows: int) -> RunningRule:
        """The stop rule as it runs; another one begins when the rule is changed."""
        stop = self.limits.stop
        if self._running is None or self._running[0] is not stop:
            self._running = stop, start(stop, rows, self.limits.longest, self.limits.memory)
        return self._running[1]

    def _draft(
        self,
        text: Text,
        line: list[torch.Tensor],
        beside: list[torch.Tensor],
        qs: list[torch.Tensor],
        states: list[torch.Tensor],
        lengths: list[int],
        prefix: int,
    ) -> Draft:
        if not (t := max(lengths)):
            return Draft.none(text)
        line, beside, qs = line[:t], beside[:t], qs[:t]
        parents: list[list[int]] | None = None
        if any(tokens.shape[1] for tokens in beside):
            # Siblings stand behind the line, those of its first token first.
            places = list(range(len(line)))
            for depth, tokens in enumerate(beside):
                places += [depth] * tokens.shape[1]
            parents = [[parent if parent < length else -1 for parent in places] for length in lengths]
        reused = bool(states) and t >= self.reuse_from
        return Draft(
            tokens=torch.cat([torch.stack(line, dim=1), *beside], dim=1),
            lengths=lengths,
            parents=parents,
            q=torch.stack(qs, dim=1) if qs else None,
            states=torch.cat(states, dim=1)[:, :t] if reused else None,
            prefix=prefix if reused else 0,
        )

    # Costs -------------------------------------------------------------------------------------------------------

    def measure(
        self, text: Text, stopwatch: Stopwatch, repeats: int, may_run: Callable[[int], bool] | None = None
    ) -> bool:
        """Times forwards at the end of the text, see :meth:`Stopwatch.measure`.

        What they write into the cache is what is there, or scratch.
        """
        ends = [root + 1 for root in text.last_slots()]
        starts, ids = text.tokens_before(ends, MANY, self.target.first_slots())
        steps, usual = self.steps, (self.plan, self.limits, self.constraint)
        self.plan, self.limits = stopwatch.early, replace(self.limits, tree=None)
        self.constraint = Constraint()  # steps are to be timed
        devices = [] if ids.device.type == "cpu" else [ids.device]
        with torch.random.fork_rng(devices, device_type=ids.device.type if devices else "cuda"):
            complete = stopwatch.measure(
                self.target,
                ids,
                starts,
                text.last_slots(),
                repeats,
                lambda: PartialDraft.propose(self, text, [1] * text.batch_size),
                may_run,
            )
        self.steps, self._drafted, (self.plan, self.limits, self.constraint) = steps, [], usual
        return complete

    # Transformers' own loops -------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates for transformers' assisted generation (one row).

        Only drafts whose blocks all lie before the first altered layer (early exit) can do so: their KV is exact, and
        kept here.

        Args:
            input_ids: ``[1, s]`` the text so far.

        Returns:
            ``[1, s + t]`` the text with the draft, and ``[1, t, v]`` the scores behind it (``None`` when greedy).
        """
        ids = input_ids[0].tolist()
        known = self._seen
        same = next((i for i, (a, c) in enumerate(zip(known, ids, strict=False)) if a != c), min(len(known), len(ids)))
        start = min(same, len(ids) - 1)
        limit = self.target.anatomy.position_limit
        count = self.limits.longest if limit is None else max(0, min(self.limits.longest, limit - len(ids)))
        text = Text.of(input_ids, [0], count)
        self.target.last_slots = text.last_slots()
        with self.target.prepared():
            if start < len(ids) - 1:
                self.target.step(input_ids[:, start:-1], [start], self.plan)
            draft = self.propose(text, [count])
        t = draft.lengths[0]
        # What the draft ran through the early layers: the text and all drafted tokens but the last.
        self._seen = text.ids[0, : len(ids) + max(t - 1, 0)].tolist()
        scores = None if draft.q is None else draft.q.log()
        return torch.cat([input_ids, draft.tokens[:, :t]], dim=1), scores

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Tells the stop rule how the draft fared."""
        if any(self._drafted):
            accepted = [sum(node >= 0 for node in verdict.nodes) for verdict in verdicts]
            self._rule(text.batch_size).update(self._drafted, accepted)
            self._drafted = []

    def finish(self, text: Text) -> None:
        """Nothing to learn: which blocks run is fixed."""

    def report(self, stats: GenerationStats) -> None:
        """Shows which blocks run."""
        stats.plan = self.plan.picture()

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to learn: which blocks run is fixed."""


def _sound(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[b]`` which rows of ``[b, v]`` can be chosen from, and the values, zeros in other rows."""
    sound = torch.isfinite(values.amax(-1))
    return sound, values.masked_fill(~sound[:, None], 0.0)


def _outcome(sound: torch.Tensor, ended: torch.Tensor | None) -> tuple[list[bool], list[bool]]:
    """Whether each row's token counts, and whether its draft ends with it.

    Args:
        sound: ``[b]`` whether there was something to choose from.
        ended: ``[b]``, or ``None`` where a fixed length alone decides. Then a CPU alone looks, for which that is free;
            elsewhere the full model finds junk out.
    """
    if ended is None:
        fine = sound.tolist() if sound.device.type == "cpu" else [True] * len(sound)
        return fine, [False] * len(fine)
    counts, ends = read(sound, ended)
    return counts, ends


def _is_countable(values: torch.Tensor) -> bool:
    """Whether these are booleans or whole numbers; of a probability it is not known where it means yes."""
    return not values.is_floating_point() and not values.is_complex()
