"""What a fit gives to the stock ``transformers.Trainer``, how it resumes, and how fast its result is."""

import copy
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from ..drafts.cascade import Cascade
from ..drafts.free.lookup import Lookup
from ..errors import SettingError
from ..learned.files import path_of, reported, write_json
from ..model.patching import evaluating
from ..modules.draft_module import DraftModule
from ..selfspec import SelfSpec
from ..validation import StrPath
from .texts import greedily

M = TypeVar("M", bound=DraftModule)

# The file beside checkpoints that says which fit they belong to, as long as it has not ended.
_RECORD = "fit.json"
# Arguments of the Trainer that decide what is fitted.
_DECIDING = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "seed", "data_seed", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "optim",
    "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16",
)  # fmt: skip
# Steps between two checkpoints of a fit with the usual arguments.
SAVE_STEPS = 100
# With `patience`: the most steps between two evaluations, and the least number of these, unless args.eval_steps is set.
_EVERY, _LEAST = 100, 10
# How speeds are measured: the number of prompts, the most new tokens after each, and those of a call that warms up.
_ROWS, _TOKENS, _FEW = 4, 32, 8
# The metric by which ``patience`` goes: the share of held-out tokens for which the module is right.
AGREEMENT = "agreement"


def usual_arguments(is_kept: bool = False) -> dict[str, Any]:
    """One epoch of AdamW at 1e-3 with 8 rows a batch; with checkpoints, of which the last stays, if ``is_kept``."""
    saving = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_total_limit": 1}
    return {
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 50,
        "report_to": "none",
        **(saving if is_kept else {"save_strategy": "no"}),
    }


def stopping_early(args: TrainingArguments, rows: int, folder: str) -> TrainingArguments:
    """Returns arguments with an evaluation and a checkpoint from time to time, and the best weights at the end."""
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else math.ceil(math.ceil(rows / batch) * args.num_train_epochs)
    args = copy.copy(args)
    if args.save_strategy == SaveStrategy.NO:
        args.output_dir, args.save_only_model, args.save_total_limit = folder, True, 1
    elif args.save_total_limit == 1:
        args.save_total_limit = 2  # the best and the last
    args.eval_strategy, args.save_strategy = IntervalStrategy.STEPS, SaveStrategy.STEPS
    args.eval_steps = args.save_steps = args.eval_steps or min(_EVERY, max(1, steps // _LEAST))
    args.metric_for_best_model, args.greater_is_better, args.load_best_model_at_end = AGREEMENT, True, True
    args.restore_callback_states_from_checkpoint = True
    return args


@contextmanager
def seeded(args: TrainingArguments | None) -> Iterator[None]:
    """Applies the Trainer's seed to random numbers that are drawn outside of it; tensors go to the CPU by default."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(42 if args is None else args.seed)
        yield


def checkpoints_of(output_dir: StrPath) -> str:
    """The folder for the checkpoints of a fit, until its result is written to ``output_dir``."""
    return f"{os.path.normpath(path_of(output_dir))}-checkpoints"


def forget(args: TrainingArguments, output_dir: StrPath | None) -> None:
    """Ends a fit, which the next one will not resume; the user's own checkpoints stay."""
    if PartialState().is_main_process:
        if args.save_strategy != "no":
            Path(args.output_dir, _RECORD).unlink(missing_ok=True)
        if output_dir is not None:
            shutil.rmtree(checkpoints_of(output_dir), ignore_errors=True)


def last_checkpoint(args: TrainingArguments, fit: str, rows: torch.Tensor) -> str | None:
    """Returns the checkpoint from which a fit resumes, ``None`` to begin; the first call records which fit it is."""
    if args.save_strategy == "no":
        return None
    folder = Path(args.output_dir)
    wanted = {name: str(getattr(args, name)) for name in _DECIDING}
    wanted |= {"part": fit, "text": hashlib.sha256(rows.numpy().tobytes()).hexdigest()}
    record = folder / _RECORD
    with reported(folder), PartialState().main_process_first():
        if not record.exists():
            write_json(record, wanted)
            return None
    recorded = json.loads(record.read_text(encoding="utf-8"))
    if changed := sorted(name for name in wanted if wanted[name] != recorded.get(name)):
        raise SettingError(
            f"{folder} holds a fit that was stopped, with another {', '.join(changed)}. Repeat its settings to "
            "resume it, remove that folder to start again, or write to another folder."
        )
    # Checkpoints that are older than the record are those of an earlier fit.
    states = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    last = max([record, *states], key=lambda file: file.stat().st_mtime_ns)
    return None if last is record else str(last.parent)


def speed_figures(
    module: M, model: PreTrainedModel, rows: torch.Tensor, spec_of: Callable[[M], SelfSpec | None]
) -> dict[str, float]:
    """Speeds with a module in times of plain ``generate``'s, on the first few of held-out rows ``[n, s]``.

    There are none if it does not draft greedily or there is too little text. Warns if the module does not pay.
    """
    prompts = rows[:_ROWS, : rows.shape[1] // 2]
    new_tokens = min(_TOKENS, rows.shape[1] - prompts.shape[1])
    if not prompts.numel() or new_tokens < 2:
        return {}
    try:
        with evaluating(module):
            if (spec := spec_of(module)) is None:
                return {}
            cascade = replace(spec, draft=Cascade((Lookup(), spec.draft)))
            alone, free, together = speeds(model, prompts, new_tokens, [spec, SelfSpec.lookup(), cascade])
    except Exception as error:  # whatever it is, hours of fitting are not lost to it
        warnings.warn(f"{module.kind}: its speed could not be measured: {error}", stacklevel=2)
        return {}
    finally:
        module.forget_copies()  # which do not follow the weights
    if max(alone, together) < max(1.0, free) and PartialState().is_main_process:
        warnings.warn(
            f"this {module.kind} does not pay: on held-out text the model generates at {alone:.2f} times the speed of "
            f"plain generate with it, at {together:.2f} with it and free drafts, and at {free:.2f} with "
            "SelfSpec.lookup(), which needs no fit. Fit for longer, on more text or on text like that which will be "
            "generated, or choose another exit layer.",
            stacklevel=2,
        )
    return {
        "speed over plain generate": round(alone, 2),
        "speed with free drafts": round(together, 2),
        "speed of free drafts alone": round(free, 2),
    }


@torch.no_grad()
def speeds(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int, specs: list[SelfSpec]) -> list[float]:
    """How many times as fast as plain ``generate`` each is."""

    def seconds(prompt: torch.Tensor, assistant: SelfSpec | bool, count: int = new_tokens) -> float:
        """Seconds per token."""
        prompt = prompt.to(model.get_input_embeddings().weight.device)
        options: dict[str, Any] = {"assistant": assistant, "max_new_tokens": count}
        begun = perf_counter()
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        ids.tolist()  # a GPU has them now
        return (perf_counter() - begun) / (ids.shape[1] - prompt.shape[1])

    assistants: list[SelfSpec | bool] = [False, *specs]
    with greedily(model, new_tokens):
        for assistant in assistants:
            # A text in reverse, since free drafts would know the beginning of one that is measured.
            seconds(prompts[:1].flip(1), assistant, min(_FEW, new_tokens))
        # In turn, and the median, since machines are not always equally fast.
        table = [[seconds(prompt, assistant) for assistant in assistants] for prompt in prompts.split(1)]
    return [median(plain / times[place] for plain, *times in table) for place in range(len(specs))]
