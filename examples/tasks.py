"""Tasks with right answers for ``finetune_task.py``: a ``def`` header's signature as JSON, and word problems.

The paper (LayerSkip, Tables 6 and 11) teaches a Llama to turn requests into JSON (TOPv2). ``signature`` is similar and
needs no download: the input is a ``def`` header of Python's standard library and the answer is its signature as JSON::

    def get(self,key,default=None,*args:int)->str:
    {"name":"get","args":[{"name":"self","kind":"arg"},{"name":"key","kind":"arg"},{"name":"default","kind":"arg",
    "default":"None"},{"name":"args","kind":"vararg","annotation":"int"}],"returns":"str"}

The JSON is one line, and so is the header, however it was written; the spaces between its parts are removed, because a
tokenizer joins a space with the word after it, and a name should have the same tokens in the header and the answer.
``kind`` is the name of the field of ``ast.arguments`` that holds the argument, without its plural: ``posonly``,
``arg``, ``vararg``, ``kwonly`` or ``kwarg``. What a header does not have (``annotation``, ``default``, ``returns``,
``async``) is left out of its JSON.

``gsm8k`` is free text: a word problem and its worked answer in the data set's own format, whose last line is
``#### 72``. An answer is right if it has the same number there.
"""

import ast
import hashlib
import json
import re
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import HELD_OUT_ONE_IN, Corpus, is_held_out

INSTALLED_PACKAGES = {"dist-packages", "site-packages"}
# Two of three headers take nothing but ``self``; so many would turn the task into copying names.
BARE_ONE_IN = 4
STARS = {"vararg": "*", "kwarg": "**"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Example:
    """One prompt and its answer.

    Attributes:
        prompt: What the model is given.
        answer: What it should generate.
        expected: The content of a right answer.
    """

    prompt: str
    answer: str
    expected: Any


@dataclass(frozen=True)
class Task:
    """What a model is fine-tuned for.

    Attributes:
        title: Title of the table of results.
        data: Default place of the examples, ``None`` if there is no default.
        read: Reads a place; returns each example as one string, split into training and held-out ones.
        example: Makes an example from such a string.
        is_right: Whether a generated text has the expected content.
    """

    title: str
    data: Path | None
    read: Callable[[Path], Corpus]
    example: Callable[[str], Example]
    is_right: Callable[[str, Any], bool]


# Signatures ----------------------------------------------------------------------------------------------------------


def signature_of(function: Function) -> dict[str, Any]:
    """Return the content of a function's header, in the form of the answer's JSON."""
    arguments = function.args
    by_position = [("posonly", arg) for arg in arguments.posonlyargs] + [("arg", arg) for arg in arguments.args]
    required = len(by_position) - len(arguments.defaults)
    found = [
        _argument(kind, arg, default)
        for (kind, arg), default in zip(by_position, [None] * required + arguments.defaults, strict=True)
    ]
    if arguments.vararg is not None:
        found.append(_argument("vararg", arguments.vararg))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_argument("kwonly", arg, default))
    if arguments.kwarg is not None:
        found.append(_argument("kwarg", arguments.kwarg))
    signature: dict[str, Any] = {"name": function.name}
    if isinstance(function, ast.AsyncFunctionDef):
        signature["async"] = True
    signature["args"] = found
    if function.returns is not None:
        signature["returns"] = ast.unparse(function.returns)
    return signature


def _argument(kind: str, arg: ast.arg, default: ast.expr | None = None) -> dict[str, str]:
    found = {"name": arg.arg, "kind": kind}
    if arg.annotation is not None:
        found["annotation"] = ast.unparse(arg.annotation)
    if default is not None:
        found["default"] = ast.unparse(default)
    return found


def header_of(signature: dict[str, Any]) -> str:
    """Return a signature as a ``def`` header on one line, without spaces between its parts."""
    kinds = [argument["kind"] for argument in signature["args"]]
    parts = []
    for place, (argument, kind) in enumerate(zip(signature["args"], kinds, strict=True)):
        if kind == "kwonly" and not {"vararg", "kwonly"} & set(kinds[:place]):
            parts.append("*")
        annotation = f":{argument['annotation']}" if "annotation" in argument else ""
        default = f"={argument['default']}" if "default" in argument else ""
        parts.append(STARS.get(kind, "") + argument["name"] + annotation + default)
        if kind == "posonly" and "posonly" not in kinds[place + 1 :]:
            parts.append("/")
    keyword = "async def" if "async" in signature else "def"
    returns = f"->{signature['returns']}" if "returns" in signature else ""
    return f"{keyword} {signature['name']}({','.join(parts)}){returns}:"


def parse_header(header: str) -> dict[str, Any]:
    """Return the signature of a header that :func:`header_of` has made."""
    function = ast.parse(f"{header} pass").body[0]
    assert isinstance(function, Function)
    return signature_of(function)


def headers_in(source: bytes) -> Iterator[str]:
    """Yield the headers of all functions in a file, including methods and nested ones; none if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in old sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        # Type parameters (Python 3.12) have no place in the JSON.
        if isinstance(node, Function) and not getattr(node, "type_params", None):
            yield header_of(signature_of(node))


def answer_text(signature: dict[str, Any]) -> str:
    """Return a signature as compact JSON."""
    return json.dumps(signature, separators=(",", ":"), ensure_ascii=False)


def is_right(text: str, signature: dict[str, Any]) -> bool:
    """Whether ``text`` is JSON with the same content as ``signature``, however it is written."""
    try:
        return bool(json.loads(text) == signature)
    except ValueError:
        return False


def is_kept(header: str) -> bool:
    """Whether a header is used: all with arguments are, and one in ``BARE_ONE_IN`` of the others."""
    takes_nothing = header.endswith(("():", "(self):"))
    return not takes_nothing or zlib.crc32(header.encode()) % BARE_ONE_IN == 0


def read_headers(library: Path) -> Corpus:
    """Read the headers of all sources below ``library``, tests included, each once.

    The split is by file and is that of the demo model's training, so that neither stage has seen a held-out file. A
    header in a held-out file is not trained on, even if it is also in other files.
    """
    training: dict[str, None] = {}
    held_out: dict[str, None] = {}
    files = sorted((file.relative_to(library) for file in library.rglob("*.py")), key=lambda file: file.as_posix())
    for file in files:
        if INSTALLED_PACKAGES.isdisjoint(file.parts):
            kept = filter(is_kept, headers_in((library / file).read_bytes()))
            (held_out if is_held_out(file) else training).update(dict.fromkeys(kept))
    halves = [header for header in training if header not in held_out], list(held_out)
    return Corpus(*halves, hashlib.sha256(json.dumps(halves).encode()).hexdigest())


def signature_example(header: str) -> Example:
    """Return a header and its answer."""
    signature = parse_header(header)
    return Example(f"{header}\n", answer_text(signature), signature)


# Word problems -------------------------------------------------------------------------------------------------------


def read_problems(file: Path) -> Corpus:
    """Read GSM8K's own file, split by question."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    halves: tuple[list[str], list[str]] = ([], [])
    for line in dict.fromkeys(lines):
        question = json.loads(line)["question"]
        halves[zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0].append(line)
    return Corpus(*halves, hashlib.sha256(json.dumps(halves).encode()).hexdigest())


def problem_example(line: str) -> Example:
    """Return a problem and its worked answer."""
    problem = json.loads(line)
    return Example(f"Question: {problem['question']}\nAnswer: ", problem["answer"], result_of(problem["answer"]))


def result_of(answer: str) -> str | None:
    """Return the number after ``####``, ``None`` if there is none."""
    found = re.search(r"####\s*(-?[\d,.]*\d)", answer)
    return None if found is None else found[1].replace(",", "")


def has_result(text: str, expected: str) -> bool:
    """Whether an answer ends with the expected number."""
    return result_of(text) == expected


TASKS = {
    "signature": Task(
        "Signature of a `def` header as JSON",
        Path(sysconfig.get_paths()["stdlib"]),
        read_headers,
        signature_example,
        is_right,
    ),
    "gsm8k": Task("Word problems of GSM8K", None, read_problems, problem_example, has_result),
}
