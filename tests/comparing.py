"""Prompts and a model for tests of comparisons."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import tiny_llama
from transformers import AutoTokenizer

DEMO = Path(__file__).parent.parent / "examples" / "demo_model"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"


def write_suites(folder: Path) -> dict[str, Path]:
    """Three items of each suite, by the suite's name."""
    bench = [
        {"category": category, "turns": [f"Summarize: The {category} city of Paris, {number}.\nWhere is it?"]}
        for number in range(3)
        for category in ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
    ]
    tasks = [
        {
            "entry_point": f"add_{number}",
            "prompt": f"def add_{number}(x, y):\n" + '    """Adds two numbers, also ones of other types."""\n' * 4,
            "canonical_solution": "    return x + y\n",
        }
        for number in range(3)
    ]
    questions = [{"question": f"What is {number} and {number}?", "answer": f"{2 * number}"} for number in range(3)]
    found = {name: folder / f"{name}.jsonl" for name in ("spec-bench", "humaneval", "gsm8k", "text")}
    own = [{"prompt": "def read(path):"}, {"messages": [{"role": "user", "content": "import os"}]}]
    for path, items in zip(found.values(), (bench, tasks, questions, own), strict=True):
        path.write_text("\n".join(map(json.dumps, items)))
    found["editing"] = folder / "editing.txt"
    town = "the town of Paris @-@ on @-@ Sea , <unk> had walls ."
    found["editing"].write_text("\n".join(f"In {number} {town}{' It was old .' * 20}" for number in range(3)))
    return found


def write_model(folder: Path) -> Path:
    """A tiny model with a chat template."""
    tiny_llama(vocabulary=4096).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder
