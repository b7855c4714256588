"""How fast a chat model writes JSON by a schema, beside plain ``generate`` with the same logits processor.

    pip install -e ".[test]"
    python examples/measure_grammar.py --model DIR

Each prompt is answered by all ways in turn, in an order that rotates, on one thread. CPU time is taken, so that other
work on the machine matters little. `kept` is one `SelfSpec` over the whole stream, `fresh` a new one for each prompt,
which knows nothing of earlier answers. A first call of each way warms up kernels and is not counted. Greedy ids of all
ways have to be equal. Each call gets a new processor; the grammar is compiled once, which is not counted.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from hf_selfspec import SelfSpec
from hf_selfspec.bench.measure import machine

SCHEMA = {
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


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    kept = SelfSpec()
    ways: dict[str, Callable[[], SelfSpec | None]] = {"plain": lambda: None, "kept": lambda: kept, "fresh": SelfSpec}
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.do_sample,
        "pad_token_id": tokenizer.pad_token_id,
    }

    def answer(prompt: dict[str, torch.Tensor], spec: SelfSpec | None) -> tuple[float, torch.Tensor]:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
        begun = process_time()
        ids = model.generate(**prompt, **options, logits_processor=[processor], assistant=spec)
        return process_time() - begun, ids[:, prompt["input_ids"].shape[1] :]

    for make in ways.values():
        answer(_prompt(tokenizer, "a clown"), make())
    figures = {name: Figures() for name in ways}
    for turn, person in enumerate(PEOPLE[: arguments.prompts]):
        prompt, found = _prompt(tokenizer, person), {}
        for place in range(len(ways)):
            name = list(ways)[(place + turn) % len(ways)]
            spec = ways[name]()
            seconds, found[name] = answer(prompt, spec)
            figures[name].add(seconds, found[name].shape[1], spec)
        if not arguments.do_sample and not all(torch.equal(ids, found["plain"]) for ids in found.values()):
            raise SystemExit(f"ids differ for {person}")
        print(tokenizer.decode(found["plain"][0], skip_special_tokens=True))
    print(f"\n{machine(model.device)}, {arguments.model}, {len(PEOPLE[: arguments.prompts])} prompts")
    print("| way | CPU ms per token | speed-up | tokens per forward |\n|---|---|---|---|")
    plain = figures["plain"].milliseconds
    for name, one in figures.items():
        print(f"| {name} | {one.milliseconds:.1f} | {plain / one.milliseconds:.2f} | {one.tokens / one.forwards:.2f} |")


@dataclass
class Figures:
    """Of all calls of one way."""

    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0

    @property
    def milliseconds(self) -> float:
        return 1000 * self.seconds / self.tokens

    def add(self, seconds: float, tokens: int, spec: SelfSpec | None) -> None:
        self.seconds += seconds
        self.tokens += tokens
        self.forwards += spec.stats.verify_passes + 1 if spec else tokens


def _prompt(tokenizer: PreTrainedTokenizerBase, person: str) -> dict[str, torch.Tensor]:
    chat = [{"role": "user", "content": f"Describe {person} as JSON."}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name of a chat model")
    parser.add_argument("--prompts", type=int, default=len(PEOPLE))
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--do-sample", action="store_true")
    main(parser.parse_args())
