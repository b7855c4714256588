"""Give a plainly trained model early exits with LoRA: the weights stay as they are, only adapters are trained.

The model is one that ``train_demo_model.py --plain`` made; data and split are the same::

    python examples/lora_layerskip.py --model twin --output twin-lora

On one core (``--threads 1``) this takes about ten minutes. The adapters are saved to the output folder, with a table of
every exit's loss and agreement before and after. ``PeftModel.from_pretrained(model, output)`` puts them on, and
``model.generate(**inputs, assistant=SelfSpec.layerskip())`` drafts with them.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from train_demo_model import Blocks, cut, encode, exit_table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_selfspec import EarlyExitLoss, ExitReport, Rotational, exit_report
from hf_selfspec.bench.corpus import read_corpus


def train_adapters(model: PeftModel, blocks: torch.Tensor, steps: int, learning_rate: float, checkpoints: Path) -> None:
    """Train the adapters with early-exit loss, going on from the last checkpoint if there is one."""
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(50, steps // 10),
        bf16=True,
        use_cpu=True,
        logging_steps=50,
        save_steps=200,
        save_total_limit=1,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Blocks(blocks),
        data_collator=default_data_collator,
        callbacks=[EarlyExitLoss(1.0, Rotational(8))],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the plainly trained model")
    parser.add_argument("--output", type=Path, required=True, help="folder for the adapters and the table")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--held-out-blocks", type=int, default=None, help="evaluate on fewer blocks")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    set_seed(0)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    context = base.config.max_position_embeddings
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    held_out = tokenizer.batch_decode(cut(encode(tokenizer, corpus.held_out), context)[: options.held_out_blocks])

    def quality(model: torch.nn.Module) -> ExitReport:
        return exit_report(model, tokenizer, held_out, max_length=context)

    before = quality(base)
    settings = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, settings)
    blocks = cut(encode(tokenizer, corpus.training), context)
    train_adapters(
        model,
        blocks,
        options.steps,
        options.learning_rate,
        options.output.with_name(options.output.name + "-checkpoints"),
    )
    after = quality(model)
    model.save_pretrained(options.output)
    trained = model.get_nb_trainable_parameters()[0]
    report = (
        f"LoRA of rank {options.rank} ({trained:,} parameters), early-exit loss (e_scale 1, rotational R = 8), "
        f"{options.steps} steps of {context} tokens, peak learning rate {options.learning_rate:g}; held-out loss in "
        f"nats per token, the twin's columns being before.\n\n{exit_table(after, before)}\n"
    )
    (options.output / "exits.md").write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
