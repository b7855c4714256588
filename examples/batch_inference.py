"""Answers to many prompts by several processes, each with its share of them and a store of texts.

    torchrun --nproc-per-node 2 examples/batch_inference.py --model MODEL --data prompts.jsonl --output answers.jsonl \
        --cache-dir cache

Each process keeps the texts of its answers in the cache folder, and drafts from them in later runs. For runs that go on
after they were stopped, and for several machines, see ``ray_batches.py``.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

from hf_selfspec import SelfSpec


def prompts_of(data: Path) -> list[str]:
    """Returns the prompts of a file."""
    prompts = []
    for number, line in enumerate(data.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                prompts.append(json.loads(line)["prompt"])
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f'{data}, line {number}: {error!r}; a line is {{"prompt": "..."}}') from error
    return prompts


def inputs_of(tokenizer, prompt: str) -> BatchEncoding:
    """Returns a prompt as the first message of a chat, for tokenizers with a chat template, or as text to continue."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file with a `prompt` in each line")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file for the answers, in the same order")
    parser.add_argument("--cache-dir", help="folder that keeps what was learned, for all processes and later runs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    prompts = prompts_of(args.data)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # Processes wait for the slowest one at the end.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    process, count = state.process_index, state.num_processes
    share = prompts[len(prompts) * process // count : len(prompts) * (process + 1) // count]
    parts = [args.output.with_name(f"{args.output.name}.part-{part}") for part in range(count)]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(state.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    spec = SelfSpec(cache_dir=args.cache_dir, task=f"process-{process}")
    with parts[process].open("w", encoding="utf-8") as file:
        for prompt in tqdm(share, disable=not state.is_local_main_process):
            inputs = inputs_of(tokenizer, prompt).to(state.device)
            ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, assistant=spec)
            answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    state.wait_for_everyone()
    if state.is_main_process:
        args.output.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")
        for part in parts:
            part.unlink()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
