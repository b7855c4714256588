"""The API reference, built from the docstrings."""

import inspect
import re
import warnings
from pathlib import Path

import pytest

import hf_selfspec

NAMES = [name for name in hf_selfspec.__all__ if getattr(hf_selfspec, name).__name__ == name]


def test_every_public_name_is_described() -> None:
    for name in hf_selfspec.__all__:
        assert getattr(hf_selfspec, name).__name__ in NAMES, "another name of a class, which has the entry"
        described = inspect.getdoc(getattr(hf_selfspec, name))
        assert described, name
        assert not described.startswith(f"{name}("), "what a dataclass makes of its fields is no docstring"


@pytest.mark.slow
def test_the_reference_has_an_entry_of_every_public_name(tmp_path: Path) -> None:
    """Made as ``pdoc -d google -o DIR hf_selfspec`` makes it."""
    pytest.importorskip("pdoc", reason="pdoc is in the extras docs and test")
    import pdoc.render

    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that are only imported for it
        pdoc.pdoc("hf_selfspec", output_directory=tmp_path)
    page = (tmp_path / "hf_selfspec.html").read_text()
    for name in NAMES:
        entry = re.search(rf'<section id="{name}">(.*?)</section>', page, re.DOTALL)
        assert entry is not None, name
        first = str(inspect.getdoc(getattr(hf_selfspec, name))).split("\n")[0]
        words = re.sub(r"\W+", " ", re.sub(r":\w+:`~?([\w.]+)`|`", r"\1", first)).split()[:3]
        shown = re.sub(r"\W+", " ", re.sub(r"<[^>]+>", " ", entry.group(1)))
        assert " ".join(words) in re.sub(r" +", " ", shown), name
