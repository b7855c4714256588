"""The decode loop: prefill, then draft, verify, commit until every row is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ..batch import Draft, Text, Verdict
from ..draft.source import FixedDrafter
from ..errors import UnsupportedOptionError, brief, warn_once
from ..model.exact import MOST_TOKENS
from ..model.experts import decoding_experts
from ..model.handover import hand_back, run_out, take_in
from ..model.inputs import Inputs
from ..model.layout import TreeLayout
from ..model.logits import Logits, Tops
from ..model.modules import is_tensor_parallel
from ..model.partial import ForwardPass
from ..model.prefill import prefill
from ..model.target import Target
from ..model.transfer import is_out_of_memory, moment, seconds_between
from ..stats import GenerationStats
from ..verify.scoring import Scorer, check_highest
from ..verify.stopping import Stopper
from ..verify.walk import verify, verify_in_step
from .loop import Loop
from .output import Output

# The most bytes of keys and values that are copied for a change to transformers' own loop, or 1/16 of the model.
_COPIED = 2**26
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
    loop: Loop | None = None  # transformers' own, where a part of the call can be left to it
    stats: GenerationStats = field(default_factory=GenerationStats)

    def __post_init__(self) -> None:
        b, self._ran_out = self.text.batch_size, False
        stateful = (*self.scorer.stateful, *self.stopper.stateful)
        self._in_step, self._keeps_states = bool(stateful), self.keeps_rows and self.target.anatomy.is_recurrent
        # States and windows of rows that go on for others cannot be taken back to where those end.
        is_lost = self.keeps_rows and (self._keeps_states or self.target.cache.window is not None)
        goes_on = is_lost and b > 1 and self.stopper.reads_text and not self.stopper.has_eos
        self._together = self._in_step or self.target.padding is not None or goes_on
        rest = self.config, self.pad_token, self.streamer, self.stats, self._in_step
        self.output = Output(self.text, self.stopper, *rest)
        # Rows that end without an end token go on in transformers' own loop, as far as the longest.
        go_on = b > 1 and (self._together or (self.stopper.reads_text and not self.stopper.has_eos))
        if self.loop is not None and (go_on or not self.loop.is_possible(self.target)):
            self.loop = None
        # Whether tokens are a plain argmax of the logits.
        self._is_greedy = self.scorer.is_greedy and not stateful and self.output.scores is None
        if b > 1:
            self.stats.together_for = ", ".join(stateful)

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
        with decoding_experts(self.target.model, self.target.is_exact):
            if self.waits_for is not None:
                self.waits_for(True)  # processes that plain generate serves ask before they take the prefill's token
            while self._is_needed():
                if self.output.is_finished:
                    self._run_out()
                    continue
                self._round()
                self.stats.timeline.append((self.stats.tokens, perf_counter() - started))
            if self.streamer is not None:
                self.streamer.end()
            ids = self.output.ids()
            ended = perf_counter()
            seen = self.output.seen(ids.shape[1] - self.text.prompt_width - 1)  # processors do not get the last one
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
            if not (self.output.is_finished or goes_on):
                raise
            warn_once(f"a call went on without drafts and learning: {brief(repr(error))}", ignore_numbers=True)
            self.draft = FixedDrafter()
            self.draft.reads_logits = False
            self.target.cache.stay()

    def _is_needed(self) -> bool:
        """Whether there is another forward, for this process or for others that are unfinished."""
        unfinished = not self.output.is_finished
        if self.waits_for is None:
            return unfinished
        return self.waits_for(unfinished or (self.keeps_rows and self.output.ends_unevenly() and not self._ran_out))

    def _round(self) -> None:
        done = self.output.done
        pads = self._together and self._keeps_states and any(done)  # which states take in, a token at a time
        max_new = [0 if is_done or pads else self._max_new(row) for row, is_done in enumerate(done)]
        begun = moment(device := self.text.ids.device)
        draft, along = Draft.none(self.text), None
        with self._surviving():
            draft = self.draft.propose(self.text, max_new)
        drafted = moment(device)
        if not draft.size and (steps := self._loop_steps(max_new)):
            self.stats.draft_seconds += seconds_between(begun, drafted)
            return self._go_on_in_loop(steps)
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

    def _loop_steps(self, max_new: list[int]) -> int:
        """Steps of transformers' own loop until it is looked whether that should go on, 0 for a round of ours: there,
        rows have to be at the same length, and none ended."""
        cache, lengths = self.target.cache, self.text.lengths
        is_level = min(lengths) == max(lengths) and not any(self.output.done)
        steps = self.draft.loop_steps(self.text, min(max_new) if is_level else 0, self.loop is not None)
        if steps and self.loop is not None:  # what is copied should be small beside the model
            held = sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers())
            copied = held * lengths[0] // cache.capacity
            if copied > _COPIED and copied > self.target.model.get_memory_footprint() // 16:
                self.loop = None
        return 0 if self.loop is None else steps

    def _go_on_in_loop(self, steps: int) -> None:
        """Goes on in transformers' own loop, until a row ends or something would be drafted."""
        assert self.loop is not None
        begun, text, target, prompt = perf_counter(), self.text, self.target, self.inputs.prompt
        cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
        added = text.lengths[0] - text.prompt_width
        hand_back(target.cache, cache, prompt, text.prompt_width, [added] * text.batch_size)
        target.cache.let_go()
        target.let_go()
        self.loop.run(text.ids[:, : text.lengths[0]], cache, steps, self._take)
        if self.output.is_finished and not self.keeps_rows and self.waits_for is None:
            self.stats.verify_seconds += perf_counter() - begun
            return
        length, roots, active = cache.get_seq_length(), list(text.last_slots()), target.active_rows
        places = prompt.slots(length, [length] * text.batch_size)
        if active is not None:  # the others have left
            roots = active.of_list(roots)
            cache.batch_select_indices(torch.tensor(active.kept, device="cpu"))  # for layers on any device
            places = None if places is None else places[active.kept]
        if places is not None:  # to the columns in the order of slots
            places = places.masked_fill(places < 0, length).argsort(dim=1, stable=True)[:, : max(roots)]
        target.cache.seek(roots, 1)  # room
        take_in(target.cache, cache, places, [])
        target.cache.put_back = None
        seconds = perf_counter() - begun
        self.stats.verify_seconds += seconds
        self.draft.came_back(seconds - self.loop.seconds)

    def _take(self, ids: torch.Tensor, ended: list[torch.Tensor], seconds: list[float]) -> int:
        """Takes over what transformers' own loop has added to ``ids`` in some steps, each with the rows that end with
        it; returns the steps until the next look, 0 for none."""
        verdicts = []
        new = ids[:, self.text.lengths[0] :].tolist()
        for tokens, ends in zip(new, torch.stack(ended, dim=1).tolist(), strict=True):
            count = ends.index(True) + 1 if True in ends else len(tokens)
            verdicts.append(Verdict(tokens[:count], [-1] * count, True in ends, [0] * count))
        added = sum(len(verdict.tokens) for verdict in verdicts)
        self.output.streamed += len(ended)
        self.stats.verify_passes += len(ended)
        self.stats.rounds += added
        self.stats.accepted_lengths[0] += added - len(verdicts)  # the others are counted next
        counts = [len(verdict.tokens) for verdict in verdicts]
        self.stats.round_sizes += [(0, sum(count > step for count in counts)) for step in range(len(ended))]
        self._commit(verdicts, Logits(ids[:, :0]))
        steps = 0
        with self._surviving():
            max_new = [0 if done else self._max_new(row) for row, done in enumerate(self.output.done)]
            steps = self.draft.follow(self.text, verdicts, max_new, seconds)
        return 0 if any(self.output.done) else steps

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
        rest = self.scorer, self.stopper, self.output.done
        checks = self.checks_logits and not self.scorer.repairs  # ``remove_invalid_values``
        whose = self.target.anatomy.model_name if checks else None
        if self._in_step:
            if whose is not None:
                check_highest(logits.of_all.amax(-1).flatten().tolist(), whose)
            return verify_in_step(self.text, draft, logits.of_all, *rest, self.output.steps, self.pad_token)
        return verify(self.text, draft, logits, *rest, self.output.scores, whose, along)

    def _commit(self, verdicts: list[Verdict], logits: Logits) -> None:
        # Where rows cannot be at different lengths, all advance by the shortest acceptance; what is cut off is sampled
        # again, so this is exact too.
        done = self.output.done
        open_rows = [verdict for verdict, is_done in zip(verdicts, done, strict=True) if not is_done]
        shortest = min((len(verdict.tokens) for verdict in open_rows), default=0)
        moves, new = list[tuple[int, int, int]](), [list[int]() for _ in verdicts]
        roots = self.text.last_slots()
        for row, verdict in enumerate(verdicts):
            if done[row]:
                if self._together:
                    new[row] = [self.pad_token] * shortest
                continue
            count = shortest if self._together else len(verdict.tokens)
            for depth, node in enumerate(verdict.nodes[:count], start=1):
                if node > depth:
                    moves.append((row, roots[row] + node, roots[row] + depth))
            new[row] = self.output.take(row, verdict, count, logits)
        self.output.append(new)
        self.target.commit(self.text.last_slots(), moves)
        self.output.stream()
        keeps = self.keeps_rows or self._in_step or self.draft.needs_ended_rows
        if not keeps:
            self.target.leave(self.output.done)

    def _count(self, draft: Draft, draft_seconds: float, verify_seconds: float) -> None:
        self.stats.draft_seconds += draft_seconds
        self.stats.verify_seconds += verify_seconds
        self.stats.verify_passes += 1
        self.stats.drafted += sum(draft.lengths)
        self.stats.rounds += self.output.done.count(False)

    def _max_new(self, row: int) -> int:
        """Tokens worth drafting: those that the row may still get, minus the one that verification adds."""
        count = self.stopper.max_new(self.text, row) - 1
        limit = self.target.anatomy.position_limit
        return count if limit is None else max(0, min(count, limit - 1 - self.target.roots[row]))

    def _run_out(self) -> None:
        run_out(self.target, self.text.last_tokens(), self.text.last_slots(), self.text.lengths, self.pad_token)
        self._ran_out = True

    def hand_back(self, cache: Any) -> None:
        """Fills the cache that ``generate`` returns, with everything but the last token."""
        if self.output.ends_unevenly() and not self._ran_out:
            self._run_out()
        hand_back(self.target.cache, cache, self.inputs.prompt, self.text.prompt_width, self.output.counts())
