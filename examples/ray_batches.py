"""Answers to many prompts on one machine or on many, by Ray Data.

    pip install "ray[data]"
    python examples/ray_batches.py --model MODEL --data prompts.jsonl --output answers --checkpoints checkpoints

A line of the data has a ``prompt`` and an ``id`` of its own. Each actor holds a model and a ``SelfSpec``, which learns
from all its batches. Ray repeats tasks that fail, on other machines too; the same command goes on after a run that was
stopped, since Ray keeps the ids of answered prompts in the folder of checkpoints; give it a new folder for the answers.
Ray needs two CPUs more than actors, to read and to look at checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.data.checkpoint import CheckpointConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_selfspec import SelfSpec


class Answers:
    """What an actor holds between its batches."""

    def __init__(self, model: str, max_new_tokens: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.max_new_tokens, self.spec = max_new_tokens, SelfSpec()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts, is_chat = batch["prompt"].tolist(), self.tokenizer.chat_template is not None
        if is_chat:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            prompts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(
            prompts, padding=True, add_special_tokens=not is_chat, return_tensors="pt", return_token_type_ids=False
        ).to(self.model.device)
        ids = self.model.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            assistant=self.spec,
        )
        answers = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return batch | {"answer": np.array(answers)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--data", required=True, help=".jsonl file or folder with `id` and `prompt` in each line")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the answers, as .jsonl files")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all machines reach")
    parser.add_argument("--actors", type=int, default=2, help="models at the same time")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each actor")
    parser.add_argument("--rows", type=int, default=8, help="prompts of a batch")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        "id", str(args.checkpoints.absolute()), delete_checkpoint_on_success=False
    )
    ray.data.read_json(args.data).map_batches(
        Answers,
        fn_constructor_args=(args.model, args.max_new_tokens),
        batch_size=args.rows,
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_gpus=args.gpus,
    ).write_json(str(args.output.absolute()), lines=True)


if __name__ == "__main__":
    main()
