"""The interface of draft sources: the settings, the session that they start in, and the drafter that runs in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ..batch import Draft, Text, Verdict
from ..errors import UnsupportedOptionError
from ..learned.knowledge import KnowledgeOfCall
from ..model.anatomy import Anatomy
from ..model.attention.exact import MOST_TOKENS
from ..model.forks import cached_property
from ..model.module_tools import is_tensor_parallel, vocabulary_of
from ..model.target import Target
from ..modules.draft_module import DraftModule, module_of
from ..stats import GenerationStats
from .grammar.rows import GrammarMask
from .growing import TopKTree
from .scoring import Scorer
from .stop import Memory, StopRule

_M = TypeVar("_M", bound=DraftModule)

# See :meth:`Session.cap_by_logit_memory`.
_LOGITS = 2**26


class Drafter:
    """Base class of drafters, which propose tokens while one generation runs; by itself it drafts and learns nothing.

    Attributes:
        steps: number of the draft's forwards so far, each counted once for the whole batch.
        variant: what it drafts with at present, where that changes; results of another variant do not count.
        expected_speedup: how much faster than rounds without a draft it expects to be now: 0 where it would not draft,
            ``None`` where it does not know, infinity if it makes no estimates and always drafts.
        observe: called as ``observe(text, verdicts, logits)`` in place of :meth:`update` after a round in which another
            source drafted.
        look: called as ``look(logits)`` with a :class:`~hf_selfspec.model.logits.Logits` before :meth:`update`; returns
            what will be read of them, so that the verdict is read in the same transfer. A GPU may keep the likeliest
            tokens alone, without ``values``, unless ``reads_logits``.
        whole: how many tokens its drafts have where one forward makes them and nothing ends them, so that a controller
            cuts them to as many as pay; else 0.
        reads_logits: whether :meth:`update` looks at logits; otherwise it gets ``None``.
    """

    steps: int = 0
    variant: Any = None
    expected_speedup: float | None = math.inf
    observe: Callable[[Text, list[Verdict], Any], None] | None = None
    look: Callable[[Any], Any] | None = None
    whole: int = 0
    reads_logits: bool = True

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """Drafts after each row's last token.

        Args:
            text: the batch; the model's cache holds everything before each row's last token.
            max_new: for each row the maximum number of tokens; a row with 0 takes no part.
        """
        return Draft.none(text)

    def update(self, text: Text, verdicts: list[Verdict], logits: Any) -> None:
        """Learns which of the draft's tokens were accepted.

        Args:
            text: the batch with the new tokens.
            verdicts: for each row what verification decided.
            logits: ``[b, t + 1, v]`` of the full model at the last token and at each drafted one, if it reads them.
        """

    def finish(self, text: Text) -> None:
        """Learns from the whole text, after the generation."""

    def report(self, stats: GenerationStats) -> None:
        """Adds what only the drafter knows to the statistics of the call."""


@dataclass(frozen=True)
class Session:
    """One generation, as a source gets it at the start.

    Attributes:
        target: the model with its cache.
        scorer: logits processors for drafts: those that keep no state.
        stop, tree, max_draft: see :class:`SelfSpec`; ``None`` for the source's own choice.
        eos_tokens: ids that end a row.
        new_tokens: number of tokens for which slots are reserved at first.
        knowledge: what is known from earlier calls.
        is_synced: whether several processes run the same forwards.
        name: the source's name in a cascade, under which its findings are kept; empty for a source that drafts alone.
        grammars: those that forbid tokens in drafts, too, and draft what they force.
    """

    target: Target
    scorer: Scorer
    stop: StopRule | None
    tree: TopKTree | None
    max_draft: int
    eos_tokens: frozenset[int]
    new_tokens: int
    knowledge: KnowledgeOfCall
    is_synced: bool = False
    name: str = ""
    grammars: Sequence[GrammarMask] = ()

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model."""
        return self.target.anatomy

    @property
    def num_rows(self) -> int:
        """``b``."""
        return len(self.target.roots)

    @cached_property
    def vocabulary(self) -> int:
        """``v``, number of tokens that the model can generate."""
        return vocabulary_of(self.target.model)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the model runs in several processes, whose timings differ."""
        return is_tensor_parallel(self.target.model)

    @cached_property
    def longest(self) -> int:
        """Maximum number of tokens in a draft, or on the line of a tree; a rule's ``max_draft`` may lower it."""
        return self.cap_by_logit_memory(min(getattr(self.stop, "max_draft", self.max_draft), self.max_draft))

    def cap_by_logit_memory(self, tokens: int) -> int:
        """``tokens``, or fewer where with so many drafted tokens of a row a verification's float32 logits would not be
        small (below 64 MiB, or 1/64 of the model), or exact results not possible."""
        model, size = self.target.model, 4 * self.num_rows * self.vocabulary
        if self.target.is_exact:
            tokens = min(tokens, MOST_TOKENS - 1)
        if (tokens + 1) * size <= _LOGITS:
            return tokens
        return min(tokens, max(1, max(_LOGITS, model.get_memory_footprint() // 64) // size - 1))

    @property
    def memory(self) -> Memory:
        """What the stop rule keeps from call to call."""
        return self.knowledge.of(f"stop rule {self.name}".rstrip(), lambda _: Memory())

    def with_usual_stop(self, usual_stop: StopRule) -> Session:
        """The session with ``usual_stop`` where no stop rule was given."""
        return replace(self, stop=self.stop or usual_stop)


class DraftSource:
    """Settings of a way to draft. To write your own, derive a frozen dataclass from it.

    :meth:`start` returns the drafter of one generation. The decode loop, the controller of a cascade and saving use
    only this interface. ``hf_selfspec.register`` lets a source be saved by its name.

    Attributes:
        takes_forwards: whether all drafts take forwards of the model, or of parts of it.
    """

    takes_forwards = True

    @property
    def fixed_because(self) -> str:
        """Why stop rules and trees have no effect, empty if they have."""
        return ""

    def check_synced(self) -> None:
        """Checks that drafts leave the forwards of several processes in step.

        Raises:
            UnsupportedOptionError: they do not.
        """
        if self.takes_forwards:
            raise UnsupportedOptionError(
                "synced_gpus (DeepSpeed ZeRO-3, FSDP over several processes) needs the same forwards on every process, "
                f"which drafts by {self!r} do not keep. Take SelfSpec.lookup(), whose drafts take no forward, or call "
                "generate without `assistant`."
            )

    def arms(self, anatomy: Anatomy) -> Sequence[DraftSource]:
        """Returns the sources between which the controller chooses in place of this one, by default it alone."""
        return (self,)

    def start(self, session: Session) -> Drafter:
        """Returns the drafter of one generation.

        Raises:
            SelfSpecError: the source cannot draft for this model or call. Nothing was generated yet.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method `start(session) -> Drafter`")

    def check(self, anatomy: Anatomy) -> None:
        """Checks what can be checked before prompts are laid out; by default nothing.

        Raises:
            SelfSpecError: the source cannot draft for this model or call.
        """


class FittedSource(DraftSource, Generic[_M]):
    """A source with a fitted ``module``, which a setting holds, or names the folder of."""

    module: _M

    def _load(self, setting: str, module_class: type[DraftModule]) -> None:
        """Loads what a setting holds or names; a relative path becomes a whole one."""
        kept, module = module_of(f"{type(self).__name__}({setting})", getattr(self, setting), module_class)
        object.__setattr__(self, setting, kept)
        object.__setattr__(self, "module", module)
