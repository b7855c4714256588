"""Turns the files of public suites into prompts for ``hf-selfspec bench --data``: one JSON line each, with its kind.

``python examples/benchmarks/suites.py spec-bench question.jsonl humaneval HumanEval.jsonl > prompts.jsonl``. Files of
several suites become one; the kind ``editing`` has as many edits of code as of text.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

# Categories of Spec-Bench; those of MT-bench are chats.
SPEC_BENCH = {
    "summarization": "summary",
    "math_reasoning": "math",
    "translation": "translation",
    "qa": "qa",
    "rag": "rag",
}
# Lengths, in characters, of paragraphs that are edited.
PARAGRAPH = range(300, 900)
# Traces of a tokenizer in WikiText, and their replacements.
TRACES = ((re.compile(r" @(\W)@ "), r"\1"), (re.compile(r" <unk>"), ""), (re.compile(r" ([,.;:)]|'s)"), r"\1"))


# A kind and a prompt of it.
Row = tuple[str, str]


def spec_bench(line: str) -> Iterator[Row]:
    item = json.loads(line)
    yield SPEC_BENCH.get(item["category"], "chat"), item["turns"][0]


def humaneval(line: str) -> Iterator[Row]:
    item = json.loads(line)
    code, name = item["prompt"], item["entry_point"]
    yield "code", f"Complete the following Python function.\n\n```python\n{code}```"
    edit = f"Repeat the following code, but rename the function {name} to my_{name}."
    yield "editing", f"{edit}\n\n```python\n{code}{item['canonical_solution']}```"


def gsm8k(line: str) -> Iterator[Row]:
    yield "gsm8k", json.loads(line)["question"]


def editing(line: str) -> Iterator[Row]:
    """Of plain text, a paragraph a line, such as WikiText: change the name that occurs most often."""
    if len(line) not in PARAGRAPH or "=" in line:
        return
    for trace, written in TRACES:
        line = trace.sub(written, line)
    for name, _ in Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", line)).most_common(1):
        edit = f"Repeat the following text word for word, but change {name} to Arden."
        yield "editing", f"{edit}\n\n{line.strip()}"


SUITES: dict[str, Callable[[str], Iterator[Row]]] = {
    "spec-bench": spec_bench,
    "humaneval": humaneval,
    "gsm8k": gsm8k,
    "editing": editing,
}


def prompts(files: dict[str, Path]) -> Iterator[dict[str, str]]:
    """The prompts of the files by suite; a kind of several files has equally many of each."""
    texts_of: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for suite, path in files.items():
        for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
            for kind, text in SUITES[suite](line):
                texts_of[kind][suite].append(text)
    for kind, of_suite in texts_of.items():
        count = min(map(len, of_suite.values()))
        for texts in of_suite.values():
            yield from ({"kind": kind, "prompt": text} for text in texts[:: len(texts) // count][:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="SUITE FILE", help=f"suites are {', '.join(SUITES)}")
    args = parser.parse_args()
    names, paths = args.files[::2], args.files[1::2]
    if len(names) != len(paths) or not set(names) <= set(SUITES):
        parser.error(f"give pairs of a suite, one of {', '.join(SUITES)}, and its file")
    if missing := [path for path in paths if not Path(path).is_file()]:
        parser.error(f"there is no file {missing[0]}")
    for row in prompts(dict(zip(names, map(Path, paths), strict=True))):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
