"""Answers to many prompts by several processes, each with its share of them and all with one store of texts.

    torchrun --nproc-per-node 2 examples/batch_inference.py --model MODEL --data prompts.jsonl --output answers.jsonl \
        --cache-dir cache

The answers of all processes are put together in the cache folder, and later runs draft from them. A run that was
stopped continues when the same command is given again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def answered(part: Path, run: dict[str, str | int]) -> int:
    """How many prompts a stopped run has answered in a part, whose first line says which run it is.

    A line that was cut short is removed. A part that does not exist is begun.
    """
    whole = part.read_text(encoding="utf-8").rpartition("\n")[0] if part.exists() else ""
    header, *answers = whole.split("\n")
    if header and json.loads(header) != run:
        raise SystemExit(f"{part} was written by another run: {header}. Repeat that run, or remove this file.")
    beside = part.with_name(f"{part.name}.new")
    beside.write_text("\n".join([json.dumps(run), *answers, ""]), encoding="utf-8")
    beside.replace(part)
    return len(answers)


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
    spec = SelfSpec(cache_dir=args.cache_dir)

    texts = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    run = {"model": args.model, "max_new_tokens": args.max_new_tokens, "processes": count, "prompts": texts}
    done = answered(parts[process], run)
    with parts[process].open("a", encoding="utf-8") as file:
        for prompt in tqdm(share[done:], initial=done, total=len(share), disable=not state.is_local_main_process):
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(state.device)
            ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, assistant=spec)
            answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            file.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        answers = (part.read_text(encoding="utf-8").partition("\n")[2] for part in parts)
        args.output.write_text("".join(answers), encoding="utf-8")
        for part in parts:
            part.unlink()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
