"""One model during one generation: every forward of drafting and verification goes through here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import CompileConfig

from ..errors import UnsupportedOptionError, warn_once
from .attention import speculative_attention, without_cudnn_attention
from .context import Context, Feed, run_eagerly
from .layout import TreeLayout
from .linear import few_token_linears
from .modules import ROW_BLIND, clock_of, has_hooks, is_compiled
from .partial import ForwardPass, is_speculating, partial_forwards
from .patching import eagerly, without_checkpointing
from .plan import LayerPlan, LoraDeltas
from .recurrences.kernels import served_kernels
from .rows import ActiveRows
from .runner import GraphRunner
from .transfer import RowNumbers

# Rounds without need after which a context is left. Entering and leaving that of partial forwards takes as long as
# these cost in 1.4 rounds (0.27 ms, 0.19 a round; 12 layers of width 256, bfloat16, one thread of a shared AMD EPYC).
_KEPT_ROUNDS = 3
# Called with the states [b, s, d] that enter a layer, each row's first slot and number of real tokens.
Observer = Callable[[torch.Tensor, Sequence[int], list[int]], None]


@dataclass(eq=False)
class Target(Context):
    """The model that is being decoded, with its cache."""

    plan: LayerPlan | None = None  # the blocks that stand in for the whole model, None for all of it
    forwards: int = field(init=False, default=0)  # so far
    graphs: GraphRunner | None = field(init=False, default=None)  # runs forwards over a few tokens
    deltas: list[LoraDeltas] = field(init=False, default_factory=list)  # of all plans; complete before `prepared`
    # The layer whose entering states are observed in prefills, and what they are passed to.
    prefill_observer: tuple[int, Observer] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.full_plan = self.plan or LayerPlan(self.anatomy.num_layers)
        self.clock = clock_of(self.model, lambda: self.forwards)  # the same in all processes of a model
        self._obeying, self._is_obeying, self._unused_rounds = ExitStack(), False, 0

    @contextmanager
    def prepared(self) -> Iterator[Target]:
        """Prepares the model for speculation, and restores it afterwards."""
        with ExitStack() as stack:
            stack.enter_context(few_token_linears(self.model, is_speculating))
            stack.callback(self._let_go)
            stack.enter_context(without_checkpointing(self.model))
            stack.enter_context(speculative_attention())
            stack.enter_context(without_cudnn_attention())
            stack.enter_context(served_kernels(self.model))
            if is_compiled(self.model):
                stack.enter_context(eagerly())
            if self.graphs is not None:
                stack.enter_context(self.graphs.running())
            yield self

    def compile(self, config: CompileConfig) -> None:
        """Runs forwards over a few tokens as compiled graphs, where the call allows it."""
        self.graphs = GraphRunner.of(self, config)
        self.cache.has_few_sizes = self.graphs is not None

    @property
    def compile_seconds(self) -> float:
        """Time that this generation has waited for graphs to be compiled."""
        return 0.0 if self.graphs is None else self.graphs.waited_seconds

    def obey(self) -> None:
        """Makes the model's layers obey the :class:`ForwardPass` of a thread, until rounds no longer need that."""
        if not self._is_obeying:
            self._obeying.enter_context(partial_forwards(self.model, self.anatomy, self.deltas))
        self._is_obeying, self._unused_rounds = True, 0

    def observe_prefill(self, layer: int, observer: Observer) -> None:
        """Passes the states that enter a layer in all prefills to ``observer``.

        Raises:
            UnsupportedOptionError: there is another one.
        """
        if self.prefill_observer is not None:
            raise UnsupportedOptionError("only one draft source can use the prompt's states: give one of these.")
        self.prefill_observer = layer, observer

    # Rows ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _can_leave(self) -> bool:
        """Whether rows can leave the forwards: no graph, input or hook that could have a value for each row needs them.

        An example of such a hook: PEFT's for ``adapter_names``.
        """
        return self.graphs is None and self.takes_any_rows and not has_hooks(self.model, but_of=ROW_BLIND)

    def is_active(self, row: int) -> bool:
        """Whether forwards run over a row."""
        return self.active_rows is None or row in self.active_rows.kept

    def leave(self, ended: Sequence[bool]) -> None:
        """Removes rows that have ended from further forwards and from the cache, where they can leave."""
        total = len(self.roots)
        before = list(range(total)) if self.active_rows is None else self.active_rows.kept
        kept = [row for row in before if not ended[row]]
        if kept and len(kept) < len(before) and self._can_leave:
            self.cache.keep_rows([before.index(row) for row in kept])
            self.active_rows = ActiveRows(kept, total)

    def commit(self, roots: Sequence[int], moves: list[tuple[int, int, int]] | None = None) -> None:
        """Makes these slots those of the rows' last tokens, after accepted tokens moved from slot to slot of a row.

        See :meth:`SpeculativeCache.keep_path` and :meth:`SpeculativeCache.commit`.
        """
        self.roots, active, moves = RowNumbers.of(roots), self.active_rows, moves or []
        if active is not None:
            place = {row: index for index, row in enumerate(active.kept)}
            moves = [(place[row], start, end) for row, start, end in moves]
        self.cache.keep_path(moves)
        self.cache.commit(roots if active is None else active.of_list(roots))

    def end_round(self) -> None:
        """Ends a round of decoding: layers that have not had to obey for a while run as they are."""
        self._unused_rounds += 1
        if self._is_obeying and self._unused_rounds > _KEPT_ROUNDS:
            self._let_go()

    def _let_go(self) -> None:
        self._is_obeying = False
        self._obeying.close()

    def first_slots(self) -> list[int]:
        """See :meth:`SpeculativeCache.first_slots`."""
        known = self.cache.first_slots()
        if self.active_rows is None:
            return known
        rows = dict(zip(self.active_rows.kept, known, strict=True))
        return [rows.get(row, 0) for row in range(self.active_rows.total)]

    # Forwards ------------------------------------------------------------------------------------------------------

    def prefill(self, tokens: torch.Tensor, cursors: Sequence[int], lengths: list[int]) -> torch.Tensor:
        """Runs the whole model over prompts and returns the logits ``[b, v]`` of each row's last token.

        ``tokens`` are ids ``[b, s]`` or embeddings ``[b, s, d]``; rows start on the left, at slots ``cursors``, and may
        have junk after ``lengths`` tokens. The logits of a row without any are junk.
        """
        ends = None if min(lengths) == tokens.shape[1] else [max(length, 1) - 1 for length in lengths]
        observer = self.prefill_observer
        run = ForwardPass(self.full_plan, capture=-1 if observer is None else observer[0], ends=ends, keep=1)
        run = self._run(tokens, cursors, run, counts=lengths)
        assert run.logits is not None
        self.autocast = run.autocast
        if observer is not None:
            assert run.captured is not None
            observer[1](run.captured, cursors, [max(length, 1) for length in lengths])
        return run.logits[:, -1]

    def step(
        self,
        tokens: torch.Tensor,
        cursors: Sequence[int],
        run: ForwardPass | None = None,
        nodes: TreeLayout | None = None,
        first_node: int = 0,
    ) -> ForwardPass:
        """Runs one forward over a few tokens at the end of each row, and returns it with what it has found.

        Args:
            tokens: ``[b, s]`` ids.
            cursors: slot (and so position) of each row's first node.
            run: what runs; the whole model by default.
            nodes: the draft tree, of which ``tokens`` are the last ``s`` nodes; a line by default.
            first_node: index of the first of ``tokens`` among the nodes; earlier nodes are in the cache already.
        """
        run = self._run(tokens, cursors, ForwardPass(self.full_plan) if run is None else run, nodes, first_node)
        if run.head_rows is not None and run.stop is None and not run.head_rows.is_used:
            warn_once(
                f"{self.anatomy.model_name} computes logits without a call of its output head, so drafts have all "
                "tokens: leave `head` out. The output is the same."
            )
        return run

    def _run(
        self,
        tokens: torch.Tensor,
        cursors: Sequence[int],
        run: ForwardPass,
        nodes: TreeLayout | None = None,
        first_node: int = 0,
        counts: list[int] | None = None,
    ) -> ForwardPass:
        self.forwards += 1
        rows, starts = self.active_rows, RowNumbers.of(cursors)
        if self.graphs is not None or counts is not None or not run.is_plain:
            self.obey()
        if rows is not None:
            tokens, starts, nodes = rows.pick(tokens, 0), rows.of_numbers(starts), rows.of_layout(nodes)
            run = rows.enter(run)
        feed = Feed(tokens, starts.ahead(first_node), self.last_positions(), nodes, first_node, counts)
        if self.graphs is None or counts is not None:
            run.logits = run_eagerly(self, feed, run)
        else:
            run.logits = self.graphs.run(feed, run)
        if rows is not None:
            rows.leave(run)
        return run
