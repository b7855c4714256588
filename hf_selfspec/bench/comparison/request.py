"""A request of ``hf-selfspec bench``: files of prompts, the name of a model, and how ways are compared."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import SettingError
from ...files import check_folder, path_of
from ...loading import ModelRequest
from ...prompts import has_chats
from ...settings import check_count
from . import suites
from .ablations import changed, check_ablations
from .compare import Asked, Comparison, longest_prompt
from .memory import peaks
from .prompts import Encoder, Prompt, repeated, stream_of, stream_of_variants
from .protocol import FEWEST
from .settings import Settings
from .suites import Source
from .ways import methods_of

_AUTO = "auto"
# Prompts in a stream of one kind, twice as many as an interval needs, and of each kind if there are several.
_OF_ONE_KIND, _OF_EACH_KIND = 2 * FEWEST, 5


@dataclass(frozen=True)
class BenchRequest:
    """A comparison described by the options of a command line.

    Attributes:
        model: folder or name on the Hub.
        data: files or datasets of prompts.
        suites: for each of these the suite that reads it, or ``auto`` to choose by the columns; empty for all ``auto``.
        out: folder for the report and what was measured so far.
        settings: how ways are compared.
        methods: names of ways, empty for all that fit.
        field: column of prompts.
        kinds: kinds of prompts, empty for all.
        prompts: number of prompts of each kind, ``None`` for :func:`usual_count`.
        max_prompt_tokens: longer prompts are left out.
        raw: whether the model continues texts instead of answering chats.
        variants: whether a variant of each prompt follows later.
        repeat: whether the whole stream comes twice.
        without, free_verification: see ``ablations.py``.
        memory: whether each way's peak memory is measured in a process of its own.
        trace: whether statistics of each call are written.
        dtype, device, threads: how the model is loaded and run.
    """

    model: str
    data: Sequence[str]
    out: str
    settings: Settings
    suites: Sequence[str] = ()
    methods: Sequence[str] = ()
    field: str | None = None
    kinds: Sequence[str] = ()
    prompts: int | None = None
    max_prompt_tokens: int | None = None
    raw: bool = False
    variants: bool = False
    repeat: bool = False
    without: Sequence[str] = ()
    free_verification: bool = False
    memory: bool = False
    trace: bool = False
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        counts = {"--prompts": self.prompts, "--max-prompt-tokens": self.max_prompt_tokens, "--threads": self.threads}
        for name, count in counts.items():
            if count is not None:
                check_count(name, count)
        if self.suites and len(self.suites) != len(self.data):
            raise SettingError(
                f"--suite is given {len(self.suites)} times and --data {len(self.data)} times. Give one for each file, "
                f"{_AUTO} to choose by the columns, or none."
            )
        if self.raw and self.variants:
            raise SettingError("--variants are chats, so --raw has no effect with it. Leave one out.")
        check_ablations(self.without)
        check_folder("--out", self.out)

    @cached_property
    def sources(self) -> list[Source]:
        """The files and the suites that read them."""
        pairs = zip_longest(self.data, self.suites, fillvalue=_AUTO)
        return [Source(data, None if suite == _AUTO else suite, self.field) for data, suite in pairs]

    def run(self, progress: bool = True) -> Comparison:
        """Measures what ``out`` does not have yet, and writes the report.

        Raises:
            SettingError, SettingTypeError: a file, the model or a setting cannot be used.
        """
        methods = methods_of(self.methods) or None
        suites.check(self.sources)
        asked = ModelRequest(self.model, self.dtype, self.device, self.threads)
        named = asked.find()
        config, tokenizer = named.config(), named.tokenizer()
        if self.variants and not has_chats(tokenizer):
            raise SettingError("--variants are chats, but the model has no chat template. Leave it out.")
        prompts, left_out = self._stream(config, tokenizer)
        model, changes = asked.load(named), (self.without, self.free_verification)
        measures_memory = self.memory and model.device.type == "cpu"
        return Asked(
            model,
            tokenizer,
            prompts,
            self.settings,
            methods,
            left_out,
            path_of(self.out),
            self.trace,
            about=self._about(),
            around=changed(*changes),
            peaks=peaks(self.model, self.dtype, *changes) if measures_memory else None,
        ).measured(progress)

    def _stream(self, config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], Mapping[str, int]]:
        raw = self.raw or not has_chats(tokenizer)
        longest = longest_prompt(config, self.settings)
        encoder = Encoder(tokenizer, min(longest, self.max_prompt_tokens or longest), chat=not raw)
        rng = random.Random(self.settings.seed)
        if self.variants:
            pairs = self._of_kinds(suites.pairs(self.sources))
            stream = stream_of_variants(pairs, encoder, self.prompts or usual_count(len(pairs)), rng)
        else:
            texts = self._of_kinds(suites.beginnings(self.sources) if raw else suites.questions(self.sources))
            stream = stream_of(texts, encoder, self.prompts or usual_count(len(texts)), rng)
        return repeated(stream) if self.repeat else stream, dict(+encoder.left_out)

    def _of_kinds(self, texts: dict[str, Any]) -> dict[str, Any]:
        unknown = [kind for kind in self.kinds if kind not in texts]
        if unknown or not texts:
            raise SettingError(
                f"--kinds {', '.join(unknown)}: --data has no such prompts, only {', '.join(texts) or 'none at all'}."
            )
        return {kind: texts[kind] for kind in self.kinds or texts}

    def _about(self) -> dict[str, Any]:
        return {
            "data": [f"{source.data} ({source.suite or _AUTO})" for source in self.sources],
            "prompts_per_kind": self.prompts or _AUTO,
            "raw": self.raw,
            "without": list(self.without),
            "free_verification": self.free_verification,
        }


def usual_count(kinds: int) -> int:
    """Number of prompts of each kind unless another one is given."""
    return _OF_ONE_KIND if kinds == 1 else _OF_EACH_KIND
