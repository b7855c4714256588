"""``hf_selfspec.compare``: measures whether self-speculation pays, for Python and for ``hf-selfspec bench``."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SettingError
from ..learned.files import check_folder, path_of, reported, written_whole
from ..model.anatomy import causal_lm, max_positions
from ..model.encoding import Prompt as TextOrChat
from ..model.encoding import checked_texts
from ..model.patching import evaluating
from ..validation import StrPath, check_count
from .methods import Method, Methods, fitting, methods_of
from .plots import saved
from .report import main_table, markdown, speedups, title, verdict
from .request import KIND, Batch, Clock, Encoder, Prompt, Settings, in_turn
from .results import Json, results
from .stream import Journal, Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison:
    """How fast methods of generating are on one model and stream of prompts.

    ``str(comparison)`` is a table and a sentence on what is fastest; :meth:`plot` draws it, :meth:`save` writes a
    report.

    Attributes:
        results: everything, as in the file ``results.json``.
    """

    results: Mapping[str, Any]

    @property
    def best(self) -> str:
        """Name of the fastest lossless method under the first condition."""
        return str(self.results["conditions"][0]["best"])

    def __str__(self) -> str:
        parts = []
        for condition in self.results["conditions"]:
            conclusion, table = verdict(condition), main_table(condition).text()
            parts.append("\n".join([title(condition), "", table, "", conclusion.headline, *conclusion.details]))
        return "\n\n".join(parts)

    def plot(self, path: StrPath | None = None) -> Figure:
        """Draws the speed of each method under the first condition, with intervals.

        Args:
            path: where to save the plot, in the format that its suffix names, e.g. ``speed.png``.

        Returns:
            The figure, which is not shown and not registered with pyplot.

        Raises:
            SettingError, SettingTypeError: matplotlib is not installed, or ``path`` cannot be written.
        """
        return saved("Comparison.plot", speedups(self.results["conditions"][0]), path)

    def save(self, folder: StrPath) -> None:
        """Writes ``results.json``, and ``report.md`` with pictures where there is matplotlib.

        Raises:
            SettingError: the folder cannot be written.
        """
        check_folder("the folder of results", folder)
        directory, content = path_of(folder), dict(self.results)
        try:
            figures = {f"speed-up-{n}.png": speedups(condition) for n, condition in enumerate(content["conditions"])}
        except SettingError:  # there is no matplotlib
            figures = {}
        files = {
            "results.json": json.dumps(content, indent=1, allow_nan=False) + "\n",
            "report.md": markdown(content, list(figures)),
        }
        for name, text in files.items():
            with reported(directory / name), written_whole(directory / name) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
        for name, figure in figures.items():
            saved("Comparison.save", figure, directory / name)


def compare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[TextOrChat] | Mapping[str, Sequence[TextOrChat]],
    methods: Methods | None = None,
    *,
    max_new_tokens: int = 128,
    max_prompt_tokens: int | None = None,
    temperature: float | Sequence[float] = 0.0,
    batch_size: int | Sequence[int] = 1,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    clock: Clock = "auto",
    passes: int = 1,
    out: StrPath | None = None,
    progress: bool = True,
) -> Comparison:
    """Measures whether self-speculation pays: all methods of generating on the same prompts, in turn.

    The prompts are one stream, as a service would see them. A ``SelfSpec`` is kept over the stream and is not warmed
    up; its first call is reported separately. All methods see a prompt before the next one comes, in rotating order, so
    that disturbances of the machine affect all of them.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        tokenizer: the model's tokenizer.
        texts: prompts like those that the model will see: strings, or chats as lists of messages. With a chat template
            a string is a message of a user, without one a text that the model continues. A mapping has those of several
            kinds, which come in turn and have figures of their own.
        methods: names of methods and ``SelfSpec`` objects, or a mapping to them from names for the table; plain
            generate is always among them. ``None`` for plain generate, prompt lookup at several settings, static and
            compiled decoding where the device compiles, and every preset that fits the model.
        max_new_tokens: the most new tokens for each prompt.
        max_prompt_tokens: longer prompts are left out; ``None`` for those that the model cannot take.
        temperature: 0 for greedy; several values for one table each.
        batch_size: prompts that are generated together; several values for one table each.
        top_p, top_k: settings of sampling.
        seed: seed of sampling.
        clock: ``wall``, ``cpu`` or ``auto``: the CPU time of the process with one thread on a CPU, otherwise wall time.
        passes: runs of the stream, each with a new ``SelfSpec``; the last one counts (3 where graphs are compiled).
        out: folder for the report, and for what was measured so far: the same call resumes where it was interrupted,
            with ``SelfSpec``s that have learned nothing yet.
        progress: whether stderr shows a bar with the time left.

    Returns:
        The comparison, with a table, a plot and all figures.

    Raises:
        SettingError, SettingTypeError: an argument is not allowed, a method does not fit the model, or the folder holds
            figures of other settings.
    """
    inner = causal_lm(model, "compare")
    settings = Settings(max_new_tokens, _several(temperature), _several(batch_size), top_p, top_k, seed, clock, passes)
    longest = longest_prompt(inner.config, settings)
    if max_prompt_tokens is not None:
        check_count("compare(max_prompt_tokens)", max_prompt_tokens)
        longest = min(longest, max_prompt_tokens)
    encoder, kinds = Encoder(tokenizer, longest), texts if isinstance(texts, Mapping) else {KIND: texts}
    if not kinds:
        raise SettingError("compare(texts) has no kinds of prompts. Give at least one: {'questions': [...]}.")
    checked = {str(kind): checked_texts("compare", of_kind, chats=True) for kind, of_kind in kinds.items()}
    stream = in_turn(encoder.prompts(*item) for item in checked.items())
    about = {"prompts_left_out": dict(encoder.left_out)}
    folder, chosen = None if out is None else path_of(out), None if methods is None else methods_of(methods)
    return measured(inner, tokenizer, stream, settings, chosen, folder, about, progress)


def measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: Settings,
    methods: Sequence[Method] | None = None,
    out: Path | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Comparison:
    """Measures what ``out`` does not have yet and writes the report there, with ``about`` among its entries."""
    if not prompts:
        raise SettingError("no prompt fits the model. Give shorter ones, or fewer max_new_tokens.")
    if (most := max(settings.batch_sizes)) > len(prompts):
        raise SettingError(f"batch_size={most}: there are fewer prompts than that. Give more, or smaller batches.")
    pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    with evaluating(model):
        compared, left_out = fitting(model, methods, Batch.of(prompts[:1], pad, model.device))
        conditions = {**_about(model), "prompts": len(prompts), **(about or {})}
        tokens = hashlib.sha256(json.dumps([prompt.ids for prompt in prompts]).encode()).hexdigest()
        header = {**conditions, "tokens of prompts": tokens, **vars(settings)}
        journal = Journal({**header, **{f"method {method.name}": method.settings for method in compared}}, out)
        stream = Stream(model, settings, prompts, compared, pad, journal)
        stream.run(progress)
        on_one_core = model.device.type == "cpu" and torch.get_num_threads() == 1
        clock = settings.clock if settings.clock != "auto" else "cpu" if on_one_core else "wall"
    comparison = Comparison({**results(stream, clock), "about": conditions, "left_out": left_out})
    if out is not None:
        comparison.save(out)
    return comparison


def longest_prompt(config: Any, settings: Settings) -> int:
    """The most tokens of a prompt that leave space for the answer."""
    positions = max_positions(config.get_text_config(decoder=True)) or sys.maxsize
    return int(positions - settings.max_new_tokens)


def machine(device: torch.device) -> str:
    """Returns one line about the machine and the versions behind a figure."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    info = Path("/proc/cpuinfo")
    line = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    name = line[1] if line else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} thread(s), {versions}"


def _about(model: PreTrainedModel) -> Json:
    from .. import __version__

    return {
        "model": model.config.name_or_path or type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "machine": machine(model.device),
        "hf_selfspec": __version__,
        "python": platform.python_version(),
    }


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)
