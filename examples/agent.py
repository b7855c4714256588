"""An agent of smolagents whose model drafts: its answers stream from a thread, in which ``generate`` runs.

pip install "smolagents[transformers]"
python examples/agent.py --model HuggingFaceTB/SmolLM2-1.7B-Instruct "How many primes are below 50?"
"""

from __future__ import annotations

import argparse

from smolagents import CodeAgent, TransformersModel

import hf_selfspec
from hf_selfspec import SelfSpec


def main(arguments: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each step")
    parser.add_argument("--plain", action="store_true", help="without self-speculative decoding")
    args = parser.parse_args(arguments)
    model = TransformersModel(args.model, max_new_tokens=args.max_new_tokens, torch_dtype="auto", do_sample=False)
    if not args.plain:
        hf_selfspec.attach(model.model, spec := SelfSpec())
    agent = CodeAgent(tools=[], model=model, stream_outputs=True, max_steps=args.steps)
    print(agent.run(args.task))
    if not args.plain:
        print(spec.stats)
    return [str(getattr(step, "model_output", "")) for step in agent.memory.steps]


if __name__ == "__main__":
    main()
