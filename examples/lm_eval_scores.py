"""Faster scores with lm-eval: its harness takes no ``assistant``, so the SelfSpec is attached to the model.

pip install "lm-eval[hf]"
python examples/lm_eval_scores.py --model HuggingFaceTB/SmolLM2-135M-Instruct --tasks gsm8k --limit 20
"""

from __future__ import annotations

import argparse

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_selfspec
from hf_selfspec import SelfSpec


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of tasks that generate")
    parser.add_argument("--include", help="folder with tasks of your own")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without self-speculative decoding")
    args = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    if not args.plain:
        hf_selfspec.attach(model, spec := SelfSpec())
    found = simple_evaluate(
        HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(args.model), batch_size=args.batch_size),
        tasks=args.tasks,
        task_manager=TaskManager(include_path=args.include),
        limit=args.limit,
    )
    print(make_table(found))
    if not args.plain:
        print(spec.stats)
    return found["samples"]


if __name__ == "__main__":
    main()
