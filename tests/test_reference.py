"""The API reference, built from the docstrings."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import pytest

import hf_selfspec

pdoc = pytest.importorskip("pdoc", reason="pdoc is in the extras docs and test")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the package, made as ``pdoc -d google -o DIR hf_selfspec`` makes it."""
    import pdoc.render

    folder = tmp_path_factory.mktemp("reference")
    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that are only imported for it
        pdoc.pdoc("hf_selfspec", output_directory=folder)
    return Path(folder, "hf_selfspec.html").read_text()


@pytest.mark.parametrize("name", hf_selfspec.__all__)
def test_every_public_name_has_an_entry(name: str, page: str) -> None:
    entry = re.search(rf'<section id="{name}">(.*?)</section>', page, re.DOTALL)
    assert entry is not None
    value = getattr(hf_selfspec, name)
    if value.__name__ != name:  # another name of a class, which has the entry
        assert value.__name__ in hf_selfspec.__all__
        return
    described = inspect.getdoc(value)
    assert described
    assert not described.startswith(f"{name}("), "what a dataclass makes of its fields is no docstring"
    first = re.sub(r"\W+", " ", re.sub(r":\w+:`~?([\w.]+)`|`", r"\1", described.split("\n")[0])).split()[:3]
    shown = re.sub(r"\W+", " ", re.sub(r"<[^>]+>", " ", entry.group(1)))
    assert " ".join(first) in re.sub(r" +", " ", shown)
