"""GRPO with TRL and drafted rollouts, whose distribution is the policy's own at every step.

    pip install trl
    python examples/grpo_rollouts.py --model examples/demo_model --output policy --steps 20

Drafts come from earlier rollouts, which the ``SelfSpec`` keeps over the epochs, and are verified with the current
weights. It is saved next to the policy, so that a training that goes on (``--model policy``, also where that holds
adapters) starts with what it knows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import hf_selfspec
from hf_selfspec import SelfSpec

PROMPTS = ["def read_text(path):\n", "class Stack:\n", "def main(args=None):\n", "def is_empty(self):\n"]


def indented(completions: list[str], **_: object) -> list[float]:
    """Reward: the share of lines that belong to a body."""
    lines = [completion.splitlines() or [""] for completion in completions]
    return [sum(line.startswith("    ") for line in found) / len(found) for found in lines]


def main(arguments: list[str] | None = None, callbacks: list[TrainerCallback] | None = None) -> SelfSpec | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--data", help="a .jsonl file with a `prompt` in each line")
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16")
    parser.add_argument("--plain", action="store_true", help="without self-speculative decoding")
    args = parser.parse_args(arguments)

    has_adapters = Path(args.model, "adapter_config.json").exists()
    if has_adapters:  # of an earlier training, which go on learning
        model = AutoPeftModelForCausalLM.from_pretrained(args.model, is_trainable=True, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    saved = Path(args.model, "selfspec.json").exists()
    spec = None if args.plain else SelfSpec.from_pretrained(args.model) if saved else SelfSpec()
    if spec is not None:
        hf_selfspec.attach(model, spec)
    own = Dataset.from_dict({"prompt": PROMPTS})
    data = own if args.data is None else load_dataset("json", data_files=args.data, split="train")
    on_cpu = not torch.accelerator.is_available()
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=indented,
        train_dataset=data,
        args=GRPOConfig(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=args.max_new_tokens,
            learning_rate=1e-4,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            use_cpu=on_cpu,
            bf16=not on_cpu,
        ),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if args.lora and not has_adapters else None,
        callbacks=callbacks,
    )
    trainer.train()
    trainer.save_model()
    seconds = sum(entry.get("step_time", 0.0) for entry in trainer.state.log_history)
    print(f"{trainer.state.num_input_tokens_seen} tokens, {seconds:.1f} s")
    if spec is not None:
        spec.save_pretrained(args.output, model)
        print(spec.stats)
    return spec


if __name__ == "__main__":
    main()
