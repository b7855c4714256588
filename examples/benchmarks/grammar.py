"""JSON by a schema with xgrammar: a chat model with drafts, compared with plain ``generate`` with the same processor.

All ways answer each prompt in turn, in rotating order. Times are CPU times, so that other work on the machine matters
little. ``kept`` is one SelfSpec over the whole stream, ``fresh`` a new one for each prompt, which knows nothing of
earlier answers. The first call of each way warms up kernels and is not counted. Greedy ids of all ways have to be
equal. Each call gets a new xgrammar processor; compiling the grammar does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import xgrammar
from timing import print_head, print_row, print_table_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_selfspec import SelfSpec

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "maxLength": 30},
        "city": {"type": "string", "maxLength": 24},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "is_employed": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])
PEOPLE = (
    "Marie Curie", "a baker in Lyon", "a nurse from Oslo", "a fisherman in Lisbon", "Johann Sebastian Bach",
    "a pilot from Nairobi", "a teacher in Osaka", "Ada Lovelace", "a carpenter in Krakow", "a violinist from Seoul",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or name of a chat model")
    parser.add_argument("--prompts", type=int, default=len(PEOPLE))
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--do-sample", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    given = {"max_new_tokens": args.max_new_tokens, "do_sample": args.do_sample, "pad_token_id": tokenizer.pad_token_id}
    kept = SelfSpec()
    ways: dict[str, Callable[[], SelfSpec | None]] = {"plain": lambda: None, "kept": lambda: kept, "fresh": SelfSpec}

    def answer(person: str, spec: SelfSpec | None) -> tuple[float, torch.Tensor]:
        chat = [{"role": "user", "content": f"Describe {person} as JSON."}]
        inputs = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(chat, **inputs)
        processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
        begun = time.process_time()
        ids = model.generate(**prompt, **given, logits_processor=[processor], assistant=spec)
        return time.process_time() - begun, ids[:, prompt["input_ids"].shape[1] :]

    for make in ways.values():
        answer("a clown", make())
    seconds, tokens, forwards = defaultdict(float), defaultdict(int), defaultdict(int)
    for turn, person in enumerate(PEOPLE[: args.prompts]):
        found = {}
        for place in range(len(ways)):
            name = list(ways)[(place + turn) % len(ways)]
            spec = ways[name]()
            passed, found[name] = answer(person, spec)
            seconds[name] += passed
            tokens[name] += found[name].shape[1]
            forwards[name] += found[name].shape[1] if spec is None else spec.stats.verify_passes + 1
        if not args.do_sample and not all(torch.equal(ids, found["plain"]) for ids in found.values()):
            sys.exit(f"ids differ for {person}, which is a bug. Please report it.")
        print(tokenizer.decode(found["plain"][0], skip_special_tokens=True))
    print_head("cpu", f"{len(PEOPLE[: args.prompts])} prompts")
    print_table_head("way", "CPU ms per token", "speed-up", "tokens per forward")
    plain = seconds["plain"] / tokens["plain"]
    for name in ways:
        per_token = seconds[name] / tokens[name]
        print_row(name, f"{1e3 * per_token:.1f}", f"{plain / per_token:.2f}", f"{tokens[name] / forwards[name]:.2f}")


if __name__ == "__main__":
    main()
