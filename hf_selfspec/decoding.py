"""The decode loop: prefill, then draft, verify, commit until every row is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .batch import Draft, Text, Verdict, by_step
from .draft.source import FixedDrafter
from .errors import UnsupportedOptionError, brief, warn_once
from .model.exact import MOST_TOKENS
from .model.experts import decoding_experts
from .model.handover import hand_back, run_out
from .model.inputs import Inputs
from .model.layout import TreeLayout
from .model.logits import Logits, Tops
from .model.modules import is_tensor_parallel
from .model.partial import ForwardPass
from .model.prefill import prefill
from .model.prompt import CACHE_NAME
from .model.target import Target
from .model.transfer import is_out_of_memory, moment, seconds_between
from .stats import GenerationStats
from .verify.in_step import verify_in_step
from .verify.scoring import Scorer, check_highest
from .verify.stopping import Stopper
from .verify.walk import verify

# Devices on which an argmax over a vocabulary is slow inside compiled graphs.
SLOW_CHOICES = ("cpu",)


@dataclass
class Decoder:
    """One generation."""

    target: Target  # the model, prepared
    inputs: Inputs  # the laid-out prompts
    text: Text  # the ids, growing
    draft: FixedDrafter  # proposes tokens
    scorer: Scorer  # logits processors
    stopper: Stopper  # stopping criteria
    config: GenerationConfig  # what is returned besides the ids
    pad_token: int  # id for rows that have ended
    vocabulary: int  # number of tokens that the model knows; logits may cover fewer
    streamer: BaseStreamer | None = None  # receives each token once all rows have it
    checks_logits: bool = True  # NaN and infinite logits are an error; otherwise they are treated as in plain generate
    is_lossless: bool = True  # drafts do not change the output
    keeps_rows: bool = True  # rows that have ended stay in forwards and cache, since the caller gets the cache back
    # Given whether this process is unfinished, returns whether any is, where all have to run as many forwards.
    waits_for: Callable[[bool], bool] | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)

    def __post_init__(self) -> None:
        b = self.text.batch_size
        self._ended: list[int | None] = [None] * b
        self._done = [False] * b  # rows that get no more tokens
        self._tokens: list[list[int]] = [[] for _ in range(b)]  # generated, as the host knows them
        self._streamed, self._ran_out = 0, False
        stateful = (*self.scorer.stateful, *self.stopper.stateful)
        self._in_step, self._keeps_states = bool(stateful), self.keeps_rows and self.target.anatomy.is_recurrent
        # States and windows of rows that go on for others cannot be taken back to where those end.
        is_lost = self.keeps_rows and (self._keeps_states or self.target.cache.window is not None)
        goes_on = is_lost and b > 1 and self.stopper.reads_text and not self.stopper.has_eos
        self._together = self._in_step or self.target.padding is not None or goes_on
        returned = self.config.return_dict_in_generate
        scores, logits = returned and self.config.output_scores, returned and self.config.output_logits
        # For each row and token scores and logits [v], or for each token the scores [b, v] where rows advance together.
        self._scores: list[list[torch.Tensor]] | None = [[] for _ in range(b)] if scores and not self._in_step else None
        self._steps: list[torch.Tensor] | None = [] if scores and self._in_step else None
        self._logits: list[list[torch.Tensor]] | None = [[] for _ in range(b)] if logits else None
        # Whether tokens are a plain argmax of the logits.
        self._is_greedy = self.scorer.is_greedy and not stateful and self._scores is None
        if b > 1:
            self.stats.together_for = ", ".join(stateful)
        self.stats.from_draft = [[] for _ in range(b)]

    def run(self) -> torch.Tensor:
        """Generates and returns the ids ``[b, s]`` as ``generate`` does."""
        started, begun = perf_counter(), moment(self.text.ids.device)
        nothing, drafter = Draft.none(self.text), self.draft
        for grammar in self.scorer.grammars:
            grammar.begin(self.text.ids[:, : self.text.prompt_width].clone(), self.vocabulary)
        found = prefill(self.target, self.inputs).to(self.text.ids.device, torch.float32)
        for grammar in self.scorer.grammars:
            grammar.fit(found.shape[-1])
        logits, prefilled = Logits(found[:, None]), moment(found.device)
        verdicts = self._judge(nothing, logits)
        self.stats.prefill_seconds = seconds_between(begun, prefilled)
        self._commit(verdicts, logits)
        with decoding_experts(self.target.model):
            if self.waits_for is not None:
                self.waits_for(True)  # processes that plain generate serves ask before they take the prefill's token
            while self._is_needed():
                if self._is_finished():
                    self._run_out()
                    continue
                self._round()
                self.stats.timeline.append((self.stats.tokens, perf_counter() - started))
            if self.streamer is not None:
                self.streamer.end()
            ids = self._output_ids()
            ended = perf_counter()
            last = ids.shape[1] - self.text.prompt_width - 1  # which processors do not get to see
            seen = [known[: min(self.generated(row), last)] for row, known in enumerate(self._tokens)]
            with self._surviving():
                for grammar in self.scorer.grammars:
                    grammar.finish(seen)
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
        """Lets the call go on without drafts and learning where memory runs out in the block, or the text is whole: a
        drafter that was interrupted may know half of a round. Processes that share forwards have to run the same."""
        try:
            yield
        except Exception as error:  # drafters are the user's, too
            goes_on = is_out_of_memory(error) and self.is_lossless and not is_tensor_parallel(self.target.model)
            if not (self._is_finished() or goes_on):
                raise
            warn_once(f"a call went on without drafts and learning: {brief(repr(error))}", ignore_numbers=True)
            self.draft = FixedDrafter()
            self.draft.reads_logits = False
            self.target.cache.stay()

    def _is_needed(self) -> bool:
        """Whether there is another forward, for this process or for others that are unfinished."""
        unfinished = not self._is_finished()
        if self.waits_for is None:
            return unfinished
        return self.waits_for(unfinished or (self.keeps_rows and self._end_unevenly() and not self._ran_out))

    def _is_finished(self) -> bool:
        return all(self._done)

    def _end_unevenly(self) -> bool:
        """Whether a row's text is shorter than the others', so that the cache to hand back needs a forward over it."""
        counts = [self.generated(row) for row in range(self.text.batch_size)]
        return min(self.text.lengths) < self.text.prompt_width + max(counts)

    def _round(self) -> None:
        pads = self._together and self._keeps_states and any(self._done)  # which states take in, a token at a time
        max_new = [0 if done or pads else self._max_new(row) for row, done in enumerate(self._done)]
        begun = moment(device := self.text.ids.device)
        draft, along = Draft.none(self.text), None
        with self._surviving():
            draft = self.draft.propose(self.text, max_new)
        drafted = moment(device)
        logits = self._verify_pass(draft)
        verified = moment(device)
        with self._surviving():
            along = None if (look := self.draft.look) is None else look(logits)
        looked = moment(device)
        # The wait of a round, the only one where drafts need none: from here on the device's times are known.
        verdicts = self._judge(draft, logits, along)
        self._count(draft, seconds_between(begun, drafted), seconds_between(drafted, verified))
        tokens = self.stats.tokens
        self._commit(verdicts, logits)
        self.stats.round_sizes.append((draft.size, self.stats.tokens - tokens))
        committed = perf_counter()
        with self._surviving():
            self.draft.update(self.text, verdicts, logits.of_all.float() if self.draft.reads_logits else logits.found)
        self.stats.search_seconds += perf_counter() - committed + seconds_between(verified, looked)
        self.target.end_round()

    def _verify_pass(self, draft: Draft) -> Logits:
        """The full model's logits at each row's last token and at each drafted one."""
        text, target = self.text, self.target
        # Faster outside of graphs on a CPU: 49 µs against 247 for 8 x 49,152 logits (one thread of an AMD EPYC).
        chooses = self._is_greedy and text.ids.device.type not in SLOW_CHOICES
        nodes = None if draft.parents is None else TreeLayout.of_tree(draft.parents, draft.listed)
        tokens = text.last_tokens()
        if draft.size:
            tokens = torch.cat([tokens, draft.on(text.ids.device, nodes)], dim=1)
        if target.is_exact and draft.size >= MOST_TOKENS:
            raise UnsupportedOptionError(f"SelfSpec(exact=True) takes drafts below {MOST_TOKENS} tokens: {draft.size}.")
        roots = text.last_slots()
        # A sibling would need what its ancestors fed into the recurrent states of the lower layers in another forward.
        starts_later = draft.states is not None and all(layer >= draft.prefix for layer in target.verified_layers)
        if draft.states is None or not starts_later or (nodes is not None and target.anatomy.is_recurrent):
            run = target.verification(chooses=chooses)
        else:
            states, ready = draft.states, draft.states.shape[1]
            if ready < tokens.shape[1]:
                rest = target.step(
                    tokens[:, ready:],
                    roots if nodes is not None else roots.ahead(ready),
                    ForwardPass(target.full_plan, stop=draft.prefix),
                    nodes,
                    ready if nodes is not None else 0,
                ).captured
                assert rest is not None
                states = torch.cat([states, rest], dim=1)
            run = target.verification(start=draft.prefix, state=states, chooses=chooses)
        run.spreads = False
        step = target.step(tokens, roots, run, nodes)
        assert step.logits is not None
        target.verified = step.captured
        # An argmax over 16-bit numbers is that over float32 copies, which take more memory; a CPU is slower without.
        as_they_are = self._is_greedy and text.ids.device.type != "cpu" and step.logits.itemsize < 4
        found = step.logits.to(text.ids.device, None if as_they_are else torch.float32)
        return Logits(found, target.active_rows, step.best)

    def _judge(self, draft: Draft, logits: Logits, along: Tops | None = None) -> list[Verdict]:
        rest = self.scorer, self.stopper, self._done
        checks = self.checks_logits and not self.scorer.repairs  # ``remove_invalid_values``
        whose = self.target.anatomy.model_name if checks else None
        if self._in_step:
            if whose is not None:
                check_highest(logits.of_all.amax(-1).flatten().tolist(), whose)
            return verify_in_step(self.text, draft, logits.of_all, *rest, self._steps, self.pad_token)
        return verify(self.text, draft, logits, *rest, self._scores, whose, along)

    def _commit(self, verdicts: list[Verdict], logits: Logits) -> None:
        # Where rows cannot be at different lengths, all advance by the shortest acceptance; what is cut off is sampled
        # again, so this is exact too.
        open_rows = [verdict for verdict, done in zip(verdicts, self._done, strict=True) if not done]
        shortest = min((len(verdict.tokens) for verdict in open_rows), default=0)
        moves, new = list[tuple[int, int, int]](), [list[int]() for _ in verdicts]
        roots = self.text.last_slots()
        for row, verdict in enumerate(verdicts):
            if self._done[row]:
                if self._together:
                    new[row] = [self.pad_token] * shortest
                continue
            count = shortest if self._together else len(verdict.tokens)
            for depth, node in enumerate(verdict.nodes[:count], start=1):
                if node > depth:
                    moves.append((row, roots[row] + node, roots[row] + depth))
            accepted = [node >= 0 for node in verdict.nodes[:count]]
            new[row] = verdict.tokens[:count]
            self.stats.from_draft[row] += accepted
            self.stats.tokens += count
            self.stats.accepted += sum(accepted)
            if self.stats.verify_passes:
                self.stats.accepted_lengths[sum(accepted)] += 1
            if verdict.stopped and count == len(verdict.tokens) and self._ended[row] is None:
                self._ended[row] = self.text.lengths[row] + count - self.text.prompt_width
            self._keep(row, verdict, count, logits)
        self.text.append(new)
        for known, tokens in zip(self._tokens, new, strict=True):
            known += tokens
        self._done = [self._is_done(row) for row in range(len(verdicts))]
        self.target.commit(self.text.last_slots(), moves)
        self._stream()
        keeps = self.keeps_rows or self._in_step or self.draft.needs_ended_rows
        if not keeps:
            self.target.leave(self._done)

    def _keep(self, row: int, verdict: Verdict, count: int, logits: Logits) -> None:
        if self._logits is not None:
            self._logits[row] += [
                logits.of_all[row, node].to(torch.float32, copy=True) for node in verdict.sources[:count]
            ]
        if self._scores is not None:
            self._scores[row] += verdict.scores[:count]

    def _count(self, draft: Draft, draft_seconds: float, verify_seconds: float) -> None:
        self.stats.draft_seconds += draft_seconds
        self.stats.verify_seconds += verify_seconds
        self.stats.verify_passes += 1
        self.stats.drafted += sum(draft.lengths)
        self.stats.rounds += self._done.count(False)

    def _target_length(self) -> int | None:
        """Number of tokens of every row, if rows that end are not padded: plain ``generate`` keeps generating them."""
        if self.stopper.has_eos or any(end is None for end in self._ended):
            return None
        return max(end for end in self._ended if end is not None)

    def _is_done(self, row: int) -> bool:
        end = self._ended[row]
        if end is None:
            return False
        if self.stopper.has_eos:
            return True
        length = self._target_length()
        generated = self.text.lengths[row] - self.text.prompt_width
        at_most = self.stopper.max_length is not None and self.text.lengths[row] >= self.stopper.max_length
        return at_most or (length is not None and generated >= length)

    def _max_new(self, row: int) -> int:
        """Tokens worth drafting: those that the row may still get, minus the one that verification adds."""
        count = self.stopper.max_new(self.text, row) - 1
        limit = self.target.anatomy.position_limit
        return count if limit is None else max(0, min(count, limit - 1 - self.target.roots[row]))

    def generated(self, row: int) -> int:
        """Tokens of ``row`` that the output shows (the rest is padding)."""
        end, length = self._ended[row], self._target_length()
        if length is not None:
            return length
        return self.text.lengths[row] - self.text.prompt_width if end is None else end

    def _stream(self) -> None:
        if self.streamer is None:
            return
        rows = range(self.text.batch_size)
        open_rows = [self.text.lengths[row] - self.text.prompt_width for row in rows if not self._done[row]]
        ready = min(open_rows) if open_rows else max(self.generated(row) for row in rows)
        while (place := self._streamed) < ready:
            if hasattr(self.streamer, "from_draft"):  # it marks drafted tokens
                known = (drafted[place : place + 1] for drafted in self.stats.from_draft)
                self.streamer.from_draft = [any(drafted) for drafted in known]
            shown = [self._tokens[row][place] if place < self.generated(row) else self.pad_token for row in rows]
            self.streamer.put(torch.tensor(shown, device="cpu"))
            self._streamed += 1

    def _output_ids(self) -> torch.Tensor:
        text = self.text
        counts = [self.generated(row) for row in range(text.batch_size)]
        ids = text.ids[:, : text.prompt_width + max(counts)].clone()
        for row, count in enumerate(counts):
            ids[row, text.prompt_width + count :] = self.pad_token
        return ids

    def output(self, ids: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput:
        """What ``generate(return_dict_in_generate=True)`` returns; steps after a row's end hold zeros."""
        steps = ids.shape[1] - self.text.prompt_width
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=by_step(self._scores, steps) if self._steps is None else tuple(self._steps),
            logits=by_step(self._logits, steps),
            **{CACHE_NAME: cache},
        )

    def _run_out(self) -> None:
        run_out(self.target, self.text.last_tokens(), self.text.last_slots(), self.text.lengths, self.pad_token)
        self._ran_out = True

    def hand_back(self, cache: Any) -> None:
        """Fills the cache that ``generate`` returns, with everything but the last token."""
        if self._end_unevenly() and not self._ran_out:
            self._run_out()
        counts = [self.generated(row) for row in range(self.text.batch_size)]
        hand_back(self.target.cache, cache, self.inputs.prompt, self.text.prompt_width, counts)
