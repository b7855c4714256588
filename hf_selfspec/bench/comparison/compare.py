"""``hf_selfspec.compare``: measures whether self-speculation pays, for Python and for ``hf-selfspec bench``."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import SettingError, SettingTypeError, brief
from ...files import check_folder, path_of, reported, written_whole
from ...model.anatomy import causal_lm, max_positions
from ...model.attention import without_cudnn_attention
from ...model.checkpointing import evaluating
from ...notices import warn_once
from ...pictures import save
from ...selfspec import SelfSpec
from ..forward import forward_seconds
from ..measure import machine
from .journal import Journal
from .memory import Peaks
from .page import html, markdown
from .progress import shown
from .prompts import Batch, Encoder, Given, Prompt, batches_of, padding
from .results import Json, results
from .settings import Clock, Settings
from .stream import Stream, parts_of
from .tables import main_table, title, verdict
from .ways import LeftOut, Way, check_ways, usual_ways, ways_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS, REPORT, PAGE = "results.json", "report.md", "report.html"
# Context length of the forwards whose cost is measured, and timings of each.
_CONTEXT, _REPEATS = 256, 7
_KIND = "text"
# Characters of a hash of the prompts.
_HASH = 12

Methods = Iterable[str | SelfSpec] | Mapping[str, str | SelfSpec]


@dataclass(frozen=True)
class Comparison:
    """How fast ways of generating are on one model and stream of prompts.

    ``str(comparison)`` is a table and a sentence on what is fastest; :meth:`plot` draws it, :meth:`save` writes a
    report.

    Attributes:
        results: everything, as in the file ``results.json``.
    """

    results: Mapping[str, Any]

    @property
    def best(self) -> str:
        """Name of the fastest lossless way under the first condition."""
        return str(self.results["conditions"][0]["best"])

    def __str__(self) -> str:
        parts = []
        for condition in self.results["conditions"]:
            found = verdict(condition)
            lines = [title(condition), "", main_table(condition).text() if condition["ways"] else "", ""]
            parts.append("\n".join([*lines, found.headline, *found.details]))
        return "\n\n".join(parts)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws the speed of each way under the first condition, with intervals.

        Args:
            path: where to save the plot, in the format that its suffix names, e.g. ``speed.png``.

        Returns:
            The figure, which is not shown and not registered with pyplot.

        Raises:
            SettingError, SettingTypeError: matplotlib is not installed, or ``path`` cannot be written.
        """
        from .drawing import speedups

        figure = speedups(self.results["conditions"][0])
        if path is not None:
            save("Comparison.plot", figure, path)
        return figure

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``results.json``, ``report.md``, ``report.html`` and, with matplotlib, pictures.

        Raises:
            SettingError: the folder cannot be written.
        """
        check_folder("the folder of results", folder)
        place, figures = path_of(folder), _figures(dict(self.results))
        files = {
            RESULTS: json.dumps(self.results, indent=1, allow_nan=False) + "\n",
            REPORT: markdown(dict(self.results)),
            PAGE: html(dict(self.results), _svgs(figures)),
        }
        for name, content in files.items():
            with reported(place / name), written_whole(place / name) as beside:
                beside.write_text(content, encoding="utf-8")
        for name, figure in figures.items():
            save("Comparison.save", figure, place / f"{name}.png")


def compare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Given],
    methods: Methods | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float | Sequence[float] = 0.0,
    batch_size: int | Sequence[int] = 1,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    clock: Clock = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Comparison:
    """Measures whether self-speculation pays: all ways of generating on the same prompts, in turn.

    The prompts are one stream, as a service would see them. A ``SelfSpec`` is kept over the stream and is not warmed
    up; its first call is reported separately. All ways see a prompt before the next one comes, in rotating order, so
    that disturbances of the machine affect all of them.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        tokenizer: the model's tokenizer.
        texts: prompts like those that the model will see: strings, or chats as lists of messages. With a chat template
            a string is a message of a user, without one a text that the model continues.
        methods: names of ways and ``SelfSpec`` objects, or a mapping to them from names for the table; plain generate
            is always among them. ``None`` for plain generate, prompt lookup at several settings, static and compiled
            decoding where the device compiles, and every preset that fits the model.
        max_new_tokens: the most new tokens for each prompt.
        temperature: 0 for greedy; several values for one table each.
        batch_size: prompts that are generated together; several values for one table each.
        top_p, top_k: settings of sampling.
        seed: seed of sampling.
        clock: ``wall``, ``cpu`` or ``auto``: the CPU time of the process with one thread on a CPU, otherwise wall time.
        out: folder for the report, and for what was measured so far: the same call resumes where it was interrupted.
        progress: whether stderr shows a bar with the time left.

    Returns:
        The comparison, with a table, a plot and all figures.

    Raises:
        SettingError, SettingTypeError: an argument is not allowed, a method does not fit the model, or the folder holds
            figures of other settings.
    """
    inner = causal_lm(model, "compare")
    settings = Settings(
        max_new_tokens,
        _several(temperature, float),
        _several(batch_size, int),
        top_p,
        top_k,
        seed,
        clock,
    )
    prompts, left_out = _encoded(inner, tokenizer, _checked(texts), settings)
    asked = Asked(inner, tokenizer, prompts, settings, methods, left_out, out=None if out is None else path_of(out))
    return asked.measured(progress)


@dataclass(frozen=True)
class Asked:
    """A comparison to be made.

    Attributes:
        model, tokenizer: see :func:`compare`.
        prompts: the stream.
        settings: the settings of the comparison.
        methods: see :func:`compare`.
        left_out: for each kind the number of prompts that did not fit.
        out: folder for the report and the journal, ``None`` for neither.
        traces: whether statistics of each call are written.
        measures_costs: whether forwards over several tokens are timed, too.
        about: further entries of the report, by name.
        around: a context in which the ways run, see ``ablations.py``.
        peaks: measures the memory of a way where the device does not report it, ``None`` to leave that out.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    settings: Settings
    methods: Methods | None = None
    left_out: Mapping[str, int] | None = None
    out: Path | None = None
    traces: bool = False
    measures_costs: bool = True
    about: Mapping[str, Any] | None = None
    around: AbstractContextManager[Any] = field(default_factory=lambda: nullcontext())
    peaks: Peaks | None = None

    def measured(self, progress: bool) -> Comparison:
        """Measures what is missing and writes the report."""
        if not self.prompts:
            raise SettingError("no prompt fits the model. Give shorter ones, or fewer max_new_tokens.")
        with evaluating(self.model), self.around, without_cudnn_attention():
            found = Comparison(self._results(progress))
        if self.out is not None:
            found.save(self.out)
        return found

    def _results(self, progress: bool) -> Json:
        pad = padding(self.tokenizer)
        sizes = dict.fromkeys(self.settings.batch_sizes)
        batches = {size: batches_of(self.prompts, size, pad, self.model.device) for size in sizes}
        ways, left_out = self._ways(Batch.of(self.prompts[:1], pad, self.model.device))
        parts = parts_of(self.settings, batches, ways)
        about = self._about()
        header = {
            "about": about,
            "settings": self.settings.as_json(),
            "ways": [way.name for way in ways],
            "settings_of_ways": {way.name: way.settings for way in ways},
            "prompts": hashlib.sha256(json.dumps([prompt.ids for prompt in self.prompts]).encode()).hexdigest()[:_HASH],
        }
        journal = Journal.opened(header, self.out, self.traces)
        stream = Stream(self.model, self.settings, parts, pad, journal)
        with shown(stream.total, len(journal.calls), progress) as bar:
            stream.run(bar)
            stream.measure_memory(self.peaks, bar)
        return results(about, self.settings, parts, left_out, journal, self._costs(), self._clock())

    def _ways(self, first: Batch) -> tuple[list[Way], list[LeftOut]]:
        if self.methods is None:
            return usual_ways(self.model, first)
        named = ways_of(self.methods)
        check_ways(self.model, named, first)
        return named, []

    def _clock(self) -> str:
        if self.settings.clock != "auto":
            return self.settings.clock
        one_thread = self.model.device.type == "cpu" and torch.get_num_threads() == 1
        return "cpu" if one_thread else "wall"

    def _about(self) -> dict[str, Any]:
        from ... import __version__

        model = self.model
        return {
            "model": model.config.name_or_path or type(model).__name__,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "machine": machine(model.device),
            "threads": torch.get_num_threads(),
            "hf_selfspec": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "prompts": len(self.prompts),
            "prompts_left_out": dict(self.left_out or {}),
            **(self.about or {}),
        }

    def _costs(self) -> Json | None:
        if not self.measures_costs:
            return None
        positions = max_positions(self.model.config.get_text_config(decoder=True)) or sys.maxsize
        context = min(_CONTEXT, positions // 2)
        try:
            theirs, ours = forward_seconds(self.model, context, _REPEATS)
        except (RuntimeError, ValueError) as error:  # e.g. a cache of states that cannot be cropped
            warn_once(f"the cost of verifying several tokens is not measured with this model ({brief(error)}).")
            return None
        curves = {"transformers": theirs, "ours": ours}
        shares = {
            whose: {str(count): seconds / curve[1] for count, seconds in curve.items()}
            for whose, curve in curves.items()
        }
        return {"context": context, **shares, "ours_over_transformers": ours[1] / theirs[1]}


def _encoded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Given], settings: Settings
) -> tuple[list[Prompt], dict[str, int]]:
    """The user's own prompts in their order, and by kind how many did not fit."""
    encoder = Encoder(tokenizer, longest_prompt(model.config, settings))
    prompts = [encoder.prompt(_KIND, text) for text in texts]
    return [prompt for prompt in prompts if prompt is not None], dict(+encoder.left_out)


def longest_prompt(config: Any, settings: Settings) -> int:
    """The most tokens of a prompt that leave space for the answer."""
    positions = max_positions(config.get_text_config(decoder=True)) or sys.maxsize
    return int(positions - settings.max_new_tokens)


def _several(value: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (float(value),) if kind is float and isinstance(value, int) and not isinstance(value, bool) else (value,)


def _checked(texts: Any) -> list[Given]:
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, Mapping)) else []
    chats = [isinstance(text, list) and text and all(isinstance(one, Mapping) for one in text) for text in given]
    if not given or not all(chat or (isinstance(text, str) and text) for chat, text in zip(chats, given, strict=True)):
        raise SettingTypeError(
            "compare(texts) must be a non-empty list of non-empty strings or of chats (lists of messages), got "
            f"{repr(texts)[:100]}."
        )
    return given


def _figures(found: Json) -> dict[str, Figure]:
    """The plots, none if matplotlib is missing."""
    from .drawing import pictures

    try:
        return pictures(found)
    except SettingError:
        return {}


def _svgs(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    from .drawing import as_svg

    return {name: as_svg(figure) for name, figure in figures.items()}
