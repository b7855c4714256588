"""One model during one generation: every forward of drafting and verification goes through here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import UnsupportedOptionError, unsupported, warn_once
from .anatomy import Anatomy
from .attention.exact import MOST_TOKENS
from .attention.interface import MaskSpec, at_positions, speculative_attention
from .cache.handover import take_in
from .cache.recurrent_states import redirecting, turns
from .cache.speculative_cache import SpeculativeCache
from .forks import cached_property
from .forward_pass import ActiveRows, ForwardPass, is_speculating, knows_blocks, obeying, partial_forwards
from .inputs import DecodeInputs, Inputs
from .internals import prefill as prefill_plainly
from .layout import StepTokens, Tokens, TreeLayout
from .linear import few_token_linears
from .module_tools import ROW_BLIND, forward_parameters
from .patching import Autocast, as_before, autocast_on, eagerly, within, without_checkpointing
from .plan import LayerPlan, Substitutes
from .prompt import cache_name, given_cache, tokens_in
from .transfer import RowNumbers

# Rounds without need after which a context is left. Entering and leaving that of partial forwards takes as long as
# these cost in 1.4 rounds (0.27 ms, 0.19 a round; 12 layers of width 256, bfloat16, one thread of a shared AMD EPYC).
_KEPT_ROUNDS = 3
_NO_END = 1 << 62
# Numbers in the mask of a forward over a prompt, 64 MiB in 16 bits, and the least tokens that are worth a forward.
_MASK, _LEAST = 1 << 25, 128
# Called with the states [b, s, n d] that enter some layers, each row's first slot and number of real tokens.
Observer = Callable[[torch.Tensor, Sequence[int], list[int]], None]


@dataclass(eq=False)
class Target:
    """The model that is being decoded, with its cache, and its forwards: by its own code, or by captured graphs."""

    model: PreTrainedModel
    anatomy: Anatomy
    cache: SpeculativeCache
    reachable: int | None = None  # the last position that a text can reach, None for any
    following: DecodeInputs = field(default_factory=DecodeInputs)
    is_exact: bool = False  # whether forwards over several tokens have the results of single ones, bit for bit
    forwards: int = field(init=False, default=0)  # so far
    forward_seconds: float = field(init=False, default=0.0)
    active_rows: ActiveRows | None = field(init=False, default=None)  # None for all
    autocast: Autocast | None = field(init=False, default=None)  # in which the layers ran in the last prefill
    graphs: Any = field(init=False, default=None)  # the `GraphRunner` of forwards over a few tokens, None for none
    waited_seconds: float = field(init=False, default=0.0)  # for graphs to be made
    # Forwards so far that were not run as later ones like them will be.
    unrepresentative_forwards: int = field(init=False, default=0)
    substitutes: list[Substitutes] = field(init=False, default_factory=list)  # of all plans; complete before `prepared`
    prefill_observer: Observer | None = field(init=False, default=None)
    # The layers whose entering states it gets (`L` for what leaves the stack), and those that verifications keep.
    observed_layers: tuple[int, ...] = field(init=False, default=())
    verified_layers: tuple[int, ...] = field(init=False, default=())
    verified: torch.Tensor | None = field(init=False, default=None)  # [b, s, n d] of the last verification

    def __post_init__(self) -> None:
        self.full_plan, self.device = LayerPlan(self.anatomy.num_layers), self.model.device
        self.roots = RowNumbers([0] * len(self.cache.cursors))  # slot of each row's last token
        self.cache_name = cache_name(self.model)
        self._takes_logits_to_keep = "logits_to_keep" in forward_parameters(self.model)
        self._installed, self._is_installed, self._unused_rounds = ExitStack(), False, 0

    @contextmanager
    def prepared(self) -> Iterator[Target]:
        """Prepares the model for speculation, and restores it afterwards."""
        view = self.anatomy.view
        with as_before(), ExitStack() as stack:
            stack.enter_context(few_token_linears(self.model, is_speculating, view))
            stack.callback(self.uninstall)
            stack.enter_context(without_checkpointing(self.model, view.modules))
            stack.enter_context(speculative_attention())
            if (kernels := self.anatomy.kernels) is not None:
                stack.enter_context(redirecting(kernels.file, kernels.recurrence))
            if view.is_compiled:
                stack.enter_context(eagerly())
            if self.graphs is not None:
                stack.enter_context(self.graphs.running())
            yield self

    def now(self) -> float:
        """Seconds by a clock that stops while graphs are made."""
        return perf_counter() - self.waited_seconds

    def install(self) -> None:
        """Makes the model's layers obey the :class:`ForwardPass` of a thread, until rounds no longer need that."""
        if not self._is_installed:
            self._installed.enter_context(partial_forwards(self.model, self.anatomy, self.substitutes, self.is_exact))
        self._is_installed, self._unused_rounds = True, 0

    def observe_prefill(self, layers: tuple[int, ...], observer: Observer, keeps_verified: bool = False) -> None:
        """Passes the states that enter some layers in all prefills, side by side, to ``observer``, of which there can
        be one. ``L`` is for the states that leave the stack. Those of verifications can be kept, too: these then have
        to start at the first of the layers or below."""
        if self.prefill_observer is not None:
            raise UnsupportedOptionError("only one draft source can use the prompt's states: give one of these.")
        self.prefill_observer, self.observed_layers = observer, layers
        self.verified_layers = layers if keeps_verified else ()

    def verification(self, **settings: Any) -> ForwardPass:
        """The forward of the whole model that verifies."""
        return ForwardPass(self.full_plan, capture=self.verified_layers, **settings)

    # Rows ----------------------------------------------------------------------------------------------------------

    @property
    def takes_any_rows(self) -> bool:
        """Whether a forward depends only on the tokens and their positions."""
        return not self.following.extra and not self.following.marks

    @cached_property
    def _can_leave(self) -> bool:
        """Whether rows can leave: no graph, input or hook (as of PEFT's ``adapter_names``) may need every row."""
        if self.cache.has_unknown_readers or self.graphs is not None or not self.takes_any_rows:
            return False
        return not self.anatomy.view.has_hooks(but_of=ROW_BLIND)

    @property
    def rows(self) -> Sequence[int]:
        """The rows that are still generating."""
        return range(len(self.roots)) if self.active_rows is None else self.active_rows.kept

    def leave(self, ended: Sequence[bool]) -> None:
        """Removes rows that have ended from further forwards and from the cache, where they can leave."""
        before = self.rows
        places = [place for place, row in enumerate(before) if not ended[row]]
        if places and len(places) < len(before) and self._can_leave:
            # Only the last rows move, to the places of those that leave.
            moved = iter([place for place in places if place >= len(places)])
            places = [next(moved) if ended[row] else place for place, row in enumerate(before[: len(places)])]
            self.cache.keep_rows(places)
            self.active_rows = ActiveRows([before[place] for place in places], len(self.roots))

    def commit(self, roots: Sequence[int], moves: list[tuple[int, int, int]] | None = None) -> None:
        """Makes these slots those of the rows' last tokens, after accepted tokens moved from slot to slot of a row."""
        self.roots, active, moves = RowNumbers.of(roots), self.active_rows, moves or []
        if active is not None:
            place = {row: index for index, row in enumerate(active.kept)}
            moves = [(place[row], start, end) for row, start, end in moves]
        self.cache.keep_path(moves)
        self.cache.commit(roots if active is None else active.of_list(roots))

    def last_position(self) -> int:
        """The last position that tokens can have: roots are real ones, wherever they are, and drafts stay in bounds."""
        limit = self.anatomy.position_limit
        bounds = [bound for bound in (self.reachable, None if limit is None else limit - 1) if bound is not None]
        return max(min(bounds, default=_NO_END), *self.roots)

    def takes_as_one(self, drafted: int) -> bool:
        """Whether a GPU runs layers over each row's last token and ``drafted`` ones in the time that one token takes,
        so that nothing is saved where all but one of them have been through these layers."""
        return self.graphs is not None and len(self.roots) * (drafted + 1) <= self.graphs.graphs.cheap_tokens

    def end_round(self) -> None:
        """Ends a round of decoding: layers that have not had to obey for a while run as they are."""
        self._unused_rounds += 1
        if self._is_installed and self._unused_rounds > _KEPT_ROUNDS:
            self.uninstall()

    def uninstall(self) -> None:
        """Lets layers run as they are."""
        self._is_installed = False
        self._installed.close()

    # Forwards ------------------------------------------------------------------------------------------------------

    def needs_no_mask(self, cursors: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether prompts from these slots on take the masks of ``generate`` without padding, often none at all."""
        is_causal = self.anatomy.causal or min(lengths) == max(lengths)
        return max(cursors) == 0 and is_causal

    def module_of(self, run: ForwardPass) -> nn.Module:
        """What runs; only the whole model gets the user's own arguments."""
        return self.model if run.stop is None or self.following.extra else self.anatomy.decoder

    def prefill(self, tokens: torch.Tensor, cursors: Sequence[int], lengths: list[int]) -> torch.Tensor:
        """Runs the whole model over prompts, ids ``[b, s]`` or embeddings ``[b, s, d]``, aligned left, with junk after
        ``lengths``; returns the logits ``[b, v]`` of each row's last token, junk where there is none."""
        observer, is_even = self.prefill_observer, min(lengths) == tokens.shape[1]
        ends = None if is_even and observer is None else [max(length, 1) - 1 for length in lengths]
        run = ForwardPass(self.full_plan, capture=self.observed_layers, ends=ends, keep=1)
        run = self.step(tokens, cursors, run, counts=lengths)
        assert run.logits is not None
        self.autocast = run.autocast or autocast_on(run.logits.device)
        if observer is not None:
            assert run.captured is not None
            observer(run.captured, cursors, lengths)
        return run.logits[:, -1]

    def step(
        self,
        tokens: Tokens,
        cursors: Sequence[int],
        run: ForwardPass | None = None,
        nodes: TreeLayout | None = None,
        first_node: int = 0,
        counts: list[int] | None = None,
    ) -> ForwardPass:
        """Runs a forward over ``tokens`` ``[b, s]`` and returns it with its results; they are the ``nodes`` of a tree
        (default: a line) from ``first_node`` on, whose node 0 is at the slots ``cursors``. In a prefill each row has
        ``counts`` of them."""
        run = ForwardPass(self.full_plan) if run is None else run
        self.forwards += 1
        rows, starts = self.active_rows, RowNumbers.of(cursors)
        width, device = len(tokens[0]), self.device if isinstance(tokens, list) else tokens.device
        run.is_exact = self.is_exact and counts is None and width <= MOST_TOKENS
        if self.is_exact and counts is None and (behind := self.roots[0] - starts[0]) > 0:
            # Keys and values of the text, which a look back writes again, have to stay as they are.
            starts, nodes = self.roots, TreeLayout.replay(width, behind)
        # A prefill shows what blocks return, and the mixed precision in accelerate's forward, which only layers see.
        is_looked_at = counts is not None and (
            "forward" in vars(self.model) or not knows_blocks(self.model, self.anatomy)
        )
        if self.graphs is not None or is_looked_at or run.is_exact or not run.is_plain:
            self.install()
        if rows is not None:
            assert isinstance(tokens, torch.Tensor)
            tokens, starts, nodes, run = rows.enter(tokens, starts, nodes, run)
        begins, last = starts.ahead(first_node), self.last_position()
        step_tokens = StepTokens(tokens, device, begins, last, nodes, first_node, counts)
        if self.graphs is None or counts is not None:
            run.logits = self.run_eagerly(step_tokens, run)
        else:
            run.logits = self.graphs.run(step_tokens, run)
        if rows is not None:
            rows.leave(run)
        if run.head_rows is not None and run.stop is None and not run.head_rows.is_used:
            warn_once(
                f"{self.anatomy.model_name} computes logits without a call of its output head, so drafts have all "
                "tokens: leave `head` out. The output is the same."
            )
        return run

    def run_eagerly(self, step_tokens: StepTokens, run: ForwardPass) -> torch.Tensor | None:
        """Runs a forward by the model's own code, and returns its logits ``[b, s, v]``, ``None`` if there are none."""
        tokens, module = step_tokens.tokens, self.module_of(run)
        s = tokens.shape[1]
        self.cache.seek(step_tokens.starts, s, step_tokens.counts, step_tokens.nodes, step_tokens.first_node)
        kwargs: dict[str, Any] = {"input_ids" if tokens.dim() == 2 else "inputs_embeds": tokens}
        positions, spec = step_tokens.positions(), None
        if step_tokens.counts is None or not self.needs_no_mask(step_tokens.starts, step_tokens.counts):
            spec = MaskSpec.of(step_tokens, positions, self.cache.window, run.is_exact)
        if self.anatomy.takes_positions:
            if max(step_tokens.starts) + s - 1 > step_tokens.last:
                positions = positions.clamp(max=step_tokens.last)
            rows = None if self.active_rows is None else self.active_rows.kept
            kwargs["position_ids"] = self.following.positions(positions, rows)
        # Layers that read what others have stored may run for these tokens alone (Gemma 4).
        needs_all = run.ends is not None or (run.head_input_fn is not None and bool(self.anatomy.kv_sources))
        if self._takes_logits_to_keep and module is self.model and not needs_all:
            kwargs["logits_to_keep"] = run.keep
        kwargs.update(self.following.extra)
        kwargs.update((name, mark.expand(-1, s)) for name, mark in self.following.marks.items())
        states = turns() if self.anatomy.is_recurrent else nullcontext()
        begun = perf_counter()
        with states:
            logits = self.run_module(run, spec, **kwargs)
        self.forward_seconds += perf_counter() - begun
        if logits is not None and logits.shape[1] < (expected := run.keep or s):
            name, count = self.anatomy.model_name, logits.shape[1]
            raise unsupported(f"{name} returns logits of {count} of {expected} tokens, of which each needs its own")
        run.num_exact = 0 if spec is None else len(spec.served)
        return logits

    def run_module(self, run: ForwardPass, spec: MaskSpec | None, **kwargs: Any) -> torch.Tensor | None:
        """Calls what runs in a forward, with the cache, and returns its logits, ``None`` if there are none."""
        kwargs |= {self.cache_name: self.cache, "use_cache": True, "return_dict": True}
        with within(self.autocast), obeying(run), at_positions(spec):
            return getattr(self.module_of(run)(**kwargs), "logits", None)


def prefill(target: Target, inputs: Inputs) -> torch.Tensor:
    """Runs the whole model over the prompts, and returns the logits ``[b, v]`` of each row's last token."""
    logits = _prefill_text(target, inputs) if inputs.is_text else _prefill_by_model(target, inputs)
    if not target.cache.is_filled:
        raise unsupported(
            f"{target.anatomy.model_name} does not write to the cache that it gets, so each forward would have to run "
            "over the whole text"
        )
    return logits


def _prefill_text(target: Target, inputs: Inputs) -> torch.Tensor:
    prompt, past = inputs.prompt, given_cache(inputs.arguments)
    if past_tokens := tokens_in(past):
        take_in(target.cache, past, prompt.past_columns(past_tokens), prompt.cursors)
    logits = None
    width, start = prompt.tokens.shape[1], 0
    while start < width:
        slots = [cursor + start for cursor in prompt.cursors]
        chunk = inputs.config.prefill_chunk_size or width
        if not target.needs_no_mask(slots, prompt.lengths):  # that of texts that continue stays small
            chunk = min(chunk, max(_LEAST, _MASK // (len(slots) * (max(prompt.cursors) + width))))
        tokens = prompt.tokens[:, start : start + chunk]
        lengths = [min(max(length - start, 0), tokens.shape[1]) for length in prompt.lengths]
        piece = target.prefill(tokens, slots, lengths)
        ends_here = [start < length <= start + chunk for length in prompt.lengths]
        chosen = torch.tensor(ends_here, device=piece.device)[:, None]
        logits = piece if logits is None else torch.where(chosen, piece, logits)
        start += chunk
    assert logits is not None
    return logits


def _prefill_by_model(target: Target, inputs: Inputs) -> torch.Tensor:
    """Prompts with images, sound or own positions: the model fills transformers' cache, bit for bit as ``generate``."""
    model, prompt, observer = target.model, inputs.prompt, target.prefill_observer
    past = copy.deepcopy(given_cache(inputs.arguments))
    arguments = inputs.arguments | {target.cache_name: past}
    run = ForwardPass(target.full_plan, capture=target.observed_layers)
    if observer is not None:  # it needs the states of all tokens, the head those of the last column
        run.ends = [-1] * len(prompt.lengths)
        arguments.pop("logits_to_keep", None)
    begun = perf_counter()
    target.install()
    with obeying(run), at_positions(None):
        target.forwards += 1
        output = prefill_plainly(model, inputs.input_ids, inputs.config, dict(arguments))
    target.forward_seconds += perf_counter() - begun
    target.autocast = run.autocast
    if past.get_seq_length() != prompt.width:
        raise UnsupportedOptionError(
            f"{target.anatomy.model_name} has turned a prompt of {prompt.width} tokens into "
            f"{past.get_seq_length()}. Pass a prompt with one placeholder for each token of an image or sound, as "
            "the model's current processor makes it, or call generate without `assistant`."
        )
    take_in(target.cache, past, prompt.past_columns(prompt.width), prompt.ends())
    target.cache.was_given = False  # it was a copy
    if observer is not None:
        assert run.captured is not None
        observer(prompt.aligned(run.captured), prompt.cursors, prompt.lengths)
    target.following = DecodeInputs.of(model, inputs.input_ids, arguments, prompt.ends(), output)
    logits: torch.Tensor = output.logits[:, -1]
    return logits
