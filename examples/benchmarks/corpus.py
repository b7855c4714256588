"""The standard library's sources as texts, and which of them the demo model was not trained on.

``python examples/benchmarks/corpus.py > prompts.jsonl`` writes the beginnings of the latter as prompts, one a line.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SKIPPED_FOLDERS = {"dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
# Tables written by a program, and the build's own settings (which hold paths of the machine that built Python).
_SKIPPED_FILES = ("_sysconfigdata*.py", "config-*/*.py", "html/entities.py", "keyword.py", "stringprep.py", "token.py")
HELD_OUT_ONE_IN = 25


@dataclass(frozen=True)
class Corpus:
    """The standard library's sources, split by file.

    Attributes:
        training: text of each training file.
        held_out: text of each held-out file.
        digest: SHA-256 over all paths and texts: two machines with the same digest train on the same bytes.
    """

    training: list[str]
    held_out: list[str]
    digest: str


def corpus_files(library: Path) -> Iterator[Path]:
    """Yields the standard library's hand-written sources as paths relative to ``library``, in a fixed order."""
    for path in sorted((path.relative_to(library) for path in library.rglob("*.py")), key=Path.as_posix):
        if _SKIPPED_FOLDERS.isdisjoint(path.parts) and not any(path.match(pattern) for pattern in _SKIPPED_FILES):
            yield path


def is_held_out(path: Path) -> bool:
    """Whether a file is kept from training, decided by its name alone so that every machine agrees."""
    return zlib.crc32(path.as_posix().encode()) % HELD_OUT_ONE_IN == 0


def read_corpus(library: Path) -> Corpus:
    """Reads and splits the sources below ``library``; files that are empty or not UTF-8 are left out."""
    training: list[str] = []
    held_out: list[str] = []
    digest = hashlib.sha256()
    for path in corpus_files(library):
        with suppress(UnicodeDecodeError):
            if (text := (library / path).read_text(encoding="utf-8")).strip():
                (held_out if is_held_out(path) else training).append(text)
                digest.update(f"{path.as_posix()}\0{text}\0".encode())
    return Corpus(training, held_out, digest.hexdigest())


def standard_library() -> Corpus:
    """Reads the sources of this interpreter's standard library."""
    return read_corpus(Path(sysconfig.get_paths()["stdlib"]))


def held_out_texts() -> list[str]:
    """Files that the demo model was not trained on, each from the beginning and from two functions further on."""
    texts, held_out = [], standard_library().held_out
    for part in range(3):
        for text in held_out:
            start = text.find("\ndef ", part * len(text) // 3)
            texts.append(text[start + 1 :] if part and start >= 0 else text)
    return texts


if __name__ == "__main__":
    for beginning in (text[:600] for text in held_out_texts()):
        print(json.dumps({"prompt": beginning.rstrip(), "text": beginning}))
