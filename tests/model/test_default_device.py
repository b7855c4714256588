"""What a process sets as torch's default device and dtype changes nothing: every tensor names its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_selfspec
from helpers.fitted import arguments, heads_of, rows
from helpers.models import BATCH, ROW, VOCABULARY, character_tokenizer, tiny_llama
from hf_selfspec import FixedLength, OnTheFlySearch, SelfSpec, TopKTree, audit
from hf_selfspec.drafts import EarlyExit
from hf_selfspec.modules.adapter import Adapter
from hf_selfspec.modules.reduced_head import ReducedHead
from hf_selfspec.train.adapter import fit_adapter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of parts that are not good

MODEL = tiny_llama(layers=4, factor=0.5)
# Where a tensor of no device in particular would have no values, and a dtype that is not the model's.
DEFAULTS = ("meta", "bfloat16")
SPECS: dict[str, Callable[[], SelfSpec]] = {
    "default": SelfSpec,
    "tree": lambda: SelfSpec(EarlyExit(2), FixedLength(3), TopKTree(((1.0, 2),))),
    "search": lambda: SelfSpec.swift(search=OnTheFlySearch(8, 50, 5, budget=1.0)),
    "reduced head": lambda: SelfSpec(
        EarlyExit(2, head=ReducedHead.of(range(40), VOCABULARY)), FixedLength(3), TopKTree()
    ),
    "kangaroo": lambda: SelfSpec.kangaroo(Adapter(2, 64, 4)),
    "heads": lambda: SelfSpec.dssd(heads_of(MODEL, 0.5, (1, 3))),
}
GREEDY: list[dict[str, Any]] = [ROW, BATCH | {"eos_token_id": [5, 17, 23], "repetition_penalty": 1.3}]
DRAWN: dict[str, Any] = BATCH | {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
# Torch's functions that make a tensor from numbers, or what draws them, and those whose dtype is the default one.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "Generator",
}  # fmt: skip
FLOATS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


@contextmanager
def default(kind: str) -> Iterator[None]:
    """Sets a default, as a user does at the top of a script."""
    dtype = torch.get_default_dtype()
    if kind == "meta":
        torch.set_default_device(kind)
    else:
        torch.set_default_dtype(getattr(torch, kind))
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def generated(spec: SelfSpec | None, options: dict[str, Any]) -> list[list[int]]:
    torch.manual_seed(0)
    return MODEL.generate(**options, max_new_tokens=10, pad_token_id=0, assistant=spec).tolist()


@pytest.mark.every_run("(default|tree)-meta|default-bfloat16")
@pytest.mark.parametrize("kind", DEFAULTS)
@pytest.mark.parametrize("name", SPECS)
def test_generation(name: str, kind: str) -> None:
    """Greedy tokens are plain's, drawn ones those of a usual call; some drafts depend on timings, and so do these."""
    spec = SPECS[name]()
    for options in GREEDY:
        usual = generated(None, options)
        with default(kind):
            assert generated(spec, options) == usual
    usual = generated(spec, DRAWN)
    with default(kind):
        found = generated(spec, DRAWN)
    assert name != "tree" or found == usual


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEFAULTS)
def test_fitted_parts(kind: str, tmp_path: Path) -> None:
    """Their layers are made by torch's own classes."""
    data, options = rows(), {"exit_layer": 2, "block_size": 32}
    with default(kind):
        part = fit_adapter(
            MODEL, None, data, **options, args=arguments(tmp_path / "fit", max_steps=2), output_dir=tmp_path / "part"
        )
        loaded = Adapter.from_pretrained(tmp_path / "part")
        assert audit(MODEL, character_tokenizer(), ["Layers that matter less"], max_new_tokens=8).passed
    for found in (part, loaded):
        assert {(value.device.type, value.dtype) for value in found.parameters()} == {("cpu", torch.float32)}
    for name, value in part.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_every_tensor_names_its_device() -> None:
    """And its dtype, where that would be the default one."""
    unnamed = []
    for path in Path(hf_selfspec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            named = {keyword.arg for keyword in node.keywords}
            if name == "Generator" and node.args:
                named.add("device")
            if name in FACTORIES and not named >= {"device", *(["dtype"] if name in FLOATS else [])}:
                unnamed.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not unnamed
