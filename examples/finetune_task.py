"""Fine-tune a model for one task with LayerSkip's recipe and generate fast: the paper's Table 11.

The tasks are those of ``tasks.py``; all weights or LoRA, with or without LayerSkip's two callbacks::

    python examples/finetune_task.py --threads 2
    python examples/finetune_task.py --threads 2 --lora --output task_lora
    python examples/finetune_task.py --threads 2 --model MODEL --learning-rate 1e-4 --no-callbacks --output plain
    python examples/finetune_task.py --threads 2 --model MODEL --learning-rate 1e-4 --task gsm8k --data gsm8k.jsonl

A run that was stopped continues from its last checkpoint when the same command is given again; when the training is
complete only the evaluation is repeated. The table also goes to ``results.md`` in the output folder.
"""

import argparse
import logging
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from benchmarks.timing import Timings, interleave, timed_generate
from peft import LoraConfig, PeftModel, get_peft_model
from tasks import TASKS, Task
from torch.utils.data import Dataset
from train_demo_model import check_same_run, save
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_selfspec import (
    Cascade,
    ConfidenceThreshold,
    EarlyExit,
    EarlyExitLoss,
    FixedLength,
    Gradual,
    LayerDropout,
    Lookup,
    SelfSpec,
    fit_reduced_head,
)
from hf_selfspec.tools.compare import machine

logger = logging.getLogger("finetune_task")

# Number of batches that are drawn and sorted together: enough to group similar lengths, too few to sort an epoch.
SORTED_BATCHES = 50
NO_LABEL = -100
# Training pairs in which frequent tokens are counted.
HEAD_PAIRS = 3000
STOP_RULES = (
    FixedLength(2),
    FixedLength(4),
    FixedLength(6),
    FixedLength(8),
    FixedLength(12),
    ConfidenceThreshold(0.6),
    ConfidenceThreshold(0.8),
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, apart from the examples and the library versions.

    Attributes:
        task: What is learned, see ``tasks.py``.
        model: Folder (or name) of the causal LM to fine-tune.
        steps: Optimiser steps.
        batch_size: Pairs per step; pairs of similar length go together.
        learning_rate: Peak learning rate of AdamW; linear warm-up, then a cosine down to a tenth of it.
        warmup_steps: Steps of the warm-up, at most a tenth of ``steps``.
        adam_beta2: Decay of AdamW's second moment.
        weight_decay: Decoupled weight decay of the matrices; norms have none.
        e_scale: Weight of the early exits' losses against the last layer's; the paper uses 1.0 for this experiment.
        p_max: Dropout rate of the last layer; the paper uses 0.2 for this experiment.
        longest: Maximum number of tokens in a pair, prompt and answer; longer pairs are left out.
        callbacks: Train with ``EarlyExitLoss`` and ``LayerDropout``; otherwise with neither, to compare.
        lora: Train low-rank adapters of all linear layers of attention and MLP instead of all weights.
        lora_rank: Rank of the adapters, which are scaled by 2.
        sft: Train with TRL's ``SFTTrainer`` (``pip install trl``) rather than with ``Trainer``.
        seed: Seed of the order of the pairs, of the dropped layers and of the evaluated pairs.
        fp32: Compute in float32 rather than in bfloat16 autocast.
    """

    task: str = "signature"
    model: str = str(Path(__file__).parent / "demo_model")
    steps: int = 1300
    batch_size: int = 16
    learning_rate: float = 2.5e-3
    warmup_steps: int = 50
    adam_beta2: float = 0.99
    weight_decay: float = 0.01
    e_scale: float = 1.0
    p_max: float = 0.2
    longest: int = 256
    callbacks: bool = True
    lora: bool = False
    lora_rank: int = 16
    sft: bool = False
    seed: int = 0
    fp32: bool = False


@dataclass(frozen=True)
class Evaluation:
    """How much is measured after training.

    Attributes:
        pairs: Held-out pairs for exact match and acceptance rate.
        timed: How many of these are also timed.
        tuning: Training pairs on which the stop rule of each exit is chosen.
        head: Tokens of a reduced head, with which self-speculation is also measured; 0 for none.
    """

    pairs: int = 200
    timed: int = 30
    tuning: int = 8
    head: int = 0


@dataclass(frozen=True)
class Pair:
    """One prompt and its answer as tokens.

    Attributes:
        prompt: Token ids of the prompt.
        answer: Token ids of the answer, and the end-of-text token.
        expected: The content of a right answer.
    """

    prompt: list[int]
    answer: list[int]
    expected: Any

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass
class Row:
    """One way to generate, and what was measured with it.

    Attributes:
        name: What the table calls it.
        assistant: The ``assistant`` argument of ``generate``, if any.
        exit_layer: Its exit layer, if it has one.
        correct: For each pair whether the answer is right.
        outputs: For each pair the token ids, shape (s,).
        drafted: Drafting steps, all pairs.
        accepted: Drafted tokens that were kept, all pairs.
        timings: One sample for each timed pair.
    """

    name: str
    assistant: SelfSpec | None = None
    exit_layer: int | None = None
    correct: list[bool] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    timings: Timings = field(default_factory=Timings)

    @property
    def exact_match(self) -> float:
        """Share of the pairs whose answer is right."""
        return sum(self.correct) / len(self.correct)

    def differences(self, plain: "Row") -> int:
        """How many pairs got other tokens than from plain generation."""
        return sum(not torch.equal(ours, theirs) for ours, theirs in zip(self.outputs, plain.outputs, strict=True))


class TrainingPairs(Dataset[dict[str, list[int]]]):
    """Pairs in the form that the Trainer takes: only the answer, including its end-of-text token, has labels."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        pair = self.pairs[index]
        return {
            "input_ids": pair.prompt + pair.answer,
            "labels": [NO_LABEL] * len(pair.prompt) + pair.answer,
        }


def encode(tokenizer: PreTrainedTokenizerBase, task: Task, text: str) -> Pair:
    """Encode a prompt and its answer separately, so that a prompt's tokens do not depend on what follows."""
    example = task.example(text)
    prompt, answer = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (example.prompt, example.answer)
    )
    return Pair(prompt, [*answer, tokenizer.eos_token_id], example.expected)


def encode_all(tokenizer: PreTrainedTokenizerBase, task: Task, texts: list[str], longest: int) -> list[Pair]:
    """Encode examples, and leave out pairs of more than ``longest`` tokens."""
    pairs = (encode(tokenizer, task, text) for text in texts)
    return [pair for pair in pairs if len(pair) <= longest]


def in_batches(pairs: Sequence[Pair], recipe: Recipe) -> list[Pair]:
    """Return the pairs of all steps in order: shuffled batches of similar length, so that there is little padding."""
    chance = random.Random(recipe.seed)
    batches: list[list[Pair]] = []
    while len(batches) < recipe.steps:
        shuffled = chance.sample(pairs, len(pairs))
        epoch = []
        for start in range(0, len(pairs), SORTED_BATCHES * recipe.batch_size):
            alike = sorted(shuffled[start : start + SORTED_BATCHES * recipe.batch_size], key=len)
            whole = len(alike) // recipe.batch_size
            epoch += [alike[place * recipe.batch_size :][: recipe.batch_size] for place in range(whole)]
        batches += chance.sample(epoch, len(epoch))
    return [pair for batch in batches[: recipe.steps] for pair in batch]


def collator(tokenizer: PreTrainedTokenizerBase) -> DataCollatorForSeq2Seq:
    """Return a collator that pads a batch; padding is masked and has no label, although it is the end-of-text token."""
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=NO_LABEL)


def training_arguments(
    recipe: Recipe, checkpoints: Path, kind: type[TrainingArguments] = TrainingArguments, **more: Any
) -> TrainingArguments:
    """Translate the recipe into the settings of a Trainer, which may need ``more``."""
    return kind(
        output_dir=str(checkpoints),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=min(recipe.warmup_steps, recipe.steps // 10),
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        optim="adamw_torch_fused",
        bf16=not recipe.fp32,
        use_cpu=True,
        seed=recipe.seed,
        logging_steps=50,
        save_steps=100,
        save_total_limit=2,
        report_to="none",
        **more,
    )


def new_trainer(recipe: Recipe, checkpoints: Path, **given: Any) -> Trainer:
    """Return the recipe's trainer with ``given`` model, data and callbacks."""
    if not recipe.sft:
        return Trainer(args=training_arguments(recipe, checkpoints), **given)
    import datasets
    from trl import SFTConfig, SFTTrainer

    given["train_dataset"] = datasets.Dataset.from_list(list(given["train_dataset"]))
    prepared = {"skip_prepare_dataset": True}  # the pairs are tokens with labels already
    return SFTTrainer(args=training_arguments(recipe, checkpoints, SFTConfig, dataset_kwargs=prepared), **given)


def load(folder: str | Path) -> PreTrainedModel:
    """Load a causal LM in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], checkpoints: Path
) -> PreTrainedModel:
    """Fine-tune by ``recipe``, resuming from the last checkpoint if there is one; adapters are merged."""
    last_checkpoint = get_last_checkpoint(str(checkpoints))
    if last_checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(last_checkpoint, "trainer_state.json")))
        if state.global_step >= recipe.steps:  # the Trainer would take one more step
            if not recipe.lora:
                return load(last_checkpoint)
            return PeftModel.from_pretrained(load(recipe.model), last_checkpoint).merge_and_unload()
    set_seed(recipe.seed)
    model = load(recipe.model)
    exits = exit_layers(model.config.num_hidden_layers)
    layerskip = [EarlyExitLoss(recipe.e_scale, Gradual(), exits), LayerDropout(p_max=recipe.p_max)]
    if recipe.lora:
        rank = recipe.lora_rank
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    trainer = new_trainer(
        recipe,
        checkpoints,
        model=model,
        train_dataset=TrainingPairs(in_batches(pairs, recipe)),
        processing_class=tokenizer,
        data_collator=collator(tokenizer),
        callbacks=layerskip if recipe.callbacks else [],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint)
    return model.merge_and_unload() if recipe.lora else model


class Generator:
    """Generates answers from a fine-tuned model, one row at a time.

    Args:
        model: The model, in float32.
        tokenizer: Its tokenizer.
        task: The task, which decides whether an answer is right.
        longest: Maximum number of tokens of prompt and answer, after which generation ends.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, longest: int) -> None:
        self.model = model.eval()
        self.task = task
        self.tokenizer = tokenizer
        self.options = {
            "max_length": longest,
            "do_sample": False,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }

    def inputs(self, pair: Pair) -> dict[str, torch.Tensor]:
        """Return the prompt as a batch of one."""
        prompt = torch.tensor([pair.prompt])  # [1, s]
        return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}

    def score(self, row: Row, pair: Pair) -> None:
        """Generate one answer and record in ``row`` how good it is."""
        output = self.model.generate(**self.inputs(pair), **self.options, **assisted_by(row))[0]  # [s]
        answer = self.tokenizer.decode(output[len(pair.prompt) :], skip_special_tokens=True)
        row.outputs.append(output)
        row.correct.append(self.task.is_right(answer, pair.expected))
        if row.assistant is not None:
            row.drafted += row.assistant.stats.drafted
            row.accepted += row.assistant.stats.accepted

    def time(self, rows: Sequence[Row], pairs: Sequence[Pair]) -> None:
        """Time all ``rows`` in turn on each of ``pairs``."""
        for pair in pairs:
            runs = {
                str(place): partial(timed_generate, self.model, self.inputs(pair), **self.options, **assisted_by(row))
                for place, row in enumerate(rows)
            }
            for row, timings in zip(rows, interleave(runs, repeats=1, warmup=0).values(), strict=True):
                row.timings.samples += timings.samples


def assisted_by(row: Row) -> dict[str, SelfSpec]:
    """Return the arguments of ``generate`` for ``row``."""
    return {} if row.assistant is None else {"assistant": row.assistant}


def best_self_speculation(generator: Generator, exit_layer: int, pairs: Sequence[Pair]) -> Row:
    """Return self-speculation at ``exit_layer`` with the stop rule that takes the least time on ``pairs``."""
    rows = [
        Row(f"self-speculative, {rule_name(rule)}", SelfSpec.layerskip(exit_layer, stop=rule), exit_layer)
        for rule in STOP_RULES
    ]
    generator.time(rows, pairs)
    best = min(rows, key=lambda row: sum(sample.decode for sample in row.timings.samples))
    best.timings = Timings()
    return best


def beside_free_drafts(assistant: SelfSpec) -> SelfSpec:
    """Return the same self-speculation in a cascade with free drafts."""
    assert isinstance(assistant.draft, EarlyExit)
    return SelfSpec(Cascade([Lookup(), assistant.draft]), assistant.stop)


def with_reduced_head(
    generator: Generator, training: Sequence[Pair], speculative: Sequence[Row], size: int
) -> list[Row]:
    """Return the same self-speculation with a head of the tokens most frequent in training, alone and in a cascade."""
    texts = [{"input_ids": pair.prompt + pair.answer} for pair in training[:HEAD_PAIRS]]
    head = fit_reduced_head(generator.model, None, texts, size=size)
    rows = []
    for row in speculative:
        assert row.assistant is not None
        assistant = SelfSpec(EarlyExit(row.exit_layer, head), row.assistant.stop)
        rows.append(Row("reduced head", assistant, row.exit_layer))
        rows.append(Row("reduced head, free drafts", beside_free_drafts(assistant), row.exit_layer))
    return rows


def rule_name(rule: FixedLength | ConfidenceThreshold) -> str:
    """Return what the table calls a stop rule."""
    return f"{rule.num_tokens} tokens" if isinstance(rule, FixedLength) else f"p ≥ {rule.threshold}"


def exit_layers(num_layers: int) -> list[int]:
    """Return the exits of the paper's table (after 1/4, 1/2 and 3/4 of the layers), and one after 1/8 of them."""
    return sorted({max(1, num_layers * eighth // 8) for eighth in (1, 2, 4, 6)})


def evaluate(
    generator: Generator, training: Sequence[Pair], held_out: Sequence[Pair], evaluation: Evaluation, seed: int
) -> list[Row]:
    """Measure plain generation and self-speculation at the same exits; plain generation comes first.

    Args:
        generator: The fine-tuned model.
        training: Pairs; some of them are used to choose stop rules.
        held_out: Pairs; some of them are measured.
        evaluation: How many are used.
        seed: Seed for choosing them.
    """
    chance = random.Random(seed)
    chosen = chance.sample(held_out, min(evaluation.pairs, len(held_out)))
    tuning = chance.sample(training, min(evaluation.tuning, len(training)))
    exits = exit_layers(generator.model.config.num_hidden_layers)
    speculative = [best_self_speculation(generator, exit_layer, tuning) for exit_layer in exits]
    free = [
        Row("with free drafts", beside_free_drafts(row.assistant), row.exit_layer)
        for row in speculative
        if row.assistant is not None
    ]
    rows = [Row("plain"), *speculative, Row("free drafts alone", SelfSpec.lookup()), *free]
    if evaluation.head:
        rows += with_reduced_head(generator, training, speculative, evaluation.head)
    for row in rows:
        for pair in chosen:
            generator.score(row, pair)
        logger.info("%s at %s: exact match %.3f", row.name, row.exit_layer, row.exact_match)
    generator.time(rows, chosen[: evaluation.timed])
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the paper's table as Markdown."""
    plain = rows[0]
    lines = [
        "| generation | E | exact match | acceptance rate | ms per token | speed-up |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        exit_layer = "-" if row.exit_layer is None else row.exit_layer
        acceptance = f"{row.accepted / row.drafted:.1%}" if row.drafted else "-"
        seconds = row.timings.median()
        speed_up = plain.timings.median() / seconds
        lines.append(
            f"| {row.name} | {exit_layer} | {row.exact_match:.1%} | {acceptance} | {seconds * 1e3:.2f} | "
            f"{speed_up:.2f} |"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> str:
    """Return one line that states whether self-speculation produced the tokens of plain generation."""
    plain = rows[0]
    compared = len(plain.outputs)
    different = sum(row.differences(plain) for row in rows[1:])
    if different:
        return f"Self-speculative tokens differ from plain generation in {different} outputs: please report this."
    return f"Self-speculative tokens equal plain generation's: yes, for all {compared} pairs at all exits."


def results(
    rows: Sequence[Row], task: Task, trained: str, pairs: tuple[int, int], evaluation: Evaluation, command: str
) -> str:
    """Return the text of ``results.md``: the table and what it was measured on."""
    count = len(rows[0].outputs)
    return f"""# {task.title}

{table(rows)}

{verdict(rows)}

Fine-tuned on {pairs[0]} pairs, {trained}; measured on {count} of {pairs[1]} held-out pairs. Milliseconds per token are
the median over {min(evaluation.timed, count)} of these pairs, decoding only (the prompt's pass is left out), all ways
in turn on each pair, one row, greedy, float32. The stop rule of each exit is the fastest of {len(STOP_RULES)} on
{evaluation.tuning} training pairs. Early exit only gives other tokens than the model; free drafts keep the texts that
they have written.

Measured on: {machine(torch.device("cpu"))}, Python {platform.python_version()}, peft {peft.__version__}

    {command}
"""


def finetune(
    recipe: Recipe, evaluation: Evaluation, data: Path | None, output: Path, checkpoints: Path, command: str = ""
) -> str:
    """Fine-tune by ``recipe``, write the model and its results to ``output`` and return the results.

    Args:
        recipe: What to train.
        evaluation: How much to measure.
        data: Where the task's examples are, ``None`` for its usual place.
        output: Folder for the finished model.
        checkpoints: Folder for the Trainer's checkpoints; a run found there is continued.
        command: The command that repeats the run, for the results.
    """
    if recipe.task not in TASKS:
        raise SystemExit(f"--task {recipe.task}: there is no such task; give one of {', '.join(TASKS)}")
    task = TASKS[recipe.task]
    data = data or task.data
    if data is None:
        raise SystemExit(f"--task {recipe.task} needs --data with the place of its examples")
    texts = task.read(data)
    check_same_run(checkpoints, recipe, texts)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    training = encode_all(tokenizer, task, texts.training, recipe.longest)
    held_out = encode_all(tokenizer, task, texts.held_out, recipe.longest)
    if len(training) < recipe.batch_size or not held_out:
        raise SystemExit(
            f"{data} gives {len(training)} pairs for training and {len(held_out)} held-out ones of at most "
            f"{recipe.longest} tokens; a batch of {recipe.batch_size} and a held-out one are needed, so name a folder "
            "or file with more"
        )
    logger.info("%d training pairs, %d held-out pairs", len(training), len(held_out))
    logger.info(
        "%.1f tokens per prompt and %.1f per answer on average",
        statistics.mean(len(pair.prompt) for pair in training),
        statistics.mean(len(pair.answer) for pair in training),
    )

    start = time.perf_counter()
    model = train_model(recipe, tokenizer, training, checkpoints)
    logger.info("training took %.1f minutes", (time.perf_counter() - start) / 60)
    save(model, tokenizer, output)

    torch.set_num_threads(1)
    generator = Generator(load(output), tokenizer, task, recipe.longest)
    rows = evaluate(generator, training, held_out, evaluation, recipe.seed)
    trained = f"{recipe.steps} steps of {recipe.batch_size}, {'LoRA' if recipe.lora else 'all weights'}"
    trained += ", TRL's SFTTrainer" if recipe.sft else ""
    trained += "" if recipe.callbacks else ", without LayerSkip's callbacks"
    text = results(rows, task, trained, (len(training), len(held_out)), evaluation, command)
    (output / "results.md").write_text(text, encoding="utf-8")
    return text


def parse_arguments(arguments: list[str]) -> tuple[Recipe, Evaluation, argparse.Namespace]:
    """Read the command line: one option per field of ``Recipe`` and ``Evaluation``, the folders and the threads."""
    kinds = [Recipe, Evaluation]
    parser = HfArgumentParser(kinds, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("task_model"), help="folder for the model and its results")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from (default: OUTPUT-checkpoints)")
    parser.add_argument("--data", type=Path, help="examples of the task (default: the standard library's sources)")
    parser.add_argument("--threads", type=int, help="CPU threads for training (default: PyTorch's choice)")
    recipe, evaluation, options = parser.parse_args_into_dataclasses(arguments)
    options.checkpoints = options.checkpoints or options.output.with_name(options.output.name + "-checkpoints")
    return recipe, evaluation, options


def main(arguments: list[str]) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    recipe, evaluation, options = parse_arguments(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    command = shlex.join(["python", "examples/finetune_task.py", *arguments])
    print(finetune(recipe, evaluation, options.data, options.output, options.checkpoints, command))


if __name__ == "__main__":
    main(sys.argv[1:])
