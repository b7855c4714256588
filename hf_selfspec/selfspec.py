"""``SelfSpec``: what users pass to ``generate``, and what they can do with it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from .drafts.layers.early_exit import ExitChoice
from .errors import SettingError, UnsupportedModelError
from .generate.call import Call, serve
from .generate.refusals import check_options
from .generate.unseen import why_plain
from .learned import saving
from .learned.files import path_of, reported
from .model.anatomy import Anatomy, causal_lm
from .search.skip_search import SkipChoice
from .settings import Settings
from .stats import GenerationStats
from .validation import StrPath


@dataclass(frozen=True)
class SelfSpec(Settings):
    """Self-speculative decoding: part of a model drafts, the whole model verifies.

    ``model.generate(**inputs, assistant=SelfSpec())`` returns the tokens of plain ``generate``, faster. A ``SelfSpec``
    holds settings and can be reused, with other models and by several threads. Copies, including deep ones, share what
    was learned: tools such as lm-eval copy their arguments for every batch. A new ``SelfSpec`` starts from scratch.

    Args:
        draft: what drafts: :class:`Lookup`, :class:`EarlyExit`, :class:`SkipLayers`, :class:`EarlyExitAdapter`,
            :class:`Quantized`, :class:`MTP`, :class:`DynamicExit`, several in a :class:`Cascade`, a source of your own
            or any ``CandidateGenerator`` of transformers that needs ids alone (in a batch each row has a copy, which
            shares its modules). By default free drafts, and the head that is attached to the model, if there is one.
        stop: when a draft ends: :class:`FixedLength`, :class:`ConfidenceThreshold`, :class:`ProductThreshold`,
            :class:`AdaptiveThreshold` or any function of ``(input_ids [b, s], logits [b, v], hidden_states [b, d])``
            that returns a ``BoolTensor [b]``. With ``None``, drafts of an :class:`EarlyExit` have 3 tokens; those of
            :class:`MTP` and :class:`Quantized` end where the product of confidences falls below 0.4, those of skipped
            layers and of all other fitted parts where the confidence falls below 0.8. Not allowed with a
            ``CandidateGenerator``.
        tree: sibling tokens at each depth of the draft, or ``None`` for a line; not allowed with a
            ``CandidateGenerator`` either.
        max_draft: maximum number of tokens in a draft, at most 1,024.
        cache_dir: folder in which findings about models are kept, so that the next process starts with them. A file is
            for one model (its weights, not its name), these settings and one task; the last writer wins. It is written
            at the end of calls, at most every ten seconds, and at the end of the process; keep the ``SelfSpec`` and the
            model until then, or findings of the last seconds are lost. Not used by models that several processes
            share.
        task: name of what the model is used for; use another name for another kind of text.
        graphs: ``False`` for none. Otherwise, on CUDA, the kernels of a forward over a few tokens are captured when its
            shape first comes, and one launch runs them from then on. What is captured is compared with the model's own
            code, and dropped where it differs by more than rounding. Elsewhere this changes nothing.
        exact: whether bfloat16 models, too, have to return plain ``generate``'s ids: each token then has the results
            that plain ``generate`` has for it alone, bit for bit, in calls with one prompt of text. The first call
            tries whether this machine's kernels allow that; an error gives the reason and names the part of the model.
            ``stats.promise`` records what held. Models in float32 need none of this, unless torch's flags allow it to
            be multiplied in TF32 or bfloat16, which is an error here.
        trust: whether what is attached to a model from outside (hooks, wrapped or replaced layers, methods and
            functions, modes of torch) neither counts forwards nor records what it sees. It is then compared with plain
            ``generate`` once, as a model's own code; without, plain ``generate`` serves.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfSpec:
        return copy.copy(self)

    def choice(self, model: Any) -> ExitChoice | SkipChoice | None:
        """Returns the fastest exit, or the set that a search has chosen, for the last kind of call of ``model``.

        It is ``None`` before that, and where no exit pays. A choice holds for a model object, whatever adapters are
        active: create a new ``SelfSpec`` after changing them.

        Args:
            model: a causal LM of transformers, or a PEFT model around one.

        Raises:
            SettingTypeError: ``model`` is neither.
        """
        return self._knowledge.choice(causal_lm(model, "SelfSpec.choice"))

    def forget(self) -> None:
        """Drops the texts of earlier calls, and what was kept of the model's logits on them.

        They are dropped from the memory of this process, for all models, with the files of ``cache_dir`` that it has
        used; other processes drop them before they write. Findings about layers, and the times of forwards, stay in
        memory.
        """
        self._knowledge.forget_texts()

    def save_pretrained(self, folder: StrPath, model: Any = None) -> None:
        """Writes settings and findings to ``folder/selfspec.json``, whole or not at all.

        Args:
            folder: created if it does not exist; an earlier file in it is replaced.
            model: the model whose findings are saved and to which the file will belong, a causal LM of transformers or
                a PEFT model around one. It can be left out if at most one model was used.

        Raises:
            SettingError, SettingTypeError: the settings hold a function or generator of your own, several models were
                used and none is given, ``model`` is not a model, or the file cannot be written.
        """
        inner = self._only_model("SelfSpec.save_pretrained", model)
        settings, path = self._saved(), path_of(folder) / saving.FILE_NAME
        with reported(path):
            saving.write(self._knowledge.content(path, inner, settings))

    @classmethod
    def from_pretrained(cls, folder: StrPath) -> SelfSpec:
        """Loads what :meth:`save_pretrained` has written; using it with another model raises an error.

        A file sets ``draft``, ``stop``, ``tree``, ``max_draft``, ``exact`` and ``trust``, never ``cache_dir`` or
        ``task``. Where it names an adapter or exit heads, these are loaded from that folder or repository of the Hub.

        Raises:
            SettingError: there is no such file, it was cut short or changed, or it has another format.
        """
        saved = saving.read(path_of(folder) / saving.FILE_NAME)
        with saving.reading(saved.path):
            spec = cls(**saving.decode_settings(saved.settings))
        spec._knowledge.saved = saved
        return spec

    def export_draft(self, folder: StrPath, model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Writes the part of a model that drafts as an ordinary checkpoint, for engines that take a draft model.

        That part is an early exit, or the model without skipped layers; of a search, it is the set that was chosen, if
        it skips layers as a whole. The folder's README.md has the command for each engine. The checkpoint's logits are
        compared with the draft's before anything is written; the model stays as it is, and its tensors are not copied.

        Args:
            folder: created if it does not exist; a draft that was exported there earlier is replaced.
            model: a causal LM of transformers on one device, not quantised, its adapters merged.
            tokenizer: the model's tokenizer, saved with the draft; llama.cpp's converter needs it.

        Raises:
            SelfSpecError: a checkpoint cannot hold this draft, nothing was chosen yet, or the folder holds another
                model or cannot be written.
        """
        from .tools.exporting import USUAL_TOKENS, export_draft  # few calls need it

        knowledge = self._knowledge_of(causal_lm(model, "SelfSpec.export_draft"))
        tokens = min(getattr(self.stop, "max_draft", USUAL_TOKENS), self.max_draft)
        export_draft(self._source, knowledge, folder, tokenizer, tokens)

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics of the last finished call in this thread, or in any where this one had none; ``None`` before the
        first."""
        return self._knowledge.stats

    def _only_model(self, name: str, model: Any) -> PreTrainedModel | None:
        """The given model, or the only one with findings."""
        if model is not None:
            return causal_lm(model, name)
        used = self._knowledge.models
        if len(used) > 1:
            raise SettingError(
                f"{name}: this SelfSpec has drafted for {len(used)} models. Name the one that is meant with `model`."
            )
        return next(iter(used), None)

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
        """Decodes a call; ``generate`` calls it with everything prepared (``custom_generate``)."""
        check_options(model, generation_config)
        if why := why_plain(model):
            raise UnsupportedModelError(why)
        prepared = (Anatomy.of(model), model, input_ids, logits_processor, stopping_criteria, generation_config)
        return serve(Call(*prepared, synced_gpus, streamer, model_kwargs), self)


def begun_anew(spec: SelfSpec) -> SelfSpec:
    """A ``SelfSpec`` of the same settings, which knows only what was loaded from the original's file."""
    anew = replace(spec, cache_dir=None)
    anew._knowledge.saved = spec._knowledge.saved
    return anew
