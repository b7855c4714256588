"""``SelfSpec``: what the user configures."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from . import pictures, saving
from .call import FIRST_SLOTS, Call
from .draft.adapter import EarlyExitAdapter
from .draft.candidates import check_generator
from .draft.early_exit import EarlyExit, EarlyExitOnly
from .draft.exit_heads import DynamicExit
from .draft.partial import Limits, PartialDraft
from .draft.skip_layers import SkipLayers
from .drafting import Drafting
from .errors import SettingError, SettingTypeError
from .files import reported
from .learned import Learned
from .model.anatomy import Anatomy, causal_lm
from .model.cache import SpeculativeCache
from .model.target import Target
from .notices import say_once
from .parts.adapter import Adapter
from .parts.heads import ExitHeads
from .parts.probe import LinearProbe
from .search.choice import ExitChoice, SkipChoice
from .search.on_the_fly import ClosestLayers, OnTheFlySearch, Search
from .search.skip_search import SkipSearch
from .settings import MOST_DRAFT, check_count
from .stop.adaptive import AdaptiveThreshold
from .stop.rules import Confidence, ConfidenceThreshold, FixedLength, ProductThreshold, RememberingRule, StopRule
from .types import GenerationStats
from .verify.scoring import Scorer
from .verify.tree import Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Characters in the name of a task: of four bytes each, with the rest of its file's name, they are what a folder takes.
_LONGEST_TASK = 50


# Under this name a saved generation config holds the settings of its ``assistant``.
CONFIG_KEY = "hf_selfspec"


@dataclass(frozen=True)
class SelfSpec:
    """Self-speculative decoding: part of a model drafts, the whole model verifies.

    ``model.generate(**inputs, assistant=SelfSpec())`` gives the tokens of plain ``generate``, faster. A ``SelfSpec``
    holds settings and can be used again, with other models and by several threads. Copies, deep ones too, share what
    was learned: tools such as lm-eval copy their arguments for every batch. A new ``SelfSpec`` begins anew.

    Args:
        draft: which part of the model drafts, :class:`EarlyExit`, :class:`SkipLayers`, :class:`EarlyExitAdapter` or
            :class:`DynamicExit`, or any ``CandidateGenerator`` of transformers that needs ids alone (in a batch each
            row after the first has a deep copy of it, which shares its modules). By default the layers to skip are
            found while generating, see :class:`ClosestLayers`. :class:`EarlyExitOnly` generates with the first layers
            alone, which changes the output (and returns no cache).
        stop: when a draft ends, :class:`FixedLength`, :class:`ConfidenceThreshold`, :class:`ProductThreshold`,
            :class:`AdaptiveThreshold` or any function of ``(input_ids [b, s], logits [b, v], hidden_states [b, d])``
            that returns a ``BoolTensor [b]``. ``None``:
            what is fastest, as the probe of an early exit or the search for layers to skip finds, and a confidence
            below 0.8 for a given set. A ``CandidateGenerator`` and :class:`EarlyExitOnly` take none.
        tree: sibling tokens at each depth of the draft, or ``None`` for a line; not for those two.
        max_draft: most tokens in a draft, 1,024 at most.
        cache_dir: folder in which what is found about models lasts, so that the next process starts with it. Files are
            for one model (its weights, not its name), these settings and one task.
        task: name of what the model is used for; another kind of text is another task.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    draft: EarlyExit | SkipLayers | EarlyExitAdapter | DynamicExit | EarlyExitOnly | CandidateGenerator = field(
        default_factory=lambda: SkipLayers(search=ClosestLayers())
    )
    stop: StopRule | None = None
    tree: Tree | None = None
    max_draft: int = 25
    cache_dir: str | os.PathLike[str] | None = None
    task: str = "default"
    _learned: Learned = field(default_factory=Learned, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = (EarlyExit, SkipLayers, EarlyExitAdapter, DynamicExit, EarlyExitOnly, CandidateGenerator)
        if not isinstance(self.draft, kinds):
            raise SettingTypeError(
                "SelfSpec(draft) must be EarlyExit(layer), SkipLayers(...), EarlyExitAdapter(...), DynamicExit(...) or "
                f"a CandidateGenerator, got {self.draft!r}."
            )
        is_rule = callable(self.stop) or isinstance(self.stop, RememberingRule)
        if self.stop is not None and (not is_rule or isinstance(self.stop, type)):
            raise SettingTypeError(
                "SelfSpec(stop) must be FixedLength(n), ConfidenceThreshold(p), ProductThreshold(p), "
                "AdaptiveThreshold(rule) or a function of (input_ids, logits, hidden_states), or None to have it "
                f"chosen, got {self.stop!r}."
            )
        if self.tree is not None and not isinstance(self.tree, Tree):
            raise SettingTypeError(f"SelfSpec(tree) must be a TopKTree, a CostTree or None, got {self.tree!r}.")
        self._check_whole_drafts()
        check_count("SelfSpec(max_draft)", self.max_draft, most=MOST_DRAFT)
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, os.PathLike)):
            raise SettingTypeError(f"SelfSpec(cache_dir) must be a path or None, got {self.cache_dir!r}.")
        if not isinstance(self.task, str) or not re.fullmatch(r"[\w.-]+", self.task) or len(self.task) > _LONGEST_TASK:
            raise SettingError(
                "SelfSpec(task) names a file: give letters, digits, dots, dashes and underscores, at most "
                f"{_LONGEST_TASK} of them, got {self.task!r}."
            )
        if self.cache_dir is not None:
            self._settings(checked=True)

    def _check_whole_drafts(self) -> None:
        """Checks drafts whose tokens come all at once, or not at all: nothing ends them early or branches."""
        if isinstance(self.draft, CandidateGenerator):
            check_generator(self.draft)
            why = f"{type(self.draft).__name__} drafts as many tokens as it returns, in a line"
        elif isinstance(self.draft, EarlyExitOnly):
            why = f"{self.draft!r} generates without drafts"
        else:
            return
        for name, value in (("stop", self.stop), ("tree", self.tree)):
            if value is not None:
                raise SettingError(f"SelfSpec({name}={value!r}) has no effect here: {why}. Leave {name} out.")

    @classmethod
    def layerskip(
        cls,
        exit_layer: int | None = None,
        num_draft: int | None = None,
        stop: StopRule | None = None,
        max_draft: int = 12,
    ) -> SelfSpec:
        """LayerSkip's self-speculation, for models trained with :class:`EarlyExitLoss` and :class:`LayerDropout`.

        What is not given is chosen for each model by a measured probe on the first 1,024 tokens that it generates: the
        exit layer and the draft length or threshold with the most expected tokens per second (no draft at all where
        none pays). Greedy and sampled, single and batched calls choose for themselves. :meth:`choice` tells what was
        found.

        Args:
            exit_layer: the exit layer ``E``, from 1 to ``L-1``.
            num_draft: tokens in a draft (LayerSkip §4.3).
            stop: another stop rule, in the place of ``num_draft``.
            max_draft: most tokens in a draft (12 in the paper).

        Raises:
            SettingError, SettingTypeError: a setting is not allowed, or both ``num_draft`` and ``stop`` are given.
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
        search: Search | None = None,
        stop: StopRule | None = None,
        tree: Tree | None = None,
        max_draft: int = 25,
    ) -> SelfSpec:
        """SWIFT: nothing trained, nothing prepared; which blocks are skipped is found while text is generated.

        Args:
            ratio: share of the blocks that are skipped, see :class:`SkipLayers`.
            search: when sets are tried and when that ends, by default as in the paper, see :class:`OnTheFlySearch`;
                or :class:`ClosestLayers`.
            stop: when a draft ends, confidence below 0.8 by default.
            tree: siblings at each depth, e.g. ``TopKTree()`` with the paper's widths, or ``CostTree()``.
            max_draft: most tokens in a draft (25 in the paper).

        Raises:
            SettingError, SettingTypeError: a setting is not allowed.
        """
        draft = SkipLayers(search=OnTheFlySearch() if search is None else search, ratio=ratio)
        return cls(draft, stop or ConfidenceThreshold(), tree, max_draft)

    @classmethod
    def adaspeed(
        cls,
        exit_layer: int | str | os.PathLike[str] | LinearProbe | None = None,
        probe: Confidence | str | os.PathLike[str] | None = None,
        max_draft: int = 12,
    ) -> SelfSpec:
        """AdaSPEED: early exit until the product of the draft's confidences falls below a threshold that adapts.

        As in the paper the threshold begins at 0.8 and follows the acceptance rate (its appendix A).

        Args:
            exit_layer: the exit layer ``E``, from 1 to ``L-1``; ``None`` for the probe's, and without one for the
                fastest, see :meth:`layerskip`. Or a probe, in the place of both.
            probe: what ``fit_probe`` gave, or the folder or Hub repository that holds it; or a function that says how
                probable it is that a drafted token is accepted, from its logits ``[b, v]`` and the state ``[b, d]``
                behind them. ``None`` for the top-1 probability.
            max_draft: most tokens in a draft.

        Raises:
            SettingError, SettingTypeError: a setting is not allowed.
        """
        if isinstance(exit_layer, (str, os.PathLike, LinearProbe)):
            if probe is not None:
                raise SettingError(f"SelfSpec.adaspeed({exit_layer!r}, {probe!r}): give one probe.")
            exit_layer, probe = None, exit_layer
        found = LinearProbe.load(probe) if isinstance(probe, (str, os.PathLike)) else probe
        if isinstance(found, LinearProbe):
            if exit_layer not in (None, found.exit_layer):
                raise SettingError(
                    f"SelfSpec.adaspeed(exit_layer={exit_layer!r}): the probe was fitted to the states of exit layer "
                    f"{found.exit_layer}. Leave exit_layer out, or fit another probe."
                )
            exit_layer = found.exit_layer
        stop = AdaptiveThreshold(ProductThreshold(0.8, found))
        return cls(draft=EarlyExit(exit_layer), stop=stop, max_draft=max_draft)

    @classmethod
    def kangaroo(
        cls,
        adapter: Adapter | str | os.PathLike[str],
        stop: StopRule | None = None,
        max_draft: int = 6,
    ) -> SelfSpec:
        """Kangaroo: a shallow exit and an adapter behind it, until the confidence falls below 0.6.

        Args:
            adapter: what ``fit_adapter`` gave, or the folder or Hub repository that holds it.
            stop: when a draft ends, confidence below 0.6 by default.
            max_draft: most tokens in a draft (6 in the paper).

        Raises:
            SettingError, SettingTypeError: there is no such adapter, or a setting is not allowed.
        """
        draft = EarlyExitAdapter(adapter)
        return cls(draft=draft, stop=stop or ConfidenceThreshold(0.6), max_draft=max_draft)

    @classmethod
    def dssd(
        cls,
        heads: ExitHeads | str | os.PathLike[str],
        epsilon: float = 0.9,
        metric: str | None = None,
        max_draft: int = 32,
    ) -> SelfSpec:
        """DSSD: each token is drafted at the first exit head that is sure enough, until none is.

        Args:
            heads: what ``fit_exit_heads`` gave, or the folder or Hub repository that holds it.
            epsilon: the share of drafted tokens that is to be accepted, as far as the heads' calibration with drafts of
                at most 32 tokens tells; can be another one for each ``SelfSpec`` without calibrating again. (DSSD's is
                how often single heads are right; of a draft, less is accepted.)
            metric: how confidence is measured, see ``calibrate_exit_heads``; that of the heads by default.
            max_draft: most tokens in a draft (32 in the paper).

        Raises:
            SettingError, SettingTypeError: there are no such heads, they do not reach ``epsilon``, or a setting is not
                allowed.
        """
        draft = DynamicExit(heads, epsilon, metric)
        return cls(draft=draft, stop=FixedLength(max_draft), max_draft=max_draft)

    @classmethod
    def early_exit_only(
        cls,
        layer: int | None = None,
        *,
        heads: ExitHeads | str | os.PathLike[str] | None = None,
        epsilon: float = 0.9,
        metric: str | None = None,
        max_draft: int = 32,
    ) -> SelfSpec:
        """Generation with a part of the model alone. **The output is not the model's own.**

        Papers compare with it: the first ``layer`` layers (LayerSkip, Tables 1, 2 and 11), or each token from the first
        exit head that is sure enough, and from the whole model where none is (DSSD §3.4.2).

        Args:
            layer: the exit layer ``E``.
            heads, metric, max_draft: in the place of a layer, see :meth:`dssd`; the whole model runs over what was
                taken early at the next token that is its own, and after ``max_draft`` tokens at the latest.
            epsilon: how often each head is to be right where it is believed (DSSD §3.4).

        Raises:
            SettingError, SettingTypeError: both or neither is given, or one is not allowed.
        """
        if (layer is None) == (heads is None):
            raise SettingError(
                f"SelfSpec.early_exit_only(layer={layer!r}, heads={heads!r}): give one of the two, an exit layer or "
                "exit heads."
            )
        if heads is None:
            assert layer is not None
            return cls(draft=EarlyExitOnly(layer), stop=None)
        draft = DynamicExit(heads, epsilon, metric, lossless=False)
        return cls(draft=draft, stop=FixedLength(max_draft), max_draft=max_draft)

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfSpec:
        return copy.copy(self)

    def choice(self, model: Any) -> ExitChoice | SkipChoice | None:
        """What a probe or a search has chosen for the last kind of call of ``model``, ``None`` before that.

        A choice holds for a model object, whatever adapters are active: take a new ``SelfSpec`` after changing them.

        Args:
            model: a causal LM of transformers, or a PEFT model around one.

        Raises:
            SettingTypeError: it is neither.
        """
        found = self._learned.latest(causal_lm(model, "SelfSpec.choice"))
        return None if found is None else found.choice

    def save_pretrained(self, folder: str | os.PathLike[str], model: Any = None) -> None:
        """Writes settings and findings to ``folder/selfspec.json``, whole or not at all.

        Args:
            folder: made if it does not exist; a file from before is replaced.
            model: the model whose findings to keep and to which the file will belong, a causal LM of transformers or a
                PEFT model around one. It can be left out where only one was used, or none.

        Raises:
            SettingError, SettingTypeError: the settings hold a function or generator of your own, several models were
                used and none is named, ``model`` is no model, or the file cannot be written.
        """
        inner = self._only_model("SelfSpec.save_pretrained", model)
        settings, path = self._settings(checked=True), Path(folder) / saving.FILE_NAME
        with reported(path):
            self._learned.save(path, inner, settings)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> SelfSpec:
        """What :meth:`save_pretrained` has written; another model than it was saved for is refused when it is used.

        A file sets ``draft``, ``stop``, ``tree`` and ``max_draft``, never ``cache_dir`` or ``task``. Where it names an
        adapter or exit heads, these are loaded from that folder or repository of the Hub.

        Raises:
            SettingError: there is no such file, it was cut short or changed, or is of another format.
        """
        saved = saving.read(Path(folder) / saving.FILE_NAME)
        spec = saving.construct(cls, saved)
        spec._learned.saved = saved
        return spec

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them, with which a ``GenerationConfig`` that holds this ``SelfSpec`` is saved.

        A config that is loaded has them again, but for ``cache_dir`` and ``task``: no file chooses where this machine
        writes. What was learned is not among them, see :meth:`save_pretrained`. A function or generator of your own
        cannot be saved: a warning says so once.
        """
        try:
            settings = self._settings().items()
            return {CONFIG_KEY: {name: saving.encode(value, f"SelfSpec({name})") for name, value in settings}}
        except SettingError as error:
            say_once(f"a GenerationConfig with this assistant can be used but not saved: {error}")
            return {CONFIG_KEY: repr(self)}

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics of the last finished call, ``None`` before the first."""
        return self._learned.stats

    def plot(self, path: str | os.PathLike[str] | None = None, model: Any = None) -> Figure:
        """Draws what the calls so far did; see :func:`hf_selfspec.pictures.plot`.

        Args:
            path: where to save the picture, in the format that its suffix names, e.g. ``search.png``.
            model: the model whose search to draw; it can be left out where only one was used.

        Returns:
            The figure, which no window shows and pyplot does not know.

        Raises:
            SettingError, SettingTypeError: matplotlib is not installed, there was no call yet, several models were used
                and none is named, or ``path`` cannot be written.
        """
        if not self._learned.calls:
            raise SettingError("SelfSpec.plot has nothing to draw yet: generate something with this SelfSpec first.")
        inner = self._only_model("SelfSpec.plot", model)
        found = None if inner is None else self._learned.latest(inner)
        return pictures.plot(list(self._learned.calls), found if isinstance(found, SkipSearch) else None, path)

    def _only_model(self, name: str, model: Any) -> PreTrainedModel | None:
        """The model that is meant, of those with findings."""
        if model is not None:
            return causal_lm(model, name)
        used = list(self._learned.models)
        if len(used) > 1:
            raise SettingError(
                f"{name}: this SelfSpec has drafted for {len(used)} models. Name the one that is meant with `model`."
            )
        return next(iter(used), None)

    def candidate_generator(
        self,
        model: PreTrainedModel,
        logits_processor: LogitsProcessorList | None = None,
        do_sample: bool = False,
    ) -> PartialDraft:
        """The draft as a ``CandidateGenerator`` for transformers' own assisted generation (one row).

        Args:
            model: the model to draft with.
            logits_processor: processors of the generation.
            do_sample: whether tokens are drawn.

        Raises:
            SettingTypeError: the draft is not an early exit; others need the full model's cache.
        """
        plan = self.draft.plan(anatomy := Anatomy.of(model)) if isinstance(self.draft, EarlyExit) else None
        if plan is None or self.stop is None:
            raise SettingTypeError(
                "only EarlyExit(layer) with a stop rule can draft on its own outside this package's loop, got "
                f"{self.draft!r} and {self.stop!r}: other drafts read keys and values that only the full model writes."
            )
        target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, 1, FIRST_SLOTS))
        scorer = Scorer(logits_processor or LogitsProcessorList(), 1, do_sample)
        return PartialDraft(target, plan, Limits(self.stop, self.max_draft), scorer.for_drafts)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes; called by ``generate`` with everything prepared (``custom_generate``)."""
        return self.call().ready(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            model_kwargs,
        )()

    def call(self, checks_logits: bool = True) -> Call:
        """What decodes one call, for the package's own use."""
        drafting = Drafting(
            self.draft, self.stop, self.max_draft, self._learned, self._cache_folder, self.task, self._settings()
        )
        return Call(drafting, self.tree, checks_logits)

    def _settings(self, checked: bool = False) -> dict[str, Any]:
        """What is saved of the settings; ``checked`` for an error where they cannot be."""
        settings = {"draft": self.draft, "stop": self.stop, "tree": self.tree, "max_draft": self.max_draft}
        if checked:
            for name, value in settings.items():
                saving.encode(value, f"SelfSpec({name})")
        return settings

    @property
    def _cache_folder(self) -> Path | None:
        return None if self.cache_dir is None else Path(self.cache_dir).expanduser()
