"""Give a pretrained model early exits with LoRA: its weights do not change, only adapters are trained (with TRL).

    pip install trl
    python examples/lora_layerskip.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data texts.jsonl --output adapters

Each line of the data is what TRL's ``SFTTrainer`` takes: a ``text``, ``messages``, or ``prompt`` and ``completion``.
Without ``--data`` it is Python's standard library, with the split of ``train_demo_model.py``. A run that was stopped
resumes from its last checkpoint. ``PeftModel.from_pretrained(model, output)`` loads the adapters, and
``model.generate(**inputs, assistant=SelfSpec.layerskip())`` drafts with them.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from benchmarks.corpus import read_corpus
from datasets import Dataset, DatasetDict, load_dataset
from peft import LoraConfig
from train_demo_model import exit_table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from hf_selfspec import EarlyExitLoss, Rotational, exit_report
from hf_selfspec.train import loss_scale


def read(data: str | None) -> DatasetDict:
    """Returns the training texts, and the held-out ones as ``test``."""
    if data is not None:
        return load_dataset("json", data_files=data, split="train").train_test_split(0.05, seed=0)
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    parts = {"train": corpus.training, "test": corpus.held_out}
    return DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in parts.items()})


def exit_loss(args: argparse.Namespace) -> EarlyExitLoss:
    """Returns the loss of named exits, which weigh alike in each step, or of all by the paper's curriculum."""
    if args.exits is None:
        return EarlyExitLoss(args.e_scale, Rotational(8), scale=loss_scale)
    return EarlyExitLoss(args.e_scale, layers=args.exits)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--data", help="a .jsonl file")
    parser.add_argument("--output", type=Path, required=True, help="folder for the adapters and the table")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=1, help="blocks of a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a training block")
    parser.add_argument("--exits", type=int, nargs="+", help="exit layers that are to draft (default: all, in turn)")
    parser.add_argument("--e-scale", type=float, default=1.0, help="weight of earlier exits, see EarlyExitLoss")
    parser.add_argument("--held-out", type=int, default=500, help="evaluate on at most this many blocks")
    args = parser.parse_args(arguments)

    checkpoints = args.output.with_name(args.output.name + "-checkpoints")
    data = read(args.data)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        args=SFTConfig(
            output_dir=str(checkpoints),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(50, args.steps // 10),
            max_length=args.max_length,
            packing=True,
            packing_strategy="wrapped",
            save_steps=200,
            save_total_limit=1,
            report_to="none",
            use_cpu=not torch.accelerator.is_available(),
        ),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
        callbacks=[exit_loss(args)],
    )
    blocks = trainer.eval_dataset["input_ids"][: args.held_out]
    held_out = [trainer.processing_class.decode(ids) for ids in blocks]

    def quality():
        return exit_report(trainer.model, trainer.processing_class, held_out, max_length=args.max_length)

    before = quality()  # fresh adapters change nothing
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None)
    trainer.save_model(str(args.output))
    table = exit_table(quality(), before)
    (args.output / "exits.md").write_text(f"Held-out loss in nats per token; `twin` is before.\n\n{table}\n", "utf-8")
    print(table)


if __name__ == "__main__":
    main()
