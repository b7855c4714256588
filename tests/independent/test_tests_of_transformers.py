"""transformers' own tests of generation, with a ``SelfSpec`` in the place of plain and of assisted decoding.

They are not in its package, so they need a checkout of the same version:
``TRANSFORMERS_TESTS=transformers python -m pytest -m slow tests/independent``, with ``TRANSFORMERS_TYPES`` for types of
models other than these, separated by spaces.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hf_selfspec

TYPES = os.environ.get(
    "TRANSFORMERS_TYPES", "llama mistral gemma2 gemma3 qwen3_moe deepseek_v3 gpt2 opt mamba mamba2 falcon_h1 jamba "
    "bamba qwen3_next qwen3_5 lfm2"
).split()  # fmt: skip
# What of a test's name is run.
CHOSEN = "generate or assisted or prompt_lookup or left_padding or stop_string or past_key_values"
# Tests that ask for what is not returned, and why.
REFUSED = {
    "static_cache": "they look for the class of a static cache, and calls return a dynamic one",
    "compile_model_forward": "they count the compilations of plain generate",
    "compilation": "they count the compilations of plain generate",
    "continuous_batching": "it has a loop of its own",
    "past_key_values_format": "they look at the layers of a cache while it is filled",
}


def run(checkout: Path, model_type: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """The counts of the plugin, and the tests whose greedy ids are not plain generate's."""
    paths = (Path(hf_selfspec.__file__).parents[1], Path(__file__).parent, checkout)
    places = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "SELFSPEC_COUNTS": str(folder / "counts.json")}
    chosen = f"({CHOSEN}) and not ({' or '.join(REFUSED)})"
    command = (
        "-m", "pytest", "-q", "-p", "under_selfspec", "-p", "no:cacheprovider", f"tests/models/{model_type}", "-k",
        chosen,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((folder / "counts.json").read_text())
    return Counter(found["counts"]), found["different"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_under_an_attached_selfspec(model_type: str, tmp_path: Path) -> None:
    checkout = os.environ.get("TRANSFORMERS_TESTS")
    if checkout is None:
        pytest.skip("TRANSFORMERS_TESTS does not name a checkout of transformers, whose package has no such tests")
    counts, different = run(Path(checkout), model_type, tmp_path)
    assert not different
    assert not {name for name in counts if name.startswith("failed: ")}
    assert counts["served"] > 0
    assert counts["assisted"] > 0


OWN = """
import unittest
import torch
from helpers.architectures import build
from helpers.models import ragged_batch

class ModelTest(unittest.TestCase):
    def test_generate_batches(self):
        model, inputs = build("NAME"), ragged_batch((4, 9, 6))
        inputs = {name: values.flip(1) for name, values in inputs.items()}  # padded on the right
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        self.assertEqual(ids.shape[1], 17)

    def test_prompt_lookup(self):
        model, inputs = build("NAME"), ragged_batch((9,))
        if model._is_stateful:
            self.skipTest(reason="Stateful models don't support assisted generation")
        options = {"max_new_tokens": 8, "do_sample": False}
        ids = model.generate(**inputs, **options, prompt_lookup_num_tokens=2)
        self.assertTrue(torch.equal(ids, model.generate(**inputs, **options)))

    def test_generate_beams(self):
        build("NAME").generate(**ragged_batch((9,)), max_new_tokens=4, num_beams=2)

    def test_generate_static_cache(self):
        self.fail("not run")

    def test_generate_fails(self):
        self.fail("on purpose")
"""


@pytest.mark.slow
def test_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a checkout with a few tests like those of transformers."""
    name, tests = "mamba2", Path(__file__).parents[1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder := tmp_path / "tests" / "models" / name).mkdir(parents=True)
    (folder / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(tests)!r})\n")
    (folder / "test_modeling.py").write_text(OWN.replace("NAME", name))
    counts, different = run(tmp_path, name, tmp_path)
    assert different == []
    assert counts == {
        "served": 2, "assisted": 1, "compared": 3, "left to plain": 1, "not skipped": 1,
        "failed: test_generate_fails": 1,
    }  # fmt: skip
