"""transformers' own tests of generation, with a ``SelfSpec`` in the place of plain decoding.

They are not in its package, so they need a checkout of the same version, or one as near as can be had, and the packages
``parameterized``, ``datasets`` and ``timeout-decorator``:
``TRANSFORMERS_TESTS=transformers python -m pytest -m slow tests/independent``, with ``TRANSFORMERS_TYPES`` for types of
models other than these, separated by spaces. Tests that fail without a ``SelfSpec``, too, do not count.
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
# Tests that are not run, and why.
LEFT_OUT = {
    "compil": "each takes up to a minute",
    "continuous_batching": "it has a loop of its own",
}


def run(checkout: Path, model_type: str, how: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """The counts of the plugin, and the tests whose greedy ids are not plain generate's."""
    paths = (Path(hf_selfspec.__file__).parents[1], Path(__file__).parent, checkout, os.environ.get("PYTHONPATH", ""))
    places = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "SELFSPEC_COUNTS": str(folder / "counts.json")}
    chosen = f"({CHOSEN}) and not ({' or '.join(LEFT_OUT)})"
    command = (
        "-m", "pytest", "-q", "-p", "under_selfspec", "-p", "no:cacheprovider", f"tests/models/{model_type}", "-k",
        chosen,
    )  # fmt: skip
    environment = os.environ | places | {"SELFSPEC_AS": how}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((folder / "counts.json").read_text())
    return Counter(found["counts"]), found["different"]


def failed(counts: Counter[str]) -> set[str]:
    return {name for name in counts if name.startswith("failed: ")}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_under_an_attached_selfspec(model_type: str, tmp_path: Path) -> None:
    checkout = os.environ.get("TRANSFORMERS_TESTS")
    if checkout is None:
        pytest.skip("TRANSFORMERS_TESTS does not name a checkout of transformers, whose package has no such tests")
    counts, different = run(Path(checkout), model_type, "attached", tmp_path)
    assert not different
    if failed(counts):
        assert failed(counts) <= failed(run(Path(checkout), model_type, "nothing", tmp_path)[0])
    assert counts["served"] > 0
