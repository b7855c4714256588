"""One model during one generation: every forward of drafting and verification goes through here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
import torch.nn as nn
from transformers import CompileConfig, PreTrainedModel

from ..errors import UnsupportedOptionError, warn_once
from .additions import Additions
from .anatomy import Anatomy
from .attention import without_cudnn_attention
from .autocast import Autocast
from .cache import SpeculativeCache
from .checkpointing import without_checkpointing
from .compiled import eagerly, is_compiled
from .eager import EagerForwards, Forward
from .fixed import FixedShapes
from .following import Following
from .forwards import WhileNeeded
from .given_cache import cache_name
from .head_rows import HeadRows
from .hooks import ROW_BLIND, has_hooks
from .kernels import served_kernels
from .layout import TreeLayout
from .linear import few_token_linears
from .masks import speculative_attention
from .modules import forward_parameters
from .parallel import clock_of
from .partial import AfterLayer, ForwardPass, StopFn, is_speculating, partial_forwards
from .plan import LayerPlan
from .positions import LastPositions
from .prompt import Holes
from .rows import ActiveRows
from .step import PrefillObserver, Step
from .transfer import RowNumbers


class Target:
    """The model that is being decoded, with its cache.

    Args:
        model: a decoder-only causal LM.
        anatomy: its parts.
        cache: where its keys and values go.
        padding: ``[b, m]`` attention mask of the prompt where rows must stay left-padded because the model cannot
            take rows at different lengths (``anatomy.ragged`` is false), else ``None``.
        holes: masked columns inside the prompts, ``None`` for none.
        last_positions: for each row the last position that its text can reach, ``None`` if unlimited.
        following: what the model takes with the tokens after the prompts.
        plan: the blocks that stand in for the whole model, ``None`` for all of it.

    Attributes:
        forwards: number of forwards so far.
        clock: returns seconds, the same in all processes of a model that is spread over several.
        active_rows: the rows that forwards run over, ``None`` for all.
        autocast: the autocast in which the whole model's layers run, as seen in the last prefill.
        prefill_observer: receives the states that enter one layer in prefills, ``None`` for no observer; see
            :meth:`observe_prefill`.
        additions: what plans add to outputs of modules; complete before :meth:`prepared`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        cache: SpeculativeCache,
        padding: torch.Tensor | None = None,
        holes: Holes | None = None,
        last_positions: list[int] | None = None,
        following: Following | None = None,
        plan: LayerPlan | None = None,
    ) -> None:
        self.model = model
        self.anatomy = anatomy
        self.cache = cache
        self.padding = padding
        self.holes = holes
        self._positions = LastPositions(last_positions, anatomy.position_limit)
        self.following = following or Following()
        self.last_slots: Sequence[int] = [0] * len(cache.cursors)
        self.full_plan = plan or LayerPlan(anatomy.num_layers)
        self.takes_logits_to_keep = "logits_to_keep" in forward_parameters(model)
        self.cache_name = cache_name(model)
        self._decoder: nn.Module = anatomy.decoder
        self.forward_seconds = 0.0
        self.forwards = 0
        self.clock = clock_of(model, lambda: self.forwards)
        self._eager = EagerForwards(self)
        self.active_rows: ActiveRows | None = None
        self.fixed: FixedShapes | None = None
        self.autocast: Autocast | None = None
        self.prefill_observer: PrefillObserver | None = None
        self.additions: list[Additions] = []
        self._partial_forwards = WhileNeeded(lambda: partial_forwards(model, anatomy, self.additions))

    @contextmanager
    def prepared(self) -> Iterator[Target]:
        """Prepares the model for speculation, and restores it afterwards."""
        with ExitStack() as stack:
            stack.enter_context(few_token_linears(self.model, is_speculating))
            stack.enter_context(self._partial_forwards)
            stack.enter_context(without_checkpointing(self.model))
            stack.enter_context(speculative_attention())
            stack.enter_context(without_cudnn_attention())
            stack.enter_context(served_kernels(self.model))
            if is_compiled(self.model):
                # A compiled graph would be traced again for each plan and each shape.
                stack.enter_context(eagerly())
            if self.fixed is not None:
                stack.enter_context(self.fixed.running())
            yield self

    def obey(self) -> None:
        """Makes the model's layers obey the :class:`ForwardPass` of a thread, until rounds no longer need that."""
        self._partial_forwards.need()

    def end_round(self) -> None:
        """Ends a round of decoding: layers that have not had to obey for a while run as they are."""
        self._partial_forwards.end_round()

    def compile(self, config: CompileConfig) -> None:
        """Runs forwards over a few tokens as compiled graphs, where the call allows it."""
        self.fixed = FixedShapes.of(self, config)
        self.cache.has_few_sizes = self.fixed is not None

    @property
    def compile_seconds(self) -> float:
        """Time that this generation has waited for graphs to be compiled."""
        return 0.0 if self.fixed is None else self.fixed.waited_seconds

    @cached_property
    def _can_leave(self) -> bool:
        """Whether rows can leave the forwards: no graph, input or hook that could have a value for each row needs them.

        An example of such a hook: PEFT's for ``adapter_names``.
        """
        return self.fixed is None and self.takes_any_rows and not has_hooks(self.model, but_of=ROW_BLIND)

    @property
    def takes_any_rows(self) -> bool:
        """Whether a forward depends only on the tokens and their positions."""
        following = self.following
        return self.padding is None and self.holes is None and not following.extra and not following.marks

    def is_active(self, row: int) -> bool:
        """Whether forwards run over a row."""
        return self.active_rows is None or row in self.active_rows.kept

    def observe_prefill(self, observer: PrefillObserver) -> None:
        """Registers an observer of all prefills.

        Raises:
            UnsupportedOptionError: there is another one.
        """
        if self.prefill_observer is not None:
            raise UnsupportedOptionError("only one draft source can use the prompt's states: give one of these.")
        self.prefill_observer = observer

    def leave(self, ended: Callable[[int], bool]) -> None:
        """Removes rows that have ended from further forwards and from the cache, where they can leave."""
        total = len(self.last_slots)
        before = list(range(total)) if self.active_rows is None else self.active_rows.kept
        kept = [row for row in before if not ended(row)]
        if kept and len(kept) < len(before) and self._can_leave:
            self.cache.keep_rows([before.index(row) for row in kept])
            self.active_rows = ActiveRows(kept, total)

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves accepted tokens of the active rows, see :meth:`SpeculativeCache.keep_path`."""
        if self.active_rows is not None:
            place = {row: index for index, row in enumerate(self.active_rows.kept)}
            moves = [(place[row], start, end) for row, start, end in moves]
        self.cache.keep_path(moves)

    def commit(self, roots: Sequence[int]) -> None:
        """See :meth:`SpeculativeCache.commit`."""
        self.cache.commit(roots if self.active_rows is None else self.active_rows.of_list(roots))

    def first_slots(self) -> list[int]:
        """See :meth:`SpeculativeCache.first_slots`."""
        known = self.cache.first_slots()
        if self.active_rows is None:
            return known
        rows = dict(zip(self.active_rows.kept, known, strict=True))
        return [rows.get(row, 0) for row in range(self.active_rows.total)]

    def needs_no_mask(self, cursors: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether prompts from these slots on take the masks of ``generate`` without padding, often none at all.

        Rows start on the left, so that the causal rule alone hides what stands after them.
        """
        is_causal = self.anatomy.causal or min(lengths) == max(lengths)
        return max(cursors) == 0 and self.holes is None and is_causal

    def prefill(self, tokens: torch.Tensor, cursors: Sequence[int], lengths: list[int]) -> torch.Tensor:
        """Runs the whole model over prompts and returns the logits of each row's last token.

        Args:
            tokens: ``[b, s]`` ids, or ``[b, s, d]`` embeddings; rows start on the left and may have junk on the right.
            cursors: slot of each row's first token.
            lengths: number of real tokens in each row. For a row without any, the logits are junk.

        Returns:
            ``[b, v]`` logits.
        """
        width, counts = tokens.shape[1], lengths
        lengths = [max(length, 1) for length in lengths]
        ends = None if min(lengths) == width else [length - 1 for length in lengths]
        simple = self.needs_no_mask(cursors, counts)
        observer = self.prefill_observer
        run = ForwardPass(self.full_plan, capture=-1 if observer is None else observer.layer, ends=ends)
        logits, run = self._call(
            self.model, tokens, cursors, self.full_plan, run=run, keep=1, simple=simple, counts=counts
        )
        assert logits is not None
        self.autocast = run.autocast
        if observer is not None:
            assert run.captured is not None
            observer.observe(run.captured, cursors, lengths)
        return logits[:, -1]

    def step(
        self,
        tokens: torch.Tensor,
        cursors: Sequence[int],
        plan: LayerPlan | None = None,
        *,
        nodes: TreeLayout | None = None,
        first_node: int = 0,
        state: torch.Tensor | None = None,
        capture: int = -1,
        head: bool = True,
        keep: int = 0,
        chooses: bool = False,
        after_layer: AfterLayer | None = None,
        head_input_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        head_rows: HeadRows | None = None,
    ) -> Step:
        """Runs one forward over a few tokens at the end of each row.

        Args:
            tokens: ``[b, s]`` ids.
            cursors: slot (and so position) of each row's first node.
            plan: which blocks run; the whole model by default.
            nodes: the draft tree, of which ``tokens`` are the last ``s`` nodes; a line by default.
            first_node: index of the first of ``tokens`` among the nodes; earlier nodes are in the cache already.
            state: ``[b, s, d]`` hidden states that enter layer ``capture``; the layers below are not run.
            capture: layer whose input state is returned. Without ``head``, nothing runs from there on.
            head: whether logits are needed.
            keep: how many of the last tokens need logits, 0 for all; a model may return more.
            chooses: whether the tokens with the highest logits are needed, too, where a graph can find them.
            after_layer: changes what goes from each layer to the next, see :class:`ForwardPass`.
            head_input_fn: returns the input of the head, see :class:`ForwardPass`.
            head_rows: runs in place of the head.

        Returns:
            The :class:`Step`.
        """
        plan = self.full_plan if plan is None else plan
        replay = state is not None
        run = ForwardPass(
            plan,
            start=capture if replay else 0,
            state=state,
            stop=None if head else capture,
            capture=-1 if replay else capture,
            after_layer=after_layer,
            head_input_fn=head_input_fn,
            head_rows=head_rows,
            chooses=chooses,
        )
        # Only the whole model gets the user's own arguments.
        module = self.model if head or self.following.extra else self._decoder
        logits, run = self._call(module, tokens, cursors, plan, run=run, nodes=nodes, first_node=first_node, keep=keep)
        if head and head_rows is not None and not head_rows.is_used:
            warn_once(
                f"{self.anatomy.model_name} computes logits without a call of its output head, so drafts have all "
                "tokens: leave `head` out. The output is the same."
            )
        return Step(logits if head else None, run.captured, run.exit_state, run.best)

    def run_layers(
        self,
        tokens: torch.Tensor,
        cursors: Sequence[int],
        start: int,
        stop: int,
        state: torch.Tensor | None = None,
        stop_fn: StopFn | None = None,
    ) -> torch.Tensor:
        """Runs layers ``start .. stop-1`` over a line of tokens, or fewer layers if ``stop_fn`` ends it.

        Args:
            tokens: ``[b, s]`` ids.
            cursors: slot of each row's first token.
            start, stop: layers, ``stop`` below ``L``.
            state: ``[b, s, d]`` the input of layer ``start``, ``None`` if that is 0.
            stop_fn: for each layer from ``start + 1`` to ``stop`` whether to end there, see :class:`ForwardPass`.

        Returns:
            ``[b, s, d]`` the state that enters layer ``stop``, or the layer at which it ended.
        """
        run = ForwardPass(self.full_plan, start=start, state=state, stop=stop, capture=stop, stop_fn=stop_fn)
        module = self.model if self.following.extra else self._decoder
        _, run = self._call(module, tokens, cursors, self.full_plan, run=run)
        assert run.captured is not None
        return run.captured

    def _call(
        self,
        module: nn.Module,
        tokens: torch.Tensor,
        cursors: Sequence[int],
        plan: LayerPlan,
        *,
        run: ForwardPass | None = None,
        nodes: TreeLayout | None = None,
        first_node: int = 0,
        keep: int = 0,
        simple: bool = False,
        counts: list[int] | None = None,
    ) -> tuple[torch.Tensor | None, ForwardPass]:
        """Returns the logits, ``None`` if the module has none, and the forward with its stored states."""
        self.forwards += 1
        run, rows, starts = ForwardPass(plan) if run is None else run, self.active_rows, RowNumbers.of(cursors)
        if self.fixed is not None or counts is not None or not run.is_plain:
            self.obey()
        if rows is not None:
            tokens, starts, nodes = rows.pick(tokens, 0), rows.of_numbers(starts), rows.of_layout(nodes)
            run = rows.enter(run)
        starts = starts.ahead(first_node)
        last = self._positions.of(range(len(starts)) if rows is None else rows.kept, self.last_slots)
        forward = Forward(module, tokens, starts, last, run, nodes, first_node, keep, simple, counts)
        if self.fixed is None or counts is not None:
            logits = self._eager.call(forward)
        else:
            logits = self.fixed.call(forward, self._eager)
        if rows is not None:
            logits = None if logits is None else rows.spread(logits)
            rows.leave(run)
        return logits, run
