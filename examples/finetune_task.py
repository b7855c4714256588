"""Fine-tune a model for one task with LayerSkip's recipe and generate fast: the paper's task experiment, in small.

The paper (LayerSkip, Tables 6 and 11) teaches a Llama to turn requests into JSON (TOPv2). Here the input is a ``def``
header of Python's standard library and the answer is its signature as JSON, so nothing is downloaded::

    def get(self,key,default=None,*args:int)->str:
    {"name":"get","args":[{"name":"self","kind":"arg"},{"name":"key","kind":"arg"},{"name":"default","kind":"arg",
    "default":"None"},{"name":"args","kind":"vararg","annotation":"int"}],"returns":"str"}

The JSON is one line, and so is the header, however it was written; the spaces between its parts are taken out, because
a tokenizer joins a space with the word after it, and a name should have the same tokens in the header and the answer.
``kind`` is the name of the field of ``ast.arguments`` that holds the argument, without its plural: ``posonly``,
``arg``, ``vararg``, ``kwonly`` or ``kwarg``. What a header does not have (``annotation``, ``default``, ``returns``,
``async``) is left out of its JSON. To train, evaluate and print the table, with all weights or with LoRA::

    python examples/finetune_task.py --threads 2
    python examples/finetune_task.py --threads 2 --lora --output task_lora

A run that was stopped continues from its last checkpoint when the same command is given again; when the training is
complete only the evaluation is repeated. The table also goes to ``results.md`` in the output folder.
"""

import argparse
import ast
import hashlib
import json
import logging
import platform
import random
import shlex
import statistics
import sys
import sysconfig
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
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

from hf_selfspec import ConfidenceThreshold, EarlyExitLoss, FixedLength, Gradual, LayerDropout, SelfSpec
from hf_selfspec.bench.corpus import Corpus, is_held_out
from hf_selfspec.bench.measure import Timings, interleave, machine, timed_generate
from hf_selfspec.train import even

logger = logging.getLogger("finetune_task")

INSTALLED_PACKAGES = {"dist-packages", "site-packages"}
# Two headers of three take nothing but ``self``; that many would make the task one of copying names.
BARE_ONE_IN = 4
# So many batches are drawn together and sorted: enough for pairs of like length to meet, too few to sort an epoch.
SORTED_BATCHES = 50
NO_LABEL = -100
STARS = {"vararg": "*", "kwarg": "**"}
STOP_RULES = (
    FixedLength(2),
    FixedLength(4),
    FixedLength(6),
    FixedLength(8),
    FixedLength(12),
    ConfidenceThreshold(0.6),
    ConfidenceThreshold(0.8),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, apart from the headers and the library versions.

    Attributes:
        model: Folder (or name) of the causal LM to fine-tune.
        steps: Optimiser steps.
        batch_size: Pairs per step; pairs of like length go together.
        learning_rate: Peak learning rate of AdamW; linear warm-up, then a cosine down to a tenth of it.
        warmup_steps: Steps of the warm-up, at most a tenth of ``steps``.
        adam_beta2: Decay of AdamW's second moment.
        weight_decay: Decoupled weight decay of the matrices; norms have none.
        e_scale: Weight of the early exits' losses against the last layer's; the paper takes 1.0 for this experiment.
        p_max: Dropout rate of the last layer; the paper takes 0.2 for this experiment.
        longest: Tokens of the longest pair, prompt and answer; longer ones are left out.
        lora: Train low-rank adapters of all linear layers of attention and MLP instead of all weights.
        lora_rank: Rank of the adapters, which are scaled by 2.
        seed: Seed of the order of the pairs, of the dropped layers and of the evaluated pairs.
        fp32: Compute in float32 rather than in bfloat16 autocast.
    """

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
    lora: bool = False
    lora_rank: int = 16
    seed: int = 0
    fp32: bool = False


@dataclass(frozen=True)
class Evaluation:
    """How much is measured after training.

    Attributes:
        pairs: Held-out pairs for exact match and acceptance rate.
        timed: How many of these are also timed.
        tuning: Training pairs on which the stop rule of each exit is chosen.
    """

    pairs: int = 200
    timed: int = 30
    tuning: int = 8


@dataclass(frozen=True)
class Pair:
    """One header and its answer as tokens.

    Attributes:
        prompt: Token ids of the header and the newline after it.
        answer: Token ids of the JSON, and the end-of-text token.
        signature: What the JSON says.
    """

    prompt: list[int]
    answer: list[int]
    signature: dict[str, Any]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass
class Row:
    """One way to generate, and what was measured with it.

    Attributes:
        name: What the table calls it.
        assistant: What goes to ``generate``, if anything.
        exit_layer: Its exit layer, if it has one.
        lossless: Whether it has to give the tokens of plain generation.
        correct: For each pair whether the JSON is right.
        outputs: For each pair the token ids, shape (s,).
        drafted: Drafting steps, all pairs.
        accepted: Drafted tokens that were kept, all pairs.
        timings: One sample for each timed pair.
    """

    name: str
    assistant: SelfSpec | None = None
    exit_layer: int | None = None
    lossless: bool = True
    correct: list[bool] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    timings: Timings = field(default_factory=Timings)

    @property
    def exact_match(self) -> float:
        """Share of the pairs whose JSON is right."""
        return sum(self.correct) / len(self.correct)

    def differences(self, plain: "Row") -> int:
        """How many pairs got other tokens than from plain generation."""
        return sum(not torch.equal(ours, theirs) for ours, theirs in zip(self.outputs, plain.outputs, strict=True))


class TrainingPairs(Dataset[dict[str, list[int]]]):
    """Pairs in the form the Trainer takes: only the answer, its end-of-text token included, has labels."""

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


def signature_of(function: Function) -> dict[str, Any]:
    """Return what a function's header says, in the form of the answer's JSON."""
    arguments = function.args
    by_position = [("posonly", arg) for arg in arguments.posonlyargs] + [("arg", arg) for arg in arguments.args]
    required = len(by_position) - len(arguments.defaults)
    found = [
        _argument(kind, arg, default)
        for (kind, arg), default in zip(by_position, [None] * required + arguments.defaults, strict=True)
    ]
    if arguments.vararg is not None:
        found.append(_argument("vararg", arguments.vararg))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_argument("kwonly", arg, default))
    if arguments.kwarg is not None:
        found.append(_argument("kwarg", arguments.kwarg))
    signature: dict[str, Any] = {"name": function.name}
    if isinstance(function, ast.AsyncFunctionDef):
        signature["async"] = True
    signature["args"] = found
    if function.returns is not None:
        signature["returns"] = ast.unparse(function.returns)
    return signature


def _argument(kind: str, arg: ast.arg, default: ast.expr | None = None) -> dict[str, str]:
    found = {"name": arg.arg, "kind": kind}
    if arg.annotation is not None:
        found["annotation"] = ast.unparse(arg.annotation)
    if default is not None:
        found["default"] = ast.unparse(default)
    return found


def header_of(signature: dict[str, Any]) -> str:
    """Return a signature as a ``def`` header on one line, without spaces between its parts."""
    kinds = [argument["kind"] for argument in signature["args"]]
    parts = []
    for place, (argument, kind) in enumerate(zip(signature["args"], kinds, strict=True)):
        if kind == "kwonly" and not {"vararg", "kwonly"} & set(kinds[:place]):
            parts.append("*")
        annotation = f":{argument['annotation']}" if "annotation" in argument else ""
        default = f"={argument['default']}" if "default" in argument else ""
        parts.append(STARS.get(kind, "") + argument["name"] + annotation + default)
        if kind == "posonly" and "posonly" not in kinds[place + 1 :]:
            parts.append("/")
    keyword = "async def" if "async" in signature else "def"
    returns = f"->{signature['returns']}" if "returns" in signature else ""
    return f"{keyword} {signature['name']}({','.join(parts)}){returns}:"


def parse_header(header: str) -> dict[str, Any]:
    """Return the signature that :func:`header_of` made a header from."""
    function = ast.parse(f"{header} pass").body[0]
    assert isinstance(function, Function)
    return signature_of(function)


def headers_in(source: bytes) -> Iterator[str]:
    """Yield the headers of all functions in a file: methods and nested functions too; none if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in old sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        # Type parameters (Python 3.12) have no place in the JSON.
        if isinstance(node, Function) and not getattr(node, "type_params", None):
            yield header_of(signature_of(node))


def answer_text(signature: dict[str, Any]) -> str:
    """Return a signature as compact JSON."""
    return json.dumps(signature, separators=(",", ":"), ensure_ascii=False)


def is_right(text: str, signature: dict[str, Any]) -> bool:
    """Whether ``text`` is JSON that says the same as ``signature``, however it is written."""
    try:
        return bool(json.loads(text) == signature)
    except ValueError:
        return False


def is_kept(header: str) -> bool:
    """Whether a header takes part: all that take something, and one in ``BARE_ONE_IN`` of the others."""
    takes_nothing = header.endswith(("():", "(self):"))
    return not takes_nothing or zlib.crc32(header.encode()) % BARE_ONE_IN == 0


def read_headers(library: Path) -> Corpus:
    """Read the headers of all sources below ``library``, tests included, each once.

    The split is by file and the same as that of the demo model's training, so that neither stage saw a held-out file.
    A header that is in a held-out file is not trained on even if it is in other files too.
    """
    training: dict[str, None] = {}
    held_out: dict[str, None] = {}
    files = sorted((file.relative_to(library) for file in library.rglob("*.py")), key=lambda file: file.as_posix())
    for file in files:
        if INSTALLED_PACKAGES.isdisjoint(file.parts):
            kept = filter(is_kept, headers_in((library / file).read_bytes()))
            (held_out if is_held_out(file) else training).update(dict.fromkeys(kept))
    halves = [header for header in training if header not in held_out], list(held_out)
    return Corpus(*halves, hashlib.sha256(json.dumps(halves).encode()).hexdigest())


def encode(tokenizer: PreTrainedTokenizerBase, header: str) -> Pair:
    """Encode a header and its answer apart from each other, so that a prompt's tokens do not depend on what follows."""
    signature = parse_header(header)
    prompt, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f"{header}\n", answer_text(signature))
    )
    return Pair(prompt, [*answer, tokenizer.eos_token_id], signature)


def encode_all(tokenizer: PreTrainedTokenizerBase, headers: list[str], longest: int) -> list[Pair]:
    """Encode headers, and leave out pairs of more than ``longest`` tokens."""
    pairs = (encode(tokenizer, header) for header in headers)
    return [pair for pair in pairs if len(pair) <= longest]


def in_batches(pairs: Sequence[Pair], recipe: Recipe) -> list[Pair]:
    """Return the pairs of all steps in order: batches of like length, so that there is little padding, shuffled."""
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
    """Return what pads a batch: padding is masked and has no label, although it is the end-of-text token."""
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=NO_LABEL)


def training_arguments(recipe: Recipe, checkpoints: Path) -> TrainingArguments:
    """Translate the recipe into the Trainer's settings."""
    return TrainingArguments(
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
    )


def load(folder: str | Path) -> PreTrainedModel:
    """Load a causal LM in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], checkpoints: Path
) -> PreTrainedModel:
    """Fine-tune by ``recipe``, going on from the last checkpoint if there is one; adapters are merged."""
    last_checkpoint = get_last_checkpoint(str(checkpoints))
    if last_checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(last_checkpoint, "trainer_state.json")))
        if state.global_step >= recipe.steps:  # the Trainer would take one step more
            if not recipe.lora:
                return load(last_checkpoint)
            return PeftModel.from_pretrained(load(recipe.model), last_checkpoint).merge_and_unload()
    set_seed(recipe.seed)
    model = load(recipe.model)
    exits = exit_layers(model.config.num_hidden_layers)
    if recipe.lora:
        rank = recipe.lora_rank
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    trainer = Trainer(
        model=model,
        args=training_arguments(recipe, checkpoints),
        train_dataset=TrainingPairs(in_batches(pairs, recipe)),
        data_collator=collator(tokenizer),
        callbacks=[
            EarlyExitLoss(recipe.e_scale, Gradual(), exits, scale=even),
            LayerDropout(p_max=recipe.p_max),
        ],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint)
    return model.merge_and_unload() if recipe.lora else model


class Generator:
    """Generates answers from a fine-tuned model, one row at a time.

    Args:
        model: The model, in float32.
        tokenizer: Its tokenizer.
        longest: Tokens of prompt and answer after which generation ends in any case.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        self.model = model.eval()
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
        """Generate one answer and note in ``row`` how good it is."""
        output = self.model.generate(**self.inputs(pair), **self.options, **assisted_by(row))[0]  # [s]
        answer = self.tokenizer.decode(output[len(pair.prompt) :], skip_special_tokens=True)
        row.outputs.append(output)
        row.correct.append(is_right(answer, pair.signature))
        if row.assistant is not None and row.lossless:
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
    """Return the argument of ``generate`` that makes it generate in the way of ``row``."""
    return {} if row.assistant is None else {"assistant": row.assistant}


def best_self_speculation(generator: Generator, exit_layer: int, pairs: Sequence[Pair]) -> Row:
    """Return self-speculation at ``exit_layer`` with the stop rule that takes least time on ``pairs``."""
    rows = [
        Row(f"self-speculative, {rule_name(rule)}", SelfSpec.layerskip(exit_layer, stop=rule), exit_layer)
        for rule in STOP_RULES
    ]
    generator.time(rows, pairs)
    best = min(rows, key=lambda row: sum(sample.decode for sample in row.timings.samples))
    best.timings = Timings()
    return best


def rule_name(rule: FixedLength | ConfidenceThreshold) -> str:
    """Return what the table calls a stop rule."""
    return f"{rule.num_tokens} tokens" if isinstance(rule, FixedLength) else f"p ≥ {rule.threshold}"


def exit_layers(num_layers: int) -> list[int]:
    """Return the exits of the paper's table, after a quarter, half and three quarters of the layers, and an eighth."""
    return sorted({max(1, num_layers * eighth // 8) for eighth in (1, 2, 4, 6)})


def evaluate(
    generator: Generator, training: Sequence[Pair], held_out: Sequence[Pair], evaluation: Evaluation, seed: int
) -> list[Row]:
    """Measure plain generation, early exits and self-speculation at the same exits; plain generation comes first.

    Args:
        generator: The fine-tuned model.
        training: Pairs of which some serve to choose stop rules.
        held_out: Pairs of which some are measured.
        evaluation: How many.
        seed: Decides which.
    """
    chance = random.Random(seed)
    chosen = chance.sample(held_out, min(evaluation.pairs, len(held_out)))
    tuning = chance.sample(training, min(evaluation.tuning, len(training)))
    exits = exit_layers(generator.model.config.num_hidden_layers)
    early = [
        Row("early exit only", SelfSpec.early_exit_only(exit_layer), exit_layer, lossless=False) for exit_layer in exits
    ]
    speculative = [best_self_speculation(generator, exit_layer, tuning) for exit_layer in exits]
    rows = [Row("plain"), *early, *speculative]
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
    """Return one line that says whether self-speculation gave the tokens of plain generation."""
    plain = rows[0]
    compared = len(plain.outputs)
    different = sum(row.differences(plain) for row in rows[1:] if row.lossless)
    if different:
        return f"Self-speculative tokens differ from plain generation in {different} outputs: please report this."
    return f"Self-speculative tokens equal plain generation's: yes, for all {compared} pairs at all exits."


def results(rows: Sequence[Row], trained: str, pairs: tuple[int, int], evaluation: Evaluation, command: str) -> str:
    """Return the text of ``results.md``: the table and what it was measured on."""
    count = len(rows[0].outputs)
    return f"""# Signature of a `def` header as JSON

{table(rows)}

{verdict(rows)}

Fine-tuned on {pairs[0]} headers of CPython {platform.python_version()}'s standard library, {trained}; measured on
{count} of the {pairs[1]} headers of held-out files. Exact match compares the JSON as parsed objects. Milliseconds per
token are the median over {min(evaluation.timed, count)} of these pairs, decoding only (the prompt's pass is left out),
all ways in turn on each pair, one row, greedy, float32. The stop rule of each exit is the fastest of
{len(STOP_RULES)} on {evaluation.tuning} training pairs. Early exit only gives other tokens than the model.

Measured on: {machine(torch.device("cpu"))}, peft {peft.__version__}

    {command}
"""


def finetune(
    recipe: Recipe, evaluation: Evaluation, library: Path, output: Path, checkpoints: Path, command: str = ""
) -> str:
    """Fine-tune by ``recipe``, write the model and its results to ``output`` and return the results.

    Args:
        recipe: What to train.
        evaluation: How much to measure.
        library: Folder whose sources the headers are taken from.
        output: Folder for the finished model.
        checkpoints: Folder for the Trainer's checkpoints; a run found there is continued.
        command: What repeats the run, for the results.
    """
    headers = read_headers(library)
    check_same_run(checkpoints, recipe, headers)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    training = encode_all(tokenizer, headers.training, recipe.longest)
    held_out = encode_all(tokenizer, headers.held_out, recipe.longest)
    if len(training) < recipe.batch_size or not held_out:
        raise SystemExit(
            f"{library} gives {len(training)} pairs for training and {len(held_out)} held-out ones of at most "
            f"{recipe.longest} tokens; a batch of {recipe.batch_size} and a held-out one are needed, so name a folder "
            "with more sources"
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
    rows = evaluate(Generator(load(output), tokenizer, recipe.longest), training, held_out, evaluation, recipe.seed)
    trained = f"{recipe.steps} steps of {recipe.batch_size}, {'LoRA' if recipe.lora else 'all weights'}"
    text = results(rows, trained, (len(training), len(held_out)), evaluation, command)
    (output / "results.md").write_text(text, encoding="utf-8")
    return text


def parse_arguments(arguments: list[str]) -> tuple[Recipe, Evaluation, argparse.Namespace]:
    """Read the command line: one option per field of ``Recipe`` and ``Evaluation``, the folders and the threads."""
    kinds = [Recipe, Evaluation]
    parser = HfArgumentParser(kinds, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--output", type=Path, default=Path("task_model"), help="folder for the model and its results")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from (default: OUTPUT-checkpoints)")
    parser.add_argument("--library", type=Path, default=stdlib, help="sources (default: the standard library)")
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
    print(finetune(recipe, evaluation, options.library, options.output, options.checkpoints, command))


if __name__ == "__main__":
    main(sys.argv[1:])
