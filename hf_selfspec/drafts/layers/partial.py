"""Drafting with part of the model: what all drafts by a :class:`LayerPlan` have in common."""

import math

import torch

from ...batch import Draft, Text, Verdict
from ...errors import SettingError, SettingTypeError, warn_once
from ...model.forward_pass import ForwardPass
from ...model.head import HeadRows
from ...model.logits import best_tokens, draw_without_replacement
from ...model.plan import LayerPlan
from ...model.transfer import RowNumbers, read, upload
from ...modules.linear_probe import LinearProbe
from ...stats import GenerationStats
from ..growing import DraftStep, GrowingDraft
from ..source import Drafter, Session
from ..stop.adaptive import AdaptiveThreshold
from ..stop.rules import FixedLength, RunningBound, RunningRule, StopRule, start


class PlanDrafter(Drafter):
    """Runs the blocks of a plan, and ``head`` in place of the model's own if given. From ``reuse_from`` tokens on
    verification starts from their states. Where a draft is made ``in_one_forward``, its end saves nothing."""

    reads_logits, in_one_forward = False, False

    def __init__(self, session: Session, plan: LayerPlan, head: HeadRows | None = None) -> None:
        _check_probe(session, plan)
        self.target, self.scorer = session.target, session.scorer
        self.session = session
        self.plan = plan
        self.head = head
        self.reuse_from = 0
        self._running: tuple[StopRule, RunningRule] | None = None
        self._drafted: list[int] = []
        # A verification usually takes the line and siblings of an unsure draft's last token.
        siblings = 1 if session.tree is None else min(session.tree.most, session.vocabulary)
        slots = min(session.longest, session.new_tokens) + siblings
        self.target.cache.reserve(max(slots, session.anatomy.num_layers))

    @torch.no_grad()
    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """Drafts after each row's last token, with the hidden states that verification starts from."""
        draft = self._in_steps(text, max_new)
        self._drafted = draft.lengths
        return draft

    @property
    def _prefix(self) -> int:
        """The layer whose input states are kept for verification, 0 for none."""
        return self.plan.first_altered if self.target.anatomy.replay else 0

    def _in_steps(self, text: Text, max_new: list[int]) -> Draft:
        roots, prefix = text.last_slots(), self._prefix
        limit = min(self.session.longest, max(max_new))
        rule = self._rule(text.batch_size)
        rule.begin()
        # One read per token finds which tokens count and which drafts end, where nothing else has to see that earlier.
        is_line = self.session.tree is None and self.scorer.prefix_free
        bound = rule if is_line and isinstance(rule, RunningBound) and rule.needs_logits_alone else None
        grown = GrowingDraft(text, max_new, write_to_text=bound is None)
        feed = text.last_tokens()
        while grown.depth < limit and any(grown.drafting):
            step = self._step(text, feed, roots.ahead(grown.depth), grown.drafting)
            self.steps += 1
            if step.is_sure is not None:
                grown.keep_rows(step.is_sure)
            logits = step.logits.to(text.ids.device, torch.float32)
            if bound is not None:
                feed = self._add(grown, step, logits, bound)
                continue
            scores = self.scorer.ahead(text, grown.depth, logits, grown.drafting)
            sound, logits, scores = self._sound(grown, logits, scores)
            if not any(grown.drafting):
                break
            width = 1
            if self.session.tree is not None:
                top = _of_rows(grown.drafting, logits.softmax(-1).amax(-1))
                width = min(self.session.tree.width(top), logits.shape[-1])
                # The rest of the line has to fit, too.
                room = self.session.cap_by_logit_memory(limit * width) - grown.size - (limit - grown.depth - 1)
                width = max(1, min(width, room))
            picks, q = self._pick(scores, width)
            grown.add(picks, q, step.prefix_state if prefix else None)
            feed = picks[:, :1]
            ended = self._ended(text, picks[:, 0], logits, step.state.to(logits.device), grown.depth)
            if ended is None:
                grown.close_rows([False] * text.batch_size)
            elif sound is None:
                grown.close_rows(ended.tolist())
            else:
                counts, ends = read(sound, ended)
                grown.keep_rows(counts)
                grown.close_rows(ends)
        return grown.draft(prefix, self.reuse_from)

    def _add(self, grown: GrowingDraft, step: DraftStep, logits: torch.Tensor, bound: RunningBound) -> torch.Tensor:
        """Adds the next token of each line, and returns them, ``[b, 1]``; one read finds which count and which end."""
        picks, q = self._pick(self.scorer.everywhere(logits), 1)
        grown.add(picks, q, step.prefix_state if self._prefix else None)
        eos = self.session.eos_tokens
        if self._length_is_fixed and logits.device.type != "cpu":
            # A read would have to wait; the full model rejects junk.
            grown.close_rows([False] * len(picks))
            return picks
        values, *listed = read(bound.values(logits, step.state), *([picks[:, 0]] if eos else []))
        has_ended = [token in eos for token in listed[0]] if eos else [False] * len(values)
        are_low = [value < least for value, least in zip(values, bound.thresholds, strict=True)]
        grown.keep_rows([math.isfinite(value) for value in values])  # NaN logits predict nothing
        grown.close_rows([is_low or ends for is_low, ends in zip(are_low, has_ended, strict=True)])
        return picks

    def _sound(
        self, grown: GrowingDraft, logits: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Which rows' scores ``[b, v]`` a token can be chosen from, for a later read, else ``None``; logits and scores,
        made finite where needed (float16 overflows). On a CPU the drafts of other rows end at once."""
        on_cpu, sound = scores.device.type == "cpu", None
        if not on_cpu and self._length_is_fixed and self.session.tree is None:
            return None, logits, scores
        highest = scores.amax(-1)
        if on_cpu:
            grown.keep_rows(finite := torch.isfinite(highest).tolist())
            if all(finite):
                return None, logits, scores
        else:
            sound = highest - highest == 0
        whole = scores.nan_to_num()
        return sound, whole if scores is logits else logits.nan_to_num(), whole

    @property
    def _length_is_fixed(self) -> bool:
        return isinstance(self.session.stop, FixedLength) and (self.in_one_forward or not self.session.eos_tokens)

    def _step(self, text: Text, feed: torch.Tensor, cursors: RowNumbers, drafting: list[bool]) -> DraftStep:
        """Runs the drafting part over one or more tokens of each row ``[b, s]``; rows that have ended run along."""
        kept = (self._prefix,) if self._prefix else ()
        run = ForwardPass(self.plan, capture=kept, head_rows=self.head)
        step = self.target.step(feed, cursors, run)
        assert step.logits is not None
        assert step.exit_state is not None
        return DraftStep(step.logits[:, -1], step.exit_state[:, -1], step.captured)

    def _pick(self, scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens ``[b, width]`` for one depth, the one to extend first, and what they were sampled from, ``[b, v]``."""
        if not self.scorer.do_sample:
            return scores.topk(width, dim=-1).indices if width > 1 else best_tokens(scores)[:, None], None
        q = scores.softmax(-1)
        return draw_without_replacement(q, width), q

    def _ended(
        self, text: Text, tokens: torch.Tensor, logits: torch.Tensor, state: torch.Tensor, depth: int
    ) -> torch.Tensor | None:
        """Whether each row's draft ends with its token, ``[b]``; ``None`` if a fixed length alone decides."""
        if self._length_is_fixed:
            return None
        done = self._rule(text.batch_size)(text.with_draft(depth), logits, state)
        is_tensor = isinstance(done, torch.Tensor) and done.shape == tokens.shape
        if not is_tensor or done.is_floating_point() or done.is_complex():  # of probabilities no threshold is known
            raise SettingTypeError(
                f"the stop rule {self.session.stop!r} must return a BoolTensor [{len(tokens)}], one value per row, got "
                f"{done!r}."
            )
        ended = done.bool().to(tokens.device)
        for token in self.session.eos_tokens:
            ended = ended | (tokens == token)
        return ended

    def _rule(self, rows: int) -> RunningRule:
        """The running stop rule; a new one starts when the rule was changed."""
        stop = self.session.stop
        assert stop is not None
        if self._running is None or self._running[0] is not stop:
            self._running = stop, start(stop, rows, self.session.longest, self.session.memory)
        return self._running[1]

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        if any(self._drafted):
            accepted = [sum(node >= 0 for node in verdict.nodes) for verdict in verdicts]
            self._rule(text.batch_size).update(self._drafted, accepted)
        self._drafted = []

    def report(self, stats: GenerationStats) -> None:
        stats.plan = self.plan.picture()


def _check_probe(session: Session, plan: LayerPlan) -> None:
    """Checks that the probe of the stop rule, if it has one, was fitted to the states that it will get."""
    rule, do_sample = session.stop, session.scorer.do_sample
    probe = getattr(rule.rule if isinstance(rule, AdaptiveThreshold) else rule, "confidence", None)
    if not isinstance(probe, LinearProbe):
        return
    probe.check(session.knowledge.fingerprint)
    if plan != LayerPlan.early_exit(plan.num_layers, probe.exit_layer):
        raise SettingError(
            f"the probe was fitted to the states of exit layer {probe.exit_layer}, but the draft runs {plan.picture()} "
            f"of the layers. Draft with EarlyExit({probe.exit_layer}), or fit another probe."
        )
    if probe.do_sample != do_sample:
        modes = {True: "sampled tokens", False: "greedy text"}
        warn_once(
            f"the probe was fitted for {modes[probe.do_sample]} but is used for {modes[do_sample]}: it may mislead."
        )


def _of_rows(wanted: list[bool], values: torch.Tensor) -> torch.Tensor:
    if all(wanted):
        return values
    return values.index_select(0, upload([row for row, wants in enumerate(wanted) if wants], values.device))
