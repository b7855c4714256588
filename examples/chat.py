"""A chat that keeps its keys and values: each turn processes only what is new, with drafts from earlier turns.

    python examples/chat.py --model HuggingFaceTB/SmolLM2-135M-Instruct

An empty line or the end of the input ends the chat.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from inspect import signature

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

from hf_selfspec import SelfSpec


class Chat:
    """One conversation; ``options`` are those of ``generate``."""

    def __init__(self, model, tokenizer, **options):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.messages: list[dict[str, str]] = []
        self.cache, self.ids = DynamicCache(config=model.config), torch.zeros(1, 0, dtype=torch.long)

    def answer(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)
        prompt = inputs["input_ids"]
        self.forget_from(self.common_length(prompt))
        # Transformers renamed `past_key_values` in 5.24.
        name = "cache" if "cache" in signature(type(self.model).forward).parameters else "past_key_values"
        self.ids = self.model.generate(**inputs, **{name: self.cache}, **self.options)
        text = self.tokenizer.decode(self.ids[0, prompt.shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def common_length(self, prompt: torch.Tensor) -> int:
        """Number of leading tokens equal to those of the last turn: a template may tokenize its answer differently."""
        both = min(prompt.shape[1], self.ids.shape[1])
        same = prompt[0, :both] == self.ids[0, :both].to(prompt.device)
        return int(same.cumprod(0).sum())

    def forget_from(self, length: int) -> None:
        if (superfluous := self.cache.get_seq_length() - length) > 0:
            self.cache.crop(-superfluous)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a chat model, path or name")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    spec, streamer = SelfSpec(), TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    chat = Chat(model, tokenizer, max_new_tokens=args.max_new_tokens, assistant=spec, streamer=streamer)
    while question := input("> "):
        chat.answer(question)
        print(f"  [{spec.stats.tokens} tokens, {spec.stats.acceptance_rate:.0%} of drafted ones accepted]")


if __name__ == "__main__":
    with suppress(EOFError):
        main()
