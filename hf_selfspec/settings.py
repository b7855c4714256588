"""The settings of a ``SelfSpec``: what they are, what is allowed, and the papers' methods as settings."""

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from typing_extensions import Self

from .drafts.candidates import Candidates
from .drafts.cascade import Cascade
from .drafts.free.lookup import Lookup
from .drafts.growing import TopKTree
from .drafts.heads.adapter import EarlyExitAdapter
from .drafts.heads.exit_heads import DynamicExit
from .drafts.heads.mtp import MTP
from .drafts.layers.early_exit import EarlyExit
from .drafts.layers.quantized import Quantized
from .drafts.layers.skip_layers import SkipLayers
from .drafts.source import DraftSource
from .drafts.stop import (
    AdaptiveThreshold,
    Confidence,
    ConfidenceThreshold,
    FixedLength,
    ProductThreshold,
    RememberingRule,
    StopRule,
)
from .errors import SettingError, SettingTypeError
from .learned import saving
from .learned.knowledge import Knowledge, KnowledgeOfCall
from .modules.adapter import Adapter
from .modules.heads import ExitHeads
from .modules.linear_probe import LinearProbe
from .modules.mtp import MtpHead
from .search.skip_search import OnTheFlySearch
from .validation import MOST_DRAFT, StrPath, check_count, check_flag

# Most characters of a task's name: at four bytes each, the name of its file stays within the limit of file systems.
_LONGEST_TASK = 50


@dataclass(frozen=True)
class Settings:
    """Base class of ``SelfSpec``: its arguments, and class methods that return those of a paper.

    All raise a ``SettingError`` or ``SettingTypeError`` for a setting that is not allowed.
    """

    draft: DraftSource | CandidateGenerator = field(default_factory=lambda: Cascade((Lookup(),)))
    stop: StopRule | None = None
    tree: TopKTree | None = None
    max_draft: int = 25
    cache_dir: StrPath | None = None
    task: str = "default"
    graphs: bool | None = None
    exact: bool = False
    trust: bool = False
    _knowledge: Knowledge = field(default_factory=Knowledge, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_types(self.draft, self.stop, self.tree)
        if why := self._source.fixed_because:
            for name, value in (("stop", self.stop), ("tree", self.tree)):
                if value is not None:
                    raise SettingError(f"SelfSpec({name}={value!r}) has no effect here: {why}. Leave {name} out.")
        check_count("SelfSpec(max_draft)", self.max_draft, most=MOST_DRAFT)
        if self.cache_dir is not None:
            if not isinstance(self.cache_dir, (str, os.PathLike)):
                raise SettingTypeError(f"SelfSpec(cache_dir) must be a path or None, got {self.cache_dir!r}.")
            self._saved()
        task = self.task
        if not isinstance(task, str) or not re.fullmatch(r"[\w.-]+", task) or len(task) > _LONGEST_TASK:
            raise SettingError(
                "SelfSpec(task) names a file: give letters, digits, dots, dashes and underscores, at most "
                f"{_LONGEST_TASK} of them, got {task!r}."
            )
        check_flag("SelfSpec(exact)", self.exact)
        check_flag("SelfSpec(trust)", self.trust)
        if self.graphs is not None:
            check_flag("SelfSpec(graphs)", self.graphs)

    @property
    def _source(self) -> DraftSource:
        """The draft source; a ``CandidateGenerator`` is wrapped in one."""
        return self.draft if isinstance(self.draft, DraftSource) else Candidates(self.draft)

    def _knowledge_of(self, model: PreTrainedModel, do_sample: bool = False, has_rows: bool = False) -> KnowledgeOfCall:
        """What was learned of a model, for calls that draw tokens or not, with several rows or one."""
        kind = f"{'sampled' if do_sample else 'greedy'}{', several rows' if has_rows else ''}"
        return KnowledgeOfCall(self._knowledge, model, kind, self._saved, self.cache_dir, self.task)

    def _saved(self) -> dict[str, Any]:
        """The settings that are saved, as JSON values; raises an error if they cannot be."""
        flags = [name for name in ("exact", "trust") if getattr(self, name)]
        names = ("draft", "stop", "tree", "max_draft", *flags)
        return {name: saving.encode(getattr(self, name), f"SelfSpec({name})") for name in names}

    @classmethod
    def lookup(cls, stored_tokens: int = 65_536) -> Self:
        """Free drafts only, from the text, earlier texts and the model's own logits; for any model.

        Args:
            stored_tokens: tokens of earlier texts to keep, see :class:`Lookup`; 0 for none.
        """
        return cls(draft=Lookup(stored_tokens))

    @classmethod
    def quantized(cls) -> Self:
        """Free drafts, and the model itself in four bits; for bfloat16 models, also of open text.

        Packed weights take a third of the model's memory, see :class:`Quantized`.
        """
        return cls(draft=Cascade((Lookup(), Quantized())))

    @classmethod
    def layerskip(
        cls,
        exit_layer: int | None = None,
        num_draft: int | None = None,
        stop: StopRule | None = None,
        max_draft: int = 12,
    ) -> Self:
        """LayerSkip's self-speculation, for models trained with :class:`EarlyExitLoss` and :class:`LayerDropout`.

        Without an exit layer five are compared, evenly spread over the depth, by rounds that are timed while the model
        generates: the fastest one drafts, and none where none pays. Greedy and sampled, single and batched calls are
        measured apart. :meth:`choice` returns the fastest.

        Args:
            exit_layer: the exit layer ``E``, from 1 to ``L-1``.
            num_draft: tokens in a draft (LayerSkip §4.3), 3 by default.
            stop: another stop rule; only one of this and ``num_draft`` is allowed.
            max_draft: maximum number of tokens in a draft (12 in the paper).
        """
        if num_draft is not None and stop is not None:
            raise SettingError(
                f"SelfSpec.layerskip(num_draft={num_draft!r}, stop={stop!r}): give one of the two; max_draft bounds "
                "the drafts of a stop rule."
            )
        check_count("SelfSpec.layerskip(max_draft)", max_draft, most=MOST_DRAFT)
        if num_draft is not None:
            stop = FixedLength(num_draft)
            max_draft = max(max_draft, num_draft)
        return cls(draft=EarlyExit(exit_layer), stop=stop, max_draft=max_draft)

    @classmethod
    def swift(
        cls,
        ratio: float | Literal["auto"] = "auto",
        search: OnTheFlySearch | None = None,
        stop: StopRule | None = None,
        tree: TopKTree | None = None,
        max_draft: int = 25,
    ) -> Self:
        """SWIFT: needs no training and no preparation; the blocks to skip are found while text is generated.

        Args:
            ratio: share of the blocks that are skipped, see :class:`SkipLayers`.
            search: when sets are tried and when the search ends, by default as in the paper, see
                :class:`OnTheFlySearch`.
            stop: when a draft ends, at a confidence below 0.8 by default.
            tree: siblings at each depth, ``TopKTree()`` for the paper's.
            max_draft: maximum number of tokens in a draft (25 in the paper).
        """
        draft = SkipLayers(search=OnTheFlySearch() if search is None else search, ratio=ratio)
        return cls(draft, stop or ConfidenceThreshold(), tree, max_draft)

    @classmethod
    def adaspeed(
        cls,
        exit_layer: int | None = None,
        probe: Confidence | StrPath | None = None,
        max_draft: int = 12,
    ) -> Self:
        """AdaSPEED: early exit until the product of the draft's confidences falls below a threshold that adapts.

        As in the paper the threshold begins at 0.8 and follows the acceptance rate (its appendix A).

        Args:
            exit_layer: the exit layer ``E``, from 1 to ``L-1``; ``None`` for the probe's, and without a probe for the
                fastest, see :meth:`layerskip`.
            probe: what ``fit_probe`` returned, or the folder or Hub repository that holds it; or a function that
                returns the probability that a drafted token is accepted, from its logits ``[b, v]`` and the hidden
                state ``[b, d]`` they were computed from. ``None`` for the top-1 probability.
            max_draft: maximum number of tokens in a draft.
        """
        confidence = LinearProbe.from_pretrained(probe) if isinstance(probe, (str, os.PathLike)) else probe
        if isinstance(confidence, LinearProbe):
            if exit_layer not in (None, confidence.exit_layer):
                raise SettingError(
                    f"SelfSpec.adaspeed(exit_layer={exit_layer!r}): the probe was fitted to the states of exit layer "
                    f"{confidence.exit_layer}. Leave exit_layer out, or fit another probe."
                )
            exit_layer = confidence.exit_layer
        stop = AdaptiveThreshold(ProductThreshold(0.8, confidence))
        return cls(draft=EarlyExit(exit_layer), stop=stop, max_draft=max_draft)

    @classmethod
    def kangaroo(cls, adapter: Adapter | StrPath, stop: StopRule | None = None, max_draft: int = 6) -> Self:
        """Kangaroo: a shallow exit followed by an adapter, until the confidence falls below 0.6.

        Args:
            adapter: what ``fit_adapter`` returned, or the folder or Hub repository that holds it.
            stop: when a draft ends, at a confidence below 0.6 by default.
            max_draft: maximum number of tokens in a draft (6 in the paper).
        """
        return cls(draft=EarlyExitAdapter(adapter), stop=stop or ConfidenceThreshold(0.6), max_draft=max_draft)

    @classmethod
    def dssd(cls, heads: ExitHeads | StrPath, epsilon: float = 0.9, max_draft: int = 32) -> Self:
        """DSSD: each token is drafted at the first exit head that is sure enough, until none is.

        Args:
            heads: what ``fit_exit_heads`` returned, or the folder or Hub repository that holds it.
            epsilon: the target share of drafted tokens that are accepted, estimated by the heads' calibration with
                drafts of at most 32 tokens; each ``SelfSpec`` can have its own without a new calibration. (In the
                paper it is how often single heads are right; of a whole draft, less is accepted.)
            max_draft: maximum number of tokens in a draft (32 in the paper).

        Raises:
            SettingError: there are no such heads, or they do not reach ``epsilon``.
        """
        return cls(draft=DynamicExit(heads, epsilon), stop=FixedLength(max_draft), max_draft=max_draft)

    @classmethod
    def mtp(cls, head: MtpHead | StrPath | None = None, stop: StopRule | None = None, max_draft: int = 6) -> Self:
        """Free drafts, and MTP layers that read the model's last states.

        Args:
            head: the layers, or the folder or Hub repository of them or of an assistant of Gemma 4; ``None`` for the
                layers that ship with the model, see :func:`hf_selfspec.load_mtp`.
            stop: when a draft of the layers ends, where the product of confidences falls below 0.4 by default.
            max_draft: maximum number of tokens in a draft.
        """
        return cls(draft=Cascade((Lookup(), MTP(head))), stop=stop, max_draft=max_draft)


def _check_types(draft: Any, stop: Any, tree: Any) -> None:
    if not isinstance(draft, (DraftSource, CandidateGenerator)):
        raise SettingTypeError(
            "SelfSpec(draft) must be EarlyExit(layer), SkipLayers(...), EarlyExitAdapter(...), "
            f"Quantized(...), MTP(...), DynamicExit(...), another DraftSource or a CandidateGenerator, got {draft!r}."
        )
    is_rule = callable(stop) or isinstance(stop, RememberingRule)
    if stop is not None and (not is_rule or isinstance(stop, type)):
        raise SettingTypeError(
            "SelfSpec(stop) must be FixedLength(n), ConfidenceThreshold(p), ProductThreshold(p), "
            "AdaptiveThreshold(rule) or a function of (input_ids, logits, hidden_states), or None to have it "
            f"chosen, got {stop!r}."
        )
    if tree is not None and not isinstance(tree, TopKTree):
        raise SettingTypeError(f"SelfSpec(tree) must be a TopKTree or None, got {tree!r}.")
