"""JSON by a schema with xgrammar: a chat model with drafts, compared with plain ``generate`` with the same processor.

All ways answer each prompt in turn, in rotating order. ``kept`` is one SelfSpec over the whole stream, ``fresh`` a new
one for each prompt, which knows nothing of earlier answers. A first prompt warms up and is not counted. Greedy ids of
all ways have to be equal. Each call gets a new xgrammar processor; compiling the grammar does not count.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
import xgrammar
from timing import Table, Way, compare, parsed, parser_with, print_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_selfspec import GenerationStats, SelfSpec
from hf_selfspec.model.encoding import encoded

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
    parser = parser_with(__doc__, prompts=len(PEOPLE), max_new_tokens=160, threads=1)
    parser.add_argument("--model", required=True, help="folder or name of a chat model")
    args = parsed(parser)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    limits = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    def answer(ids: torch.Tensor, spec: SelfSpec | None) -> tuple[torch.Tensor, GenerationStats | None]:
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.pad_token_id, **limits}
        processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
        output = model.generate(ids, **options, logits_processor=[processor], assistant=spec)
        return output, spec and spec.stats

    ways: dict[str, Way] = {
        "plain": partial(answer, spec=None),
        "kept": partial(answer, spec=SelfSpec()),
        "fresh": lambda ids: answer(ids, SelfSpec()),
    }
    people = ["a clown", *PEOPLE[: args.prompts]]
    chats = [[{"role": "user", "content": f"Describe {person} as JSON."}] for person in people]
    first, *prompts = (encoded(tokenizer, chat, model.device)["input_ids"] for chat in chats)
    speeds = compare(model, ways, prompts, {}, warm_up=[first])
    for number, ids in enumerate(speeds["plain"].ids):
        if not all(speed.same[number] for speed in speeds.values()):
            sys.exit(f"ids differ for {people[1 + number]}, which is a bug. Please report it.")
        print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print_head("cpu", f"{len(prompts)} prompts")
    table = Table("way", "CPU ms per token", "speed-up", "tokens per forward")
    for name, speed in speeds.items():
        forwards = sum(run.verify_passes + 1 for run in speed.runs) or speed.tokens
        cells = f"{speed.ms:.1f}", f"{speeds['plain'].ms / speed.ms:.2f}", f"{speed.tokens / forwards:.2f}"
        table.row(name, *cells)


if __name__ == "__main__":
    main()
