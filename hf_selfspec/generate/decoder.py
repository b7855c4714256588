"""The decode loop: prefill, then draft, verify, commit until every row is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from ..batch import Draft, Verdict
from ..drafts.scoring import Scorer, check_highest
from ..drafts.source import Drafter
from ..errors import UnsupportedOptionError, brief, warn_once
from ..model.attention.exact import MOST_TOKENS
from ..model.cache.handover import hand_back
from ..model.forward_pass import ForwardPass
from ..model.inputs import Inputs
from ..model.kernels.experts import decoding_experts
from ..model.layout import Tokens
from ..model.logits import Logits, Tops
from ..model.module_tools import is_tensor_parallel, switches_of
from ..model.target import Target, prefill
from ..model.transfer import TIMED, is_out_of_memory, moment, seconds_between
from .output import Output
from .walk import verify, verify_in_step

TIMED_ROUNDS = 16  # of so many a GPU times one by events, beside the first few


@dataclass
class Decoder:
    """One generation."""

    target: Target  # the model, prepared
    inputs: Inputs  # the laid-out prompts
    output: Output  # what was generated, which grows
    draft: Drafter  # proposes tokens
    scorer: Scorer  # logits processors
    vocabulary: int  # number of tokens that the model knows; logits may cover fewer
    checks_logits: bool = True  # NaN and infinite logits are an error; otherwise they are treated as in plain generate
    keeps_rows: bool = True  # rows that have ended stay in forwards and cache, since the caller gets the cache back
    # Given whether this process is unfinished, returns whether any process is; all of them run as many forwards.
    waits_for: Callable[[bool], bool] | None = None

    def __post_init__(self) -> None:
        self.text, self.stopper, self.stats = self.output.text, self.output.stopper, self.output.stats
        has_rows, self._ran_out = self.text.batch_size > 1, False
        # Plain generate goes on with rows that end without an end token, until the longest ends.
        go_on = has_rows and self.stopper.has_others and not self.stopper.has_eos
        # The windows of such rows cannot be taken back to where these end.
        is_lost = go_on and self.keeps_rows and self.target.cache.window is not None
        self._rows_level = self.output.in_step or is_lost
        # Whether tokens are a plain argmax of the logits.
        self._is_greedy = self.scorer.is_greedy and not self.output.in_step and self.output.scores is None
        # What others may write, or change of the model, between two tokens: the text with new ones, and what runs.
        self._ids: torch.Tensor | None = None
        self._switches = switches_of(self.target.model) if self.output.in_step else None

    def run(self) -> torch.Tensor:
        """Generates and returns the ids ``[b, s]`` as ``generate`` does."""
        started, begun = perf_counter(), moment(self.text.device)
        drafter = self.draft
        for grammar in self.scorer.grammars:
            grammar.begin(self.text.ids[:, : self.text.prompt_width].clone(), self.vocabulary)
        last_logits = prefill(self.target, self.inputs).to(self.text.device, torch.float32)
        for grammar in self.scorer.grammars:
            grammar.fit(last_logits.shape[-1])
        logits, prefilled = Logits(last_logits[:, None]), moment(last_logits.device)
        self._width = logits.vocabulary
        verdicts = self._judge(Draft.none(self.text), logits)
        self.stats.prefill_seconds = seconds_between(begun, prefilled)
        self._commit(Draft.none(self.text), verdicts, logits)
        with decoding_experts(self.target.model, self.target.is_exact):
            if self.waits_for is not None:
                self.waits_for(True)  # as plain generate, on other processes, does before the prefill's token
            while self._is_needed():
                if self.output.is_finished:
                    self._run_out()
                    continue
                self._round()
                self.stats.timeline.append((self.stats.tokens, perf_counter() - started))
            if self.output.streamer is not None:
                self.output.streamer.end()
            ids = self.output.ids()
            for shared in () if self.output.in_step else self.stopper.shared:
                shared.finish(ids.shape[1])
            ended = perf_counter()
            # Processors do not get the last token.
            processed = self.output.shown(ids.shape[1] - self.text.prompt_width - 1)
            with self._surviving():
                for grammar in self.scorer.grammars:
                    grammar.finish(processed)
                self.draft.finish(self.text)
            self.stats.search_seconds += perf_counter() - ended
        self.stats.draft_steps = drafter.steps
        self.stats.forward_seconds = self.target.forward_seconds
        self.stats.total_seconds = perf_counter() - started
        self.stats.plan = self.target.full_plan.picture()
        with self._surviving():
            drafter.report(self.stats)
        return ids

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Lets the call go on without drafts and learning where memory runs out in the block, or where anything fails
        after the text is whole: the drafter may have seen only half of a round. In tensor-parallel models memory that
        runs out is an error, since all processes have to run the same forwards."""
        try:
            yield
        except Exception as error:  # users write drafters, too
            can_go_on = is_out_of_memory(error) and not is_tensor_parallel(self.target.model)
            if not (self.output.is_finished or can_go_on):
                raise
            warn_once(f"a call went on without drafts and learning: {brief(repr(error))}", ignore_numbers=True)
            self._draft_no_more()
            self.target.cache.stay()

    def _draft_no_more(self) -> None:
        self.draft = Drafter()
        self.draft.reads_logits = False

    def _is_model_as_before(self) -> bool:
        """Whether no processor, criterion or streamer has changed the model since this was asked last."""
        if self._switches is None:
            return True
        before, self._switches = self._switches, switches_of(self.target.model)
        if before[0] != self._switches[0]:  # what runs now may not treat several tokens as it treats one
            self._draft_no_more()
            self.target.graphs, self.target.cache.has_unknown_readers = None, True
        return before == self._switches

    def _show(self, tokens: list[int], from_draft: list[bool]) -> bool:
        self.output.put(tokens, from_draft)
        return self._is_model_as_before()

    def _is_needed(self) -> bool:
        """Whether there is another forward, for this process or for others that are unfinished."""
        unfinished = not self.output.is_finished
        if self.waits_for is None:
            return unfinished
        return self.waits_for(unfinished or (self.keeps_rows and self.output.ends_unevenly() and not self._ran_out))

    def _round(self) -> None:
        device, stats, started = self.text.device, self.stats, perf_counter()
        # A GPU's events take its host time, so that rounds between those that are timed are divided like the last one.
        is_timed = device.type not in TIMED or stats.verify_passes < 4 or stats.verify_passes % TIMED_ROUNDS == 0
        clock = (lambda: moment(device)) if is_timed else perf_counter
        draft, tops, begun = Draft.none(self.text), None, clock()
        with self._surviving():
            draft = self.draft.propose(self.text, self._max_new())
        drafted = clock()
        logits = self._verify_pass(draft)
        verified = clock()
        with self._surviving():
            tops = None if (look := self.draft.look) is None else look(logits)
        looked = clock()
        # Here the host waits for the device, for the only time in a round unless drafting waits, too. The device's
        # times are known from here on.
        verdicts = self._judge(draft, logits, tops)
        tokens, seconds = stats.tokens, perf_counter() - started
        if is_timed:
            pairs = (begun, drafted), (drafted, verified), (verified, looked)
            self._timed = seconds, [seconds_between(*pair) for pair in pairs]
        drafting, verifying, looking = (phase * (seconds / self._timed[0]) for phase in self._timed[1])
        stats.draft_seconds += drafting
        stats.verify_seconds += verifying
        stats.verify_passes += 1
        stats.drafted += sum(draft.lengths)
        stats.rounds += self.output.done.count(False)
        self._commit(draft, verdicts, logits)
        stats.round_sizes.append((draft.size, stats.tokens - tokens))
        committed = perf_counter()
        with self._surviving():
            self.draft.update(self.text, verdicts, logits.of_all.float() if self.draft.reads_logits else None)
        stats.search_seconds += perf_counter() - committed + looking
        self.target.end_round()

    def _verify_pass(self, draft: Draft) -> Logits:
        """The full model's logits at each row's last token and at each drafted one."""
        text, target = self.text, self.target
        last, listed, device = [row[-1] for row in text.new if row], draft.listed, text.device
        nodes = draft.tree(last)
        tokens: Tokens
        on_cpu = target.active_rows is None and target.device == device == torch.device("cpu")
        if listed is not None and last and draft.states is None and (target.graphs is not None or on_cpu):
            tokens = [[token, *row] for token, row in zip(last, listed, strict=True)]
        else:
            tokens = text.last_tokens()
            tokens = torch.cat([tokens, draft.on(device, nodes)], dim=1) if draft.size else tokens
        if target.is_exact and draft.size >= MOST_TOKENS:
            raise UnsupportedOptionError(f"SelfSpec(exact=True) takes drafts below {MOST_TOKENS} tokens: {draft.size}.")
        roots = text.last_slots()
        # The lower layers' recurrent states would have to hold a sibling's ancestors, which ran in another forward.
        can_start_later = nodes is None or not target.anatomy.is_recurrent
        can_start_later &= all(layer >= draft.prefix for layer in target.verified_layers)
        ready = 0 if draft.states is None else draft.states.shape[1]
        can_start_later &= ready > draft.size or not target.takes_as_one(draft.size)
        start, states = (draft.prefix, draft.states) if can_start_later and draft.states is not None else (0, None)
        if states is not None and ready <= draft.size:
            assert isinstance(tokens, torch.Tensor)
            lower = target.step(
                tokens[:, ready:],
                roots if nodes is not None else roots.ahead(ready),
                ForwardPass(target.full_plan, stop=draft.prefix),
                nodes,
                ready if nodes is not None else 0,
            ).captured
            assert lower is not None
            states = torch.cat([states, lower], dim=1)
        looks = self.draft.look is not None
        keeps = self.draft.reads_logits or self.output.logits is not None or not self._is_greedy
        needs = ("captured", "logits") if keeps else ("captured",)
        run = target.verification(
            start=start, state=states, needs=needs, chooses=self._is_greedy or looks, looks=looks, spreads=False
        )
        step = target.step(tokens, roots, run, nodes)
        target.verified = step.captured
        if step.logits is None:
            return Logits(None, None, step.told, (text.batch_size, draft.size + 1, self._width))
        # 16-bit logits have the argmax of their float32 copies, which take more memory, but a CPU is faster with them.
        as_they_are = self._is_greedy and device.type != "cpu" and step.logits.itemsize < 4
        values = step.logits.to(device, None if as_they_are else torch.float32)
        return Logits(values, target.active_rows, step.told)

    def _judge(self, draft: Draft, logits: Logits, tops: Tops | None = None) -> list[Verdict]:
        common = self.scorer, self.stopper, self.output.done
        checks = self.checks_logits and not self.scorer.repairs  # ``remove_invalid_values``
        whose = self.target.anatomy.model_name if checks else None
        if self.output.in_step:
            if whose is not None:
                check_highest(logits.of_all.amax(-1).flatten().tolist(), whose)
            of_output = self.output.steps, self.output.pad_token
            verdicts, self._ids = verify_in_step(self.text, draft, logits.of_all, *common, *of_output, self._show)
            return verdicts
        return verify(self.text, draft, logits, *common, self.output.scores, whose, tops)

    def _commit(self, draft: Draft, verdicts: list[Verdict], logits: Logits) -> None:
        # Where rows cannot be at different lengths, all advance by the shortest acceptance; what is cut off is sampled
        # again, so this is exact too.
        done = self.output.done
        open_rows = [verdict for verdict, is_done in zip(verdicts, done, strict=True) if not is_done]
        shortest = min((len(verdict.tokens) for verdict in open_rows), default=0)
        moves, new = list[tuple[int, int, int]](), [list[int]() for _ in verdicts]
        roots = self.text.last_slots()
        for row, verdict in enumerate(verdicts):
            if done[row]:
                if self._rows_level:
                    new[row] = [self.output.pad_token] * shortest
                continue
            count = shortest if self._rows_level else len(verdict.tokens)
            for depth, node in enumerate(verdict.nodes[:count], start=1):
                if node > depth:
                    moves.append((row, roots[row] + node, roots[row] + depth))
            new[row] = self.output.take(row, verdict, count, logits, draft.line(row))
        self.output.append(new)
        if self._ids is not None:
            self.text.ids[:, : self._ids.shape[1]], self._ids = self._ids, None
        self.target.commit(self.text.last_slots(), moves)
        self.output.stream()
        if not (self.keeps_rows or self.output.in_step):
            self.target.leave(self.output.done)

    def _max_new(self) -> list[int]:
        """Tokens of each row worth drafting: those that it may still get, minus the one that verification adds."""
        counts = [0 if done else self.stopper.max_new(self.text, row) - 1 for row, done in enumerate(self.output.done)]
        if (limit := self.target.anatomy.position_limit) is None:
            return counts
        return [max(0, min(count, limit - 1 - root)) for count, root in zip(counts, self.target.roots, strict=True)]

    def _run_out(self) -> None:
        """Runs the last tokens of rows that have ended before others, as plain ``generate`` does."""
        run = self.target.verification(keep=1, spreads=False)
        self.target.step(self.text.last_tokens(), self.text.last_slots(), run)
        self._ran_out = True

    def hand_back(self, cache: Any) -> None:
        """Fills the cache that ``generate`` returns, with everything but the last token."""
        if self.output.ends_unevenly() and not self._ran_out:
            self._run_out()
        hand_back(self.target.cache, cache, self.inputs.prompt, self.text.prompt_width, self.output.counts())
