"""Drafting with part of the model: what all drafts by a :class:`LayerPlan` have in common."""

import math

import torch

from ...batch import Draft, Text, Verdict
from ...errors import SettingError, SettingTypeError
from ...model.forward_pass import ForwardPass
from ...model.head import HeadRows
from ...model.logits import best_tokens, draw_without_replacement
from ...model.plan import LayerPlan
from ...model.transfer import RowNumbers, read, upload
from ...modules.linear_probe import LinearProbe
from ...stats import GenerationStats
from ..growing import DraftStep, GrowingDraft
from ..source import Drafter, Session
from ..stop import FixedLength, LateBound, RunningBound, start


class PlanDrafter(Drafter):
    """Runs the blocks of a plan, and ``head`` in place of the model's own if given; verification starts from the states
    in front of the first altered block. Where a draft is made ``in_one_forward``, its end saves nothing."""

    reads_logits, in_one_forward = False, False

    def __init__(self, session: Session, plan: LayerPlan, head: HeadRows | None = None) -> None:
        _check_probe(session, plan)
        self.session, self.target, self.scorer = session, session.target, session.scorer
        self.plan, self.head = plan, head
        assert session.stop is not None
        self._rule = start(session.stop, session.num_rows, session.longest, session.memory)
        is_fixed, on_gpu = type(session.stop) is FixedLength, self.target.device.type != "cpu"
        self.whole = session.longest if self.in_one_forward and is_fixed else 0
        # A GPU's host does not wait for each token: the full model rejects junk, and what follows an end.
        self._is_blind = on_gpu and is_fixed and (self.scorer.at_once or not session.eos_tokens)
        self._late, asks = None, session.tree is not None or not is_fixed
        if on_gpu and asks and isinstance(self._rule, RunningBound) and self.scorer.prefix_free:
            self._late = LateBound(self._rule, session.longest)
        self._accepted = list[int]()  # tokens of each line of the last draft
        # A verification usually takes the line and siblings of an unsure draft's last token.
        siblings = 1 if session.tree is None else min(session.tree.most, session.vocabulary)
        slots = min(session.longest, session.new_tokens) + siblings
        self.target.cache.reserve(max(slots, session.anatomy.num_layers))

    @torch.no_grad()
    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """Drafts after each row's last token, with the hidden states that verification starts from."""
        roots, prefix = text.last_slots(), self._prefix
        self._rule.begin()
        max_new = max_new if self._late is None else self._late.begin(max_new)
        limit = min(self.session.longest, max(max_new))
        is_read = not (self.scorer.prefix_free and isinstance(self._rule, RunningBound))
        grown = GrowingDraft(text, max_new, write_to_text=is_read)
        feed = text.last_tokens()
        while grown.depth < limit and any(grown.drafting):
            step = self._step(text, feed, roots.ahead(grown.depth), grown.drafting)
            self.steps += 1
            if step.is_sure is not None:
                grown.keep_rows(step.is_sure)
                if not any(grown.drafting):
                    break
            logits = step.logits.to(text.device, torch.float32)
            scores = self.scorer.ahead(text, grown.depth, logits, grown.drafting)
            picks, q = self._pick(scores, self._width(grown, logits, limit))
            grown.add(picks, q, step.prefix_state if prefix else None)
            self._close(grown, text, picks[:, 0], logits, scores, step.state)
            feed = picks[:, :1]
        if self._late is not None:
            self._late.send()
        self._draft = grown.draft(prefix)
        return self._draft

    @property
    def _prefix(self) -> int:
        """The layer whose input states are kept for verification, 0 for none."""
        is_needed = self.target.anatomy.replay and not self.target.takes_as_one(self.session.longest)
        return self.plan.first_altered if is_needed else 0

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        """Runs the drafting part over one or more tokens of each row ``[b, s]``; rows that have ended run along."""
        kept = (self._prefix,) if self._prefix else ()
        run = ForwardPass(self.plan, capture=kept, head_rows=self.head)
        step = self.target.step(feed, cursors, run)
        assert step.logits is not None
        assert step.exit_state is not None
        return DraftStep(step.logits[:, -1], step.exit_state[:, -1], step.captured)

    def _width(self, grown: GrowingDraft, logits: torch.Tensor, limit: int) -> int:
        """How many tokens the next depth gets."""
        if (tree := self.session.tree) is None:
            return 1
        if self._late is not None:
            lowest = self._late.tops[grown.depth] if grown.depth < len(self._late.tops) else 1.0
        else:
            top, rows = logits.softmax(-1).amax(-1), [row for row, wants in enumerate(grown.drafting) if wants]
            top = top if len(rows) == len(top) else top.index_select(0, upload(rows, top.device))
            lowest = read(top.min())[0]
        width = min(tree.width(lowest), logits.shape[-1])
        # The rest of the line has to fit, too.
        room = self.session.cap_by_logit_memory(limit * width) - grown.size - (limit - grown.depth - 1)
        return max(1, min(width, room))

    def _pick(self, scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens ``[b, width]`` for one depth, the one to extend first, and what they were sampled from, ``[b, v]``."""
        if not self.scorer.do_sample:
            return scores.topk(width, dim=-1).indices if width > 1 else best_tokens(scores)[:, None], None
        q = scores.softmax(-1)
        return draw_without_replacement(q, width), q

    def _close(
        self,
        grown: GrowingDraft,
        text: Text,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        scores: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """Finds with one read which of the tokens ``[b]`` count, and which drafts end with them."""
        if self._late is not None:
            top = [] if self.session.tree is None else [logits.softmax(-1).amax(-1)]
            self._late.add(logits, state.to(logits.device), *top)
        if self._late is not None or self._is_blind:
            return grown.close_rows([False] * len(tokens))
        rule, state, eos = self._rule, state.to(logits.device), self.session.eos_tokens
        bound = rule if isinstance(rule, RunningBound) else None
        decided = bound.values(logits, state) if bound is not None else self._asked(text, grown.depth, logits, state)
        highest = [] if bound is not None and self.scorer.prefix_free else [scores.amax(-1)]
        values, drafted, *checked = read(decided, tokens, *highest)
        if bound is None:
            ends = values
        else:
            ends = [value < least for value, least in zip(values, bound.thresholds, strict=True)]
        # NaN logits predict nothing, nor do those of tokens that all are forbidden.
        grown.keep_rows([math.isfinite(value) for value in (checked[0] if checked else values)])
        grown.close_rows([is_last or token in eos for is_last, token in zip(ends, drafted, strict=True)])

    def _asked(self, text: Text, depth: int, logits: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Whether each row's draft ends with its last token, ``[b]``, by a rule that is a function."""
        done = self._rule(text.with_draft(depth), logits, state)
        is_tensor = isinstance(done, torch.Tensor) and done.shape == logits.shape[:1]
        if not is_tensor or done.is_floating_point() or done.is_complex():  # of probabilities no threshold is known
            raise SettingTypeError(
                f"the stop rule {self.session.stop!r} must return a BoolTensor [{len(logits)}], one value per row, got "
                f"{done!r}."
            )
        return done.bool().to(logits.device)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        self._accepted = self._draft.accepted(verdicts)
        if any(self._draft.lengths):
            (self._late or self._rule).update(self._draft.lengths, self._accepted)

    def report(self, stats: GenerationStats) -> None:
        stats.plan = self.plan.picture()


def _check_probe(session: Session, plan: LayerPlan) -> None:
    """Checks that the probe of the stop rule, if it has one, was fitted to the states that it will get."""
    probe = getattr(session.stop, "confidence", None)
    if not isinstance(probe, LinearProbe):
        return
    probe.check(session.knowledge.fingerprint)
    if plan != LayerPlan.early_exit(plan.num_layers, probe.exit_layer):
        raise SettingError(
            f"the probe was fitted to the states of exit layer {probe.exit_layer}, but the draft runs {plan.picture()} "
            f"of the layers. Draft with EarlyExit({probe.exit_layer}), or fit another probe."
        )
