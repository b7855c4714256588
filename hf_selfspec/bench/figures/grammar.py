"""Speed of a chat model that writes JSON by a schema, compared with plain ``generate`` with the same processor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...errors import SettingError
from ...loading import NamedModel
from ...selfspec import SelfSpec
from .figure import Figure, print_head, print_row, print_table_head

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


def _run(args: argparse.Namespace) -> None:
    named = NamedModel.find(args.model)
    tokenizer, model = named.tokenizer(), named.model("float32")
    grammar = _grammar(tokenizer, model.config.vocab_size)
    kept = SelfSpec()
    ways: dict[str, Callable[[], SelfSpec | None]] = {"plain": lambda: None, "kept": lambda: kept, "fresh": SelfSpec}
    given = {"max_new_tokens": args.max_new_tokens, "do_sample": args.do_sample, "pad_token_id": tokenizer.pad_token_id}

    def answer(prompt: Any, spec: SelfSpec | None) -> tuple[float, torch.Tensor]:
        begun = process_time()
        ids = model.generate(**prompt, **given, logits_processor=[grammar()], assistant=spec)
        return process_time() - begun, ids[:, prompt["input_ids"].shape[1] :]

    for make in ways.values():
        answer(_prompt(tokenizer, "a clown"), make())
    figures = {name: _Figures() for name in ways}
    for turn, person in enumerate(PEOPLE[: args.prompts]):
        prompt, found = _prompt(tokenizer, person), {}
        for place in range(len(ways)):
            name = list(ways)[(place + turn) % len(ways)]
            spec = ways[name]()
            seconds, found[name] = answer(prompt, spec)
            figures[name].add(seconds, found[name].shape[1], spec)
        if not args.do_sample and not all(torch.equal(ids, found["plain"]) for ids in found.values()):
            raise SettingError(f"ids differ for {person}, which is a bug in this package. Please report it.")
        print(tokenizer.decode(found["plain"][0], skip_special_tokens=True))
    print_head(args, f"{len(PEOPLE[: args.prompts])} prompts")
    print_table_head("way", "CPU ms per token", "speed-up", "tokens per forward")
    plain = figures["plain"].milliseconds
    for name, one in figures.items():
        ratio, per_forward = plain / one.milliseconds, one.tokens / one.forwards
        print_row(name, f"{one.milliseconds:.1f}", f"{ratio:.2f}", f"{per_forward:.2f}")


def _grammar(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Callable[[], Any]:
    """Returns what makes processors of the compiled schema."""
    try:
        import xgrammar
    except ImportError as error:
        raise SettingError("this figure needs xgrammar. Run `pip install xgrammar`.") from error
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: xgrammar.contrib.hf.LogitsProcessor(compiled)


@dataclass
class _Figures:
    """Sums over all calls of one way."""

    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0

    @property
    def milliseconds(self) -> float:
        """CPU time per token, in milliseconds."""
        return 1000 * self.seconds / self.tokens

    def add(self, seconds: float, tokens: int, spec: SelfSpec | None) -> None:
        """Adds a call."""
        self.seconds += seconds
        self.tokens += tokens
        self.forwards += spec.stats.verify_passes + 1 if spec is not None and spec.stats is not None else tokens


def _prompt(tokenizer: PreTrainedTokenizerBase, person: str) -> Any:
    chat = [{"role": "user", "content": f"Describe {person} as JSON."}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or name of a chat model")
    parser.add_argument("--prompts", type=int, default=len(PEOPLE))
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--do-sample", action="store_true")


_DESCRIPTION = (
    "All ways answer each prompt in turn, in rotating order. Times are CPU times, so that other work on "
    "the machine matters little. `kept` is one SelfSpec over the whole stream, `fresh` a new one for each prompt, "
    "which knows nothing of earlier answers. The first call of each way warms up kernels and is not counted. Greedy "
    "ids of all ways have to be equal. Each call gets a new xgrammar processor; compiling the grammar does not count."
)
FIGURE = Figure("JSON by a schema, with xgrammar", _add_options, _run, _DESCRIPTION)
