"""Completes real function headers with the shipped demo model, with and without self-speculation: the text is the same.

    python examples/quickstart.py

Drafted tokens that the full model accepted are marked; tokens that it chose itself are not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_selfspec import ConfidenceThreshold, EarlyExit, GenerationStats, SelfSpec

PROMPTS = (
    'def read_text(path, encoding="utf-8"):',
    "class OrderedSet(collections.abc.MutableSet):",
    "def __init__(self, name, default=None, *, required=False):",
    "def main(args=None):",
)
GREEN, PLAIN = "\033[32m", "\033[0m"


def encoded(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, torch.Tensor]:
    return dict(tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))


def timed(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], tokens: int, **kwargs: SelfSpec
) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **kwargs)
    return ids, time.perf_counter() - start


def marked(tokenizer: PreTrainedTokenizerBase, new_ids: list[int], from_draft: list[bool], color: bool) -> str:
    """Returns the text with accepted draft tokens in green, or in ‹ › without colour."""
    before, after = (GREEN, PLAIN) if color else ("‹", "›")
    text, inside = "", False
    for token, drafted in zip(new_ids, from_draft, strict=False):
        if drafted != inside:
            text += before if drafted else after
            inside = drafted
        text += tokenizer.decode([token])
    return text + (after if inside else "")


def report(name: str, stats: list[GenerationStats], plain: list[float], ours: list[float], tokens: int) -> None:
    alpha = sum(s.accepted for s in stats) / max(sum(s.drafted for s in stats), 1)
    mean_length = sum(s.tokens - 1 for s in stats) / max(sum(s.rounds for s in stats), 1)
    speeds = [tokens / statistics.median(seconds) for seconds in (plain, ours)]
    print(
        f"{name:<28} plain {speeds[0]:6.1f} tokens/s   ours {speeds[1]:6.1f} tokens/s   α {alpha:.2f}"
        f"   M {mean_length:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).parent / "demo_model"), help="a causal LM, path or name")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-color", action="store_true", help="mark accepted tokens with ‹ › instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    layers = model.config.num_hidden_layers
    measured = "the fastest of five exits"
    specs = {
        measured: SelfSpec.layerskip(),
        f"exit {layers // 4} of {layers}, sure > 0.5": SelfSpec(
            draft=EarlyExit(layers // 4), stop=ConfidenceThreshold(0.5)
        ),
    }
    for prompt in PROMPTS:  # in which the exits are compared
        timed(model, encoded(tokenizer, prompt), 2 * args.tokens, assistant=specs[measured])
    print(f"the fastest exit: {specs[measured].choice(model)}\n")
    for name, spec in specs.items():
        stats, plain_seconds, our_seconds = [], [], []
        for prompt in PROMPTS:
            inputs = encoded(tokenizer, prompt)
            expected, seconds = timed(model, inputs, args.tokens)
            plain_seconds.append(seconds)
            ids, seconds = timed(model, inputs, args.tokens, assistant=spec)
            our_seconds.append(seconds)
            if not torch.equal(ids, expected):
                raise SystemExit("the tokens differ from plain generate: please report this")
            stats.append(spec.stats)
            if name != measured:
                new = ids[0, inputs["input_ids"].shape[1] :].tolist()
                print(prompt + marked(tokenizer, new, spec.stats.from_draft[0], not args.no_color) + "\n" + "-" * 80)
        report(name, stats, plain_seconds, our_seconds, args.tokens)
    print("tokens equal to plain generate: yes, all of them")


if __name__ == "__main__":
    main()
