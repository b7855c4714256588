"""Times ways of generating and their forwards, and counts the bytes that a forward has to read."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from transformers import DynamicCache, LlamaForCausalLM

from ...errors import brief
from ...model.anatomy import Anatomy
from ...model.attention import without_cudnn_attention
from ...model.given_cache import cache_for
from ...model.plan import LayerPlan
from ...model.target import Target
from ...search.costs import seconds_of
from ...stats import GenerationStats
from ..synthetic import exit_damping, random_prompt
from ..training import VARIANTS, TrainingShape, train
from .options import Options
from .record import Piece, Result
from .shapes import SHAPES, DeviceLlama
from .ways import NUM_DRAFT, WAYS, Graphs, graphs_of

# How often drafts should agree, about as often as those of a model that was trained for it.
AGREEMENT = 0.8
_PROMPT = 128
# Forwards between two synchronisations.
_IN_A_ROW = 16
# Bytes that are copied for the bandwidth: more than any cache holds, and little of a small machine's memory.
_COPIED = {"cuda": 1 << 30}
_COPIED_ELSEWHERE = 1 << 25
_COPIES = 10
_TRAINING_BATCH, _TRAINING_TOKENS, _TRAINING_STEPS = 4, 512, 8


def speed_pieces(options: Options) -> list[Piece]:
    """Returns all timings: the first batch size of each model first."""
    device = {"device": options.device}
    pieces = [Piece("bandwidth", "a large copy", device, lambda _: _bandwidth(options.place))]
    timed = device | {"dtype": options.dtype, "tokens": options.tokens, "repeats": options.repeats}
    dampings: dict[str, Piece] = {}
    for rows in options.rows:
        for name in options.shapes:
            shape = SHAPES[name].on(options.device, getattr(torch, options.dtype))
            if name not in dampings:
                model = device | {"dtype": options.dtype, "shape": name}
                dampings[name] = Piece("damping", name, model, partial(_damping, shape))
                pieces.append(dampings[name])
            settings = timed | {"shape": name, "rows": rows}
            case, damping = f"{name}, batch {rows}", dampings[name]
            of_ways = settings | {"ways": list(WAYS)}
            pieces += [
                Piece("generate", case, of_ways, partial(_generate, shape, rows, options), damping),
                Piece("forwards", case, settings, partial(_forwards, shape, rows, options), damping),
            ]
        if rows == options.rows[0]:
            pieces.append(_training_piece(options))
    return pieces


def _training_piece(options: Options) -> Piece:
    name = options.shapes[0]
    unfit = "" if options.place.type in ("cuda", "cpu") else "Trainer does not know the device"
    settings = {"device": options.device, "shape": name, "repeats": options.repeats}
    shape = SHAPES[name].on(options.device, torch.float32)
    return Piece("training", name, settings, lambda _: _training(shape, options), unfit=unfit)


def _bandwidth(device: torch.device) -> Result:
    """Measures the bytes that are read and written per second."""
    count = _COPIED.get(device.type, _COPIED_ELSEWHERE)
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = [seconds_of(lambda: target.copy_(source), device) for _ in range(1 + _COPIES)]
    return {"bytes_per_second": 2 * count / statistics.median(seconds[1:])}


def _damping(shape: DeviceLlama, _: Result) -> Result:
    """Finds the damping of the blocks after the exit with which drafts agree as often as wanted."""
    found = exit_damping(shape, shape.exit_layer, NUM_DRAFT, AGREEMENT)
    return {"factor": found.factor, "agreement": found.agreement}


def _generate(shape: DeviceLlama, rows: int, options: Options, damping: Result) -> Result:
    """Times each way in turn; a way that fails does not stop the others."""
    model = shape.damped(damping["factor"])
    runs = {name: _Run(model, name, shape.exit_layer, rows, options.tokens) for name in WAYS}
    errors: dict[str, str] = {}
    for _ in range(options.repeats + 1):
        for name in [name for name in runs if name not in errors]:
            try:
                runs[name].once()
            except Exception as error:  # whatever it is, the other ways can still be timed
                errors[name] = brief(error)
    return {
        "ways": {name: run.figures() for name, run in runs.items() if name not in errors},
        "errors": errors,
        "bytes": _bytes_read(model, shape.layers, rows, _PROMPT + options.tokens // 2),
    }


class _Run:
    """The timings of one way; the first is recorded separately."""

    def __init__(self, model: LlamaForCausalLM, way: str, exit_layer: int, rows: int, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.inputs = random_prompt(model, rows, _PROMPT)
        self.options = WAYS[way].options(exit_layer)
        self.graphs: Graphs | None = None
        self.first_seconds = 0.0
        self.decoding: list[float] = []
        self.peaks: list[float] = []
        self.stats: GenerationStats | None = None

    def once(self) -> None:
        """Times a generation and one of a single token; the difference is the time of decoding."""
        device = self.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if self.graphs is None:
            begun = perf_counter()
            self.graphs = graphs_of(partial(self._run, self.tokens))
            self.first_seconds = perf_counter() - begun
            return
        whole, first = (seconds_of(partial(self._run, count), device) for count in (self.tokens, 1))
        self.decoding.append((whole - first) / (self.tokens - 1))
        if device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(device) / 2**20)

    def _run(self, tokens: int) -> None:
        with without_cudnn_attention():
            self.model.generate(**self.inputs, max_new_tokens=tokens, do_sample=False, **self.options)
        if "assistant" in self.options and tokens > 1:
            self.stats = self.options["assistant"].stats

    def figures(self) -> Result:
        """Milliseconds per token of each row, with further figures."""
        assert self.graphs is not None
        usual = statistics.median(self.decoding)
        found: Result = {
            "ms": 1e3 * usual,
            "spread": (max(self.decoding) - min(self.decoding)) / 2 / usual,
            "first_seconds": self.first_seconds,
            "peak_mib": max(self.peaks, default=None),
            "graphs": self.graphs.compiled,
            "skips": self.graphs.skips,
        }
        if self.stats is not None:
            found |= {"alpha": self.stats.acceptance_rate, "m": self.stats.mean_generated_length}
        return found


@dataclass(frozen=True)
class _Forward:
    """A forward that is timed, and the bytes that it reads."""

    run: Callable[[], object]
    bytes: int


def _forwards(shape: DeviceLlama, rows: int, options: Options, damping: Result) -> Result:
    """Times a one-token forward of plain ``generate``, a drafting step and a verification, many of each in a row."""
    model = shape.damped(damping["factor"])
    ids = random_prompt(model, rows, _PROMPT + NUM_DRAFT + 1)["input_ids"]
    context, width = _PROMPT, NUM_DRAFT + 1
    starts = [context] * rows
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        target = Target(model, Anatomy.of(model), cache_for(model, rows, context + width))
        early = LayerPlan.early_exit(shape.layers, shape.exit_layer)
        one, several = ids[:, context : context + 1], ids[:, context:]
        whole = _bytes_read(model, shape.layers, rows, context)
        partly = _bytes_read(model, shape.exit_layer, rows, context)

        def plain() -> None:
            model(one, past_key_values=cache, use_cache=True)
            cache.crop(-1)

        with target.prepared():
            target.prefill(ids[:, :context], [0] * rows, [context] * rows)
        forwards = {
            "draft step": _Forward(lambda: target.step(one, starts, early), partly),
            "verification": _Forward(lambda: target.step(several, starts), whole),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ("plain step", *forwards)}
        for _ in range(1 + options.repeats):
            seconds["plain step"].append(_seconds(plain, options.place))
            with target.prepared():
                for name, forward in forwards.items():
                    seconds[name].append(_seconds(forward.run, options.place))
    sizes = {"plain step": whole} | {name: forward.bytes for name, forward in forwards.items()}
    return {name: {"ms": 1e3 * statistics.median(seconds[name][1:]), "bytes": sizes[name]} for name in seconds}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, averaged over many in a row."""

    def often() -> None:
        for _ in range(_IN_A_ROW):
            run()

    return seconds_of(often, device) / _IN_A_ROW


def _bytes_read(model: LlamaForCausalLM, layers: int, rows: int, context: int) -> int:
    """The least bytes that a forward through the first layers and the head reads: their weights, keys and values."""
    config = model.config
    parts = [*model.model.layers[:layers], model.model.norm, model.lm_head]
    weights = sum(weight.numel() * weight.element_size() for part in parts for weight in part.parameters())
    keys = rows * context * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return weights + 2 * layers * keys * model.lm_head.weight.element_size()


def _training(shape: DeviceLlama, options: Options) -> Result:
    """Measures seconds of a step and peak memory, with and without callbacks, in turn."""
    on_gpu = options.place.type == "cuda"
    tokens = TrainingShape(
        shape.width,
        shape.layers,
        shape.intermediate or 0,
        shape.vocabulary,
        _TRAINING_BATCH,
        _TRAINING_TOKENS,
        bf16=on_gpu,
    )
    model = shape.model()
    train(model, tokens, VARIANTS["plain"], 1, options.device)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    peaks: dict[str, float | None] = dict.fromkeys(VARIANTS)
    for _ in range(options.repeats):
        for name, callbacks in VARIANTS.items():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(options.place)
            found = train(model, tokens, callbacks, _TRAINING_STEPS, options.device)
            seconds[name].append(statistics.fmean(found.seconds))
            peaks[name] = torch.cuda.max_memory_allocated(options.place) / 2**20 if on_gpu else None
    return {name: {"seconds": statistics.median(seconds[name]), "peak_mib": peaks[name]} for name in VARIANTS}
