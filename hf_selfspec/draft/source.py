"""The interface of draft sources: the settings, the session that they start in, and the drafter that runs in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from ..batch import Draft, Text, Verdict
from ..errors import UnsupportedOptionError
from ..grammar.rows import Constraint
from ..learned.knowledge import KnowledgeOfCall
from ..model.anatomy import Anatomy
from ..model.parallel import is_tensor_parallel
from ..model.plan import LayerPlan
from ..model.target import Target
from ..stats import GenerationStats
from ..stop.rules import Memory, StopRule, longest_draft
from ..verify.scoring import Scorer
from ..verify.tree import Tree
from .blocks import DraftBlocks, FindChoice

_S = TypeVar("_S", bound="DraftSource")

# Returns the seconds of rounds with 0, 1, 2, ... drafted tokens.
RoundSeconds = Callable[[], Sequence[float]]


class Drafter(Protocol):
    """Proposes tokens while one generation runs.

    A drafter may have further attributes. ``needs_ended_rows`` is whether forwards still run over rows that have ended,
    since it will look at their text; a cascade does not wait for them. ``knows_grammars`` is whether it drafts the
    tokens that grammars force as far as that pays, so that none are added. For a :class:`Cascade`,
    ``expected_speedup`` is its current estimate of how much faster it is than rounds without a draft: 0 where it would
    not draft, ``None`` where it does not know. ``observe(text, verdicts, logits)`` is called in place of
    :meth:`update` after a round in which another source drafted. ``look(logits)`` is called before :meth:`update` and
    returns what will be read of the logits ``[b, t + 1, v]``, so that the verdict is read in the same transfer.
    """

    @property
    def steps(self) -> int:
        """Number of the draft's forwards so far, each counted once for the whole batch."""

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """Drafts after each row's last token.

        Args:
            text: the batch; the model's cache holds everything before each row's last token.
            max_new: for each row the maximum number of tokens; a row with 0 takes no part.
        """

    def update(self, text: Text, verdicts: list[Verdict], logits: Any) -> None:
        """Learns which of the draft's tokens were accepted.

        Args:
            text: the batch with the new tokens.
            verdicts: for each row what verification decided.
            logits: ``[b, t + 1, v]`` of the full model at the last token and at each drafted one.
        """

    def finish(self, text: Text) -> None:
        """Learns from the whole text, after the generation."""

    def report(self, stats: GenerationStats) -> None:
        """Adds what only the drafter knows to the statistics of the call."""


class FixedDrafter:
    """Base class of drafters that learn nothing and have nothing to report."""

    steps = 0

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """Drafts nothing."""
        return Draft.none(text)

    def update(self, text: Text, verdicts: list[Verdict], logits: Any) -> None:
        """Learns nothing."""

    def finish(self, text: Text) -> None:
        """Learns nothing."""

    def report(self, stats: GenerationStats) -> None:
        """Adds nothing."""


@dataclass(frozen=True)
class Limits:
    """When drafting ends and how wide it is.

    Attributes:
        stop: the stop rule.
        max_draft: maximum number of tokens on the line.
        tree: sibling policy, or ``None`` for a line.
        eos_tokens: tokens that end a draft.
        memory: what the stop rule keeps from call to call.
    """

    stop: StopRule
    max_draft: int
    tree: Tree | None = None
    eos_tokens: frozenset[int] = frozenset()
    memory: Memory = field(default_factory=Memory)

    def slots(self, new_tokens: int, vocabulary: int) -> int:
        """Number of slots that a verification usually needs, with siblings of an unsure draft's last token.

        Args:
            new_tokens: number of tokens that the call may still get, which no draft exceeds.
            vocabulary: ``v``, the maximum number of candidates at one depth.
        """
        widest = 1 if self.tree is None else min(self.tree.most, vocabulary)
        return min(self.longest, new_tokens) + widest

    @property
    def longest(self) -> int:
        """Maximum number of tokens on the line."""
        return longest_draft(self.stop, self.max_draft)


@dataclass(frozen=True)
class Session:
    """One generation, as a source gets it at the start.

    Attributes:
        target: the model with its cache.
        scorer: logits processors for drafts: those that keep no state.
        stop, tree, max_draft: see :class:`SelfSpec`; ``None`` for the source's own choice.
        eos_tokens: ids that end a row.
        new_tokens: number of tokens for which slots are reserved at first.
        max_new: maximum number of tokens that the call can generate, ``None`` if unlimited.
        stateful: names of processors and criteria that may keep a state.
        knowledge: what is known from earlier calls.
        is_synced: whether several processes run the same forwards.
        in_cascade: whether other sources draft where this one does not.
        round_seconds: the cost curve from timed rounds of other sources; empty if there are none.
        constraint: what grammars allow and force; falsy without grammars. Forbidden tokens are cut from any draft.
    """

    target: Target
    scorer: Scorer
    stop: StopRule | None
    tree: Tree | None
    max_draft: int
    eos_tokens: frozenset[int]
    new_tokens: int
    max_new: int | None
    stateful: tuple[str, ...]
    knowledge: KnowledgeOfCall
    is_synced: bool = False
    in_cascade: bool = False
    round_seconds: RoundSeconds = tuple
    constraint: Constraint = field(default_factory=Constraint)

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model."""
        return self.target.anatomy

    @property
    def num_rows(self) -> int:
        """``b``."""
        return len(self.target.roots)

    @property
    def vocabulary(self) -> int:
        """``v``, number of tokens that the model can generate."""
        model = self.target.model
        return max(model.config.get_text_config(decoder=True).vocab_size, model.get_input_embeddings().num_embeddings)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the model runs in several processes, whose timings differ."""
        return is_tensor_parallel(self.target.model)

    @property
    def takes_trees(self) -> bool:
        """Whether drafts can be trees."""
        return self.anatomy.tree and self.target.padding is None

    def limits(self, usual_stop: StopRule) -> Limits:
        """The limits of drafts, with ``usual_stop`` where no stop rule was given."""
        return Limits(
            self.stop or usual_stop, self.max_draft, self.tree, self.eos_tokens, memory=self.knowledge.memory()
        )

    def with_settings(self, **settings: Any) -> Session:
        """A copy with other attributes."""
        return replace(self, **settings)


class DraftSource:
    """Settings of a way to draft. To write your own, derive a frozen dataclass from it.

    :meth:`start` returns the drafter of one generation. The decode loop, the controller of a cascade and saving use
    only this interface. ``hf_selfspec.register("draft")`` lets a source be saved by its name.

    Attributes:
        lossless: whether the output is the model's own. If not, a saved config must not choose the source.
    """

    lossless = True

    @property
    def is_optional(self) -> bool:
        """Whether a cascade leaves it out without a warning where it cannot draft for a model."""
        return False

    @property
    def fixed_because(self) -> str:
        """Why stop rules and trees have no effect, empty if they have."""
        return ""

    @property
    def takes_forwards(self) -> bool:
        """Whether all drafts take forwards of the model, or of parts of it."""
        return True

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

    def start(self, session: Session) -> Drafter:
        """Returns the drafter of one generation.

        Raises:
            SelfSpecError: the source cannot draft for this model or call. Nothing was generated yet.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method `start(session) -> Drafter`")

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        """Checks what can be checked before prompts are laid out; by default nothing.

        Args:
            anatomy: the parts of the model.
            max_new: maximum number of tokens that the call can generate, ``None`` if unlimited.

        Raises:
            SelfSpecError: the source cannot draft for this model or call.
        """

    def part(self, kind: type[_S]) -> _S | None:
        """Returns the source of a class that this one is or contains; ``None`` if there is none."""
        return self if isinstance(self, kind) else None

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        """Returns the part of a model that drafts as this source does, for :meth:`SelfSpec.export_draft`.

        Args:
            anatomy: the parts of the model.
            find_choice: returns what was found for the model.

        Raises:
            SelfSpecError: there is no such part.
        """
        raise UnsupportedOptionError(
            f"{self!r} cannot be exported: it drafts with more than layers of the model, but a checkpoint has nothing "
            "else. Export EarlyExit(layer), SkipLayers(attention=[...], mlp=[...]) or an adapter."
        )

    def whole_model(self, anatomy: Anatomy) -> LayerPlan | None:
        """The blocks that stand in for the whole model, ``None`` for all of it."""
        return None
