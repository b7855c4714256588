"""Every loader and every damage: one error before anything is generated, which names the file; a cache begins anew."""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.models import VOCABULARY, tiny_llama
from helpers.searches import generated as generate
from helpers.searches import prompt
from hf_selfspec import (
    Adapter,
    Cascade,
    ExitHeads,
    LinearProbe,
    Lookup,
    MtpHead,
    OnTheFlySearch,
    ReducedHead,
    SelfSpec,
    SkipLayers,
    load_head,
)
from hf_selfspec.errors import SettingError
from hf_selfspec.learned import knowledge

pytestmark = pytest.mark.usefixtures("no_grad", "no_warnings_yet")

MODEL = tiny_llama(4, factor=0.6)
SOURCES = Cascade([Lookup(), SkipLayers(search=OnTheFlySearch(8, max_steps=3, budget=1.0))])


def kept(folder: Path) -> None:
    spec = SelfSpec(SOURCES)
    generate(MODEL, prompt(), 24, assistant=spec)
    spec.save_pretrained(folder)


def use_kept(folder: Path) -> torch.Tensor:
    forwards: list[int] = []
    handle = MODEL.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        ids: torch.Tensor = generate(MODEL, prompt(), 12, assistant=SelfSpec.from_pretrained(folder))
        return ids
    except SettingError:
        assert not forwards
        raise
    finally:
        handle.remove()


# What saves something in a folder, and what reads it.
SAVED: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "SelfSpec": (kept, use_kept),
    "adapter": (Adapter(2, 64, 4).save_pretrained, Adapter.load),
    "exit heads": (ExitHeads([1, 3], 64, VOCABULARY).save_pretrained, ExitHeads.load),
    "probe": (LinearProbe(2, 64).save_pretrained, LinearProbe.load),
    "reduced head": (ReducedHead.of(range(9), VOCABULARY).save_pretrained, ReducedHead.load),
    "MTP head": (MtpHead.of(MODEL).save_pretrained, lambda at: load_head(MODEL, at)),
}
OTHER_CONTENT = (b"", b"null", b"{}", b"[1]", b'{"format": NaN}', b"\xff\xfe\x00", b"[" * 100_000, b"\0" * 64)


def damaged(file: Path) -> Iterator[None]:
    """Damages a file in one way after another; only what decides what is loaded."""
    content = file.read_bytes()
    for other in (*OTHER_CONTENT, *(content[: len(content) * part // 9] for part in range(9)), content[:-1]):
        file.write_bytes(other)
        yield
    file.unlink()
    yield
    file.write_bytes(content)
    if file.suffix == ".safetensors":
        for name, value in load_file(file).items():
            wrong = torch.full_like(value, torch.nan) if value.is_floating_point() else value - 1
            save_file(load_file(file) | {name: wrong}, file)
            yield
            file.write_bytes(content)


@pytest.mark.parametrize("saved", SAVED)
def test_a_damaged_file_is_one_error(saved: str, tmp_path: Path) -> None:
    save, read = SAVED[saved]
    save(tmp_path)
    files = [file for file in tmp_path.iterdir() if file.suffix in (".json", ".safetensors")]
    assert files
    for file in files:
        for _ in damaged(file):
            with pytest.raises(SettingError) as error:
                read(tmp_path)
            assert str(tmp_path) in str(error.value), (file.name, error.value)
        read(tmp_path)


def places(content: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be replaced; of lists the first and the last."""
    if keys:
        yield keys
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*keys, key))
    elif isinstance(content, list) and content:
        for index in sorted({0, len(content) - 1}):
            yield from places(content[index], (*keys, index))


@pytest.mark.parametrize("value", [None, -1, [[0.5]]], ids=repr)
def test_findings_that_do_not_fit(value: Any, tmp_path: Path) -> None:
    """Whatever was changed: the output is that of the model, or one error names the file before any forward."""
    kept(tmp_path)
    file, refused = tmp_path / "selfspec.json", 0
    content, plain = file.read_text(), generate(MODEL, prompt(), 12)
    for keys in places(json.loads(content)["findings"], ("findings",)):
        changed = json.loads(content)
        reduce(getitem, keys[:-1], changed)[keys[-1]] = value
        file.write_text(json.dumps(changed))
        try:
            ids, told = use_kept(tmp_path), ""
        except (SettingError, UserWarning) as error:  # a warning where a cascade leaves out what it belongs to
            ids, told = plain, str(error)
        refused += bool(told)
        assert torch.equal(ids, plain), keys
        assert not told or str(file) in told, keys
    assert refused > 5


def test_a_damaged_cache_begins_anew(tmp_path: Path) -> None:
    """With one warning, and the next write takes its place."""
    expected = generate(MODEL, prompt(), 20)

    def told() -> list[str]:
        spec = SelfSpec(SOURCES, cache_dir=tmp_path)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert torch.equal(generate(MODEL, prompt(), 20, assistant=spec), expected)
            knowledge.write_all()
        return [str(one.message) for one in found]

    assert told() == []
    (file,) = tmp_path.rglob("*.json")
    for content in (*OTHER_CONTENT, file.read_bytes()[:-2], file.read_bytes().replace(b'"arrays"', b'"array"')):
        file.write_bytes(content)
        (words,) = told()
        assert words.startswith(f"findings begin anew, since their file cannot be used: {file}")
        assert told() == []
