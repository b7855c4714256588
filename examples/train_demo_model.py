"""Train the small Llama-type demo model on Python's own standard library, on a CPU.

The corpus is the ``*.py`` source of the standard library of the interpreter that runs this script, so nothing is
downloaded. A byte-level BPE is trained on it, then a ``LlamaForCausalLM`` from a config, with the stock ``Trainer`` and
the callbacks that train its early layers to predict tokens (LayerSkip)::

    python examples/train_demo_model.py --plain --output twin          # the same model without the callbacks
    python examples/train_demo_model.py --twin twin                    # the shipped model, compared with its twin
    python examples/train_demo_model.py --steps 2 --output trial       # the whole way in two steps

On one core of an AMD EPYC with AVX-512 bfloat16 (``--threads 1``) the first two take 40 to 60 minutes each, the third
less than a minute. A run that was stopped continues from its last checkpoint when the same command is given again. The
result is a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load, with a model card that states what was
measured.
"""

import argparse
import json
import logging
import math
import platform
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tokenizers
import torch
import transformers
from benchmarks.corpus import Corpus, read_corpus
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_selfspec import EarlyExitLoss, ExitReport, LayerDropout, exit_report

logger = logging.getLogger("train_demo_model")

END_OF_TEXT = "<|endoftext|>"
MONITORING_BLOCKS = 64


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, apart from the corpus and the library versions.

    Attributes:
        steps: Optimiser steps.
        layers: Decoder layers.
        width: Model width; the MLP is 8/3 times as wide, rounded up to a multiple of 64.
        heads: Query heads.
        key_value_heads: Key and value heads (grouped-query attention); divides ``heads``.
        vocabulary: Size of the byte-level BPE vocabulary, the end-of-text token included.
        context: Tokens per training sequence and longest supported position.
        initializer_range: Standard deviation of the initial matrices, near one over the root of ``width``.
        batch_size: Sequences per step; a corpus this small is learned best in many small steps.
        learning_rate: Peak learning rate of AdamW; linear warm-up, then a cosine down to a tenth of it.
        warmup_steps: Steps of the warm-up, at most a tenth of ``steps``.
        adam_beta2: Decay of AdamW's second moment; near 1 because single batches are small.
        weight_decay: Decoupled weight decay of the matrices; norms have none.
        seed: Seed of the initial weights and of the order of the sequences.
        fp32: Compute in float32 rather than in bfloat16 autocast.
        exit_layers: Exits of the early-exit loss, which weights them and the last layer equally. The first one drafts.
        layer_dropout: ``p_max`` of the layer dropout.
        plain: Train without early-exit loss and layer dropout.
    """

    steps: int = 7000
    layers: int = 24
    width: int = 128
    heads: int = 4
    key_value_heads: int = 2
    vocabulary: int = 4096
    context: int = 512
    initializer_range: float = 0.088
    batch_size: int = 1
    learning_rate: float = 2.5e-3
    warmup_steps: int = 300
    adam_beta2: float = 0.99
    weight_decay: float = 0.1
    seed: int = 0
    fp32: bool = False
    exit_layers: list[int] = field(default_factory=lambda: [3, 6, 12])
    layer_dropout: float = 0.1
    plain: bool = False


@dataclass(frozen=True)
class HeldOut:
    """How well the saved model predicts held-out text.

    Attributes:
        exits: Loss, accuracy and agreement with the last layer at every exit.
        bytes_per_token: UTF-8 bytes of held-out text that one token stands for on average.
    """

    exits: ExitReport
    bytes_per_token: float

    @property
    def loss(self) -> float:
        """Nats per token after the last layer."""
        return self.exits.loss[-1]

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Loss in a unit that does not depend on the tokenizer."""
        return self.loss / math.log(2) / self.bytes_per_token


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Token blocks of one length, in the form that the Trainer takes.

    Args:
        blocks: Token ids, shape (number of blocks, s).
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index]
        return {"input_ids": block, "labels": block}


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE; any text can be encoded, and decoding returns the same text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_or_train_tokenizer(file: Path, texts: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Return the tokenizer that an earlier run has saved in ``file``, else train one and save it there."""
    if file.exists():
        tokenizer = Tokenizer.from_file(str(file))
    else:
        tokenizer = train_tokenizer(texts, recipe.vocabulary)
        tokenizer.save(str(file))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Encode texts into one row of token ids, shape (n,), each text followed by the end-of-text token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    end_of_text = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    return torch.tensor([token for encoding in encodings for token in (*encoding.ids, end_of_text)])


def cut(tokens: torch.Tensor, context: int) -> torch.Tensor:
    """Cut a row of tokens into consecutive blocks, shape (number of blocks, context); the remainder is dropped."""
    return tokens[: len(tokens) // context * context].view(-1, context)


def build_model(recipe: Recipe, end_of_text: int) -> LlamaForCausalLM:
    """Build the untrained model, in float32."""
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        intermediate_size=math.ceil(recipe.width * 8 / 3 / 64) * 64,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    return LlamaForCausalLM(config)


def training_arguments(recipe: Recipe, checkpoints: Path) -> TrainingArguments:
    """Translate the recipe into the Trainer's settings."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
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
        logging_steps=100,
        eval_strategy="steps",
        eval_steps=1000,
        save_steps=500,
        save_total_limit=2,
        report_to="none",
    )


def callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """Return the callbacks that train early layers to predict tokens."""
    if recipe.plain:
        return []
    return [
        EarlyExitLoss(e_scale=1.0, layers=recipe.exit_layers),
        LayerDropout(recipe.layer_dropout),
    ]


def train_model(
    recipe: Recipe, end_of_text: int, training_blocks: torch.Tensor, held_out_blocks: torch.Tensor, checkpoints: Path
) -> LlamaForCausalLM:
    """Train a model by ``recipe``, resuming from the last checkpoint if there is one.

    Args:
        recipe: What to train.
        end_of_text: Id of the end-of-text token.
        training_blocks: Token ids, shape (number of blocks, s).
        held_out_blocks: Token ids, shape (number of blocks, s); some of them are evaluated now and then.
        checkpoints: The Trainer's folder.
    """
    last_checkpoint = get_last_checkpoint(str(checkpoints))
    if last_checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(last_checkpoint, "trainer_state.json")))
        if state.global_step >= recipe.steps:  # the Trainer would take one more step
            return LlamaForCausalLM.from_pretrained(last_checkpoint)
    set_seed(recipe.seed)
    model = build_model(recipe, end_of_text)
    logger.info("%d parameters", model.num_parameters())
    trainer = Trainer(
        model=model,
        args=training_arguments(recipe, checkpoints),
        train_dataset=Blocks(training_blocks),
        eval_dataset=Blocks(held_out_blocks[:: max(1, len(held_out_blocks) // MONITORING_BLOCKS)]),
        data_collator=default_data_collator,
        callbacks=callbacks(recipe),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint)
    return model


def check_same_run(checkpoints: Path, recipe: Recipe, corpus: Corpus) -> None:
    """Record the settings of the run in ``checkpoints``, or refuse to continue a run with other settings.

    Raises:
        SystemExit: The folder holds a run with another recipe or corpus.
    """
    wanted = {**asdict(recipe), "corpus": corpus.digest}
    record = checkpoints / "recipe.json"
    if not record.exists():
        checkpoints.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        return
    found = json.loads(record.read_text(encoding="utf-8"))
    changed = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if changed:
        raise SystemExit(
            f"{checkpoints} holds a run that differs in {', '.join(changed)}; "
            "repeat its settings to continue it, or name another folder with --checkpoints"
        )


def held_out_quality(folder: Path, tokenizer: PreTrainedTokenizerFast, blocks: torch.Tensor) -> ExitReport:
    """Evaluate every exit of the model in ``folder`` on ``blocks``, shape (number of blocks, s), in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return exit_report(model, tokenizer, tokenizer.batch_decode(blocks), max_length=blocks.shape[1])


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model in bfloat16 and its tokenizer to ``output``."""
    model.config.use_cache = True  # the Trainer switches it off
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)


def model_card(
    recipe: Recipe, corpus: Corpus, training_tokens: int, parameters: int, held_out: HeldOut, twin: ExitReport | None
) -> str:
    """Return the text of the model card: what the model is, how it was made and how good it is."""
    tokens_seen = recipe.steps * recipe.batch_size * recipe.context
    precision = "float32" if recipe.fp32 else "bfloat16 autocast over float32 weights"
    loss = "plain next-token loss"
    if not recipe.plain:
        loss = (
            f"LayerSkip's early-exit loss at exits {', '.join(map(str, recipe.exit_layers))} and the last layer, "
            f"weighed alike, and layer dropout (p_max {recipe.layer_dropout:g}, constant)"
        )
    return f"""---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: [code]
tags: [python, layerskip]
library_name: transformers
pipeline_tag: text-generation
---

# Demo model: Python's standard library

A Llama-type language model with {parameters:,} parameters, small enough to ship with the examples and the tests. It
continues Python source. It is made to show decoding at work, not to write code for anyone: greedy output soon repeats
itself. End a prompt without a newline, since the tokenizer joins a newline with the indentation after it.

## Model

{recipe.layers} layers, width {recipe.width}, {recipe.heads} query heads and {recipe.key_value_heads} key-value heads,
SwiGLU, rotary positions, context {recipe.context}, input and output embeddings tied, stored in bfloat16. The tokenizer
is a byte-level BPE with {recipe.vocabulary} tokens, trained on the same files; `{END_OF_TEXT}` ends each file.

## Data

The `.py` files of CPython {platform.python_version()}'s standard library, without tests, installed packages,
`encodings` and generated tables: {len(corpus.training)} files for training ({training_tokens:,} tokens) and
{len(corpus.held_out)} held out. The CRC-32 of its path decides whether a file is held out, so every machine splits
alike. SHA-256 of the corpus: `{corpus.digest}`.

## Training

`{training_command(recipe)}` with transformers {transformers.__version__}, torch {torch.__version__.split("+")[0]} and
tokenizers {tokenizers.__version__}: {loss}, AdamW (betas 0.9 and {recipe.adam_beta2}, weight decay
{recipe.weight_decay}), {recipe.steps} steps of {recipe.batch_size} x {recipe.context} tokens ({tokens_seen:,} tokens,
{tokens_seen / training_tokens:.1f} passes over the training files), peak learning rate {recipe.learning_rate:g}
after a warm-up, cosine to a tenth of it, {precision}, seed {recipe.seed}.

## Held-out quality

Stored weights, computed in float32, blocks of {recipe.context} tokens ({held_out.exits.tokens:,} predicted tokens):

| loss (nats per token) | perplexity per token | bits per byte | bytes per token |
| --- | --- | --- | --- |
| {held_out.loss:.3f} | {held_out.perplexity:.2f} | {held_out.bits_per_byte:.3f} | {held_out.bytes_per_token:.2f} |

## Exits

Exit E is the model's own norm and head after the first E layers. Agreement is the share of positions where its most
probable token is the last layer's.{"" if twin is None else TWIN}

{exit_table(held_out.exits, twin)}

## Licence

The corpus is part of CPython, Copyright (c) 2001 Python Software Foundation and others, under the PSF License Agreement
version 2 (https://docs.python.org/3/license.html). The model can repeat passages of it; treat such output as text under
that licence.
"""


TWIN = """ The twin had the same data, order and
steps, without early-exit loss and layer dropout; it is not shipped."""


def exit_table(report: ExitReport, twin: ExitReport | None) -> str:
    """Return loss and agreement at every exit as a Markdown table, next to the twin's."""
    columns = ["exit", "loss", "agreement"] + ([] if twin is None else ["twin's loss", "twin's agreement"])
    rows = [columns, ["---"] * len(columns)]
    for layer, cells in enumerate(zip(report.loss, report.agreement, strict=True)):
        loss, agreement = cells
        row = [str(layer + 1), f"{loss:.3f}", f"{agreement:.3f}"]
        if twin is not None:
            row += [f"{twin.loss[layer]:.3f}", f"{twin.agreement[layer]:.3f}"]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def training_command(recipe: Recipe) -> str:
    """Return the command that repeats this recipe, with only the options that differ from the defaults."""
    words = ["python examples/train_demo_model.py"]
    usual = asdict(Recipe())
    for name, value in asdict(recipe).items():
        if value != usual[name]:
            words.append("--" + name.replace("_", "-"))
            if not isinstance(value, bool):
                words += map(str, value) if isinstance(value, list) else [str(value)]
    return " ".join(words)


def train(
    recipe: Recipe, output: Path, checkpoints: Path, twin: Path | None = None, evaluated: int | None = None
) -> HeldOut:
    """Train a model by ``recipe``, write it with its card to ``output`` and return its held-out quality.

    Args:
        recipe: What to train.
        output: Folder for the finished model.
        checkpoints: Folder for the tokenizer and the Trainer's checkpoints; a run found there is continued.
        twin: Folder of a model to compare with in the card.
        evaluated: Held-out blocks to evaluate on, all of them by default.
    """
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    check_same_run(checkpoints, recipe, corpus)
    tokenizer = load_or_train_tokenizer(checkpoints / "tokenizer.json", corpus.training, recipe)
    training_tokens = encode(tokenizer, corpus.training)
    held_out_tokens = encode(tokenizer, corpus.held_out)
    held_out_blocks = cut(held_out_tokens, recipe.context)[:evaluated]
    logger.info("%d training tokens, %d held-out tokens", len(training_tokens), len(held_out_tokens))

    training_blocks = cut(training_tokens, recipe.context)
    model = train_model(recipe, tokenizer.eos_token_id, training_blocks, held_out_blocks, checkpoints)
    parameters = model.num_parameters()
    save(model, tokenizer, output)
    held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
    held_out = HeldOut(held_out_quality(output, tokenizer, held_out_blocks), held_out_bytes / len(held_out_tokens))
    twin_quality = None if twin is None else held_out_quality(twin, tokenizer, held_out_blocks)
    card = model_card(recipe, corpus, len(training_tokens), parameters, held_out, twin_quality)
    (output / "README.md").write_text(card, encoding="utf-8")
    return held_out


def parse_arguments(arguments: list[str]) -> tuple[Recipe, argparse.Namespace]:
    """Read the command line: one option per field of ``Recipe``, the folders and the threads."""
    parser = HfArgumentParser(Recipe, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_output = Path(__file__).parent / "demo_model"
    parser.add_argument("--output", type=Path, default=default_output, help="folder for the model")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from (default: OUTPUT-checkpoints)")
    parser.add_argument("--twin", type=Path, help="folder of a finished model to compare with in the card")
    parser.add_argument("--held-out-blocks", type=int, help="evaluate only on the first held-out blocks")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    recipe, options = parser.parse_args_into_dataclasses(arguments)
    options.checkpoints = options.checkpoints or options.output.with_name(options.output.name + "-checkpoints")
    return recipe, options


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    recipe, options = parse_arguments(sys.argv[1:])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    held_out = train(recipe, options.output, options.checkpoints, options.twin, options.held_out_blocks)
    print(
        f"{options.output}: held-out loss {held_out.loss:.3f} nats per token, perplexity {held_out.perplexity:.2f}, "
        f"{held_out.bits_per_byte:.3f} bits per byte"
    )


if __name__ == "__main__":
    main()
