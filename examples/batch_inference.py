"""Answers to many prompts by several processes, each with its share of them and all with one store of texts.

    torchrun --nproc-per-node 2 examples/batch_inference.py --model MODEL --data prompts.jsonl --output answers.jsonl \
        --cache-dir cache

Answers of all processes are put together in the cache folder, and later runs draft from them.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_selfspec import SelfSpec


def part_of(output: Path, process: int) -> Path:
    """Where a process writes its answers."""
    return output.with_name(f"{output.name}.{process}")


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file with a `prompt` in each line")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file for the answers, in the same order")
    parser.add_argument("--cache-dir", help="folder that keeps what was learned, for all processes and later runs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args(arguments)

    # Processes wait for the slowest one at the end.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    lines = args.data.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(state.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    spec = SelfSpec(cache_dir=args.cache_dir)

    own = part_of(args.output, state.process_index)
    with state.split_between_processes(prompts) as share, own.open("w", encoding="utf-8") as file:
        for prompt in tqdm(share, disable=not state.is_local_main_process):
            inputs = tokenizer(prompt, return_tensors="pt").to(state.device)
            ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, assistant=spec)
            answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            file.flush()  # an error later on loses nothing
    state.wait_for_everyone()
    if state.is_main_process:
        parts = [part_of(args.output, process) for process in range(state.num_processes)]
        args.output.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")
        for part in parts:
            part.unlink()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
