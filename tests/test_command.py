"""``hf-selfspec``: its help comes at once, and it is there as a module, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hf_selfspec

ROOT = Path(hf_selfspec.__file__).parents[1]
HEAVY = ("hf_selfspec", "numpy", "torch", "transformers")


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with this tree's package and command line."""
    paths = (str(ROOT), str(ROOT / "hf_selfspec" / "command"), os.environ.get("PYTHONPATH", ""))
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    script = f"""
import sys
from hf_selfspec_command import main
codes = [main(words) for words in (["--help"], ["fit", "adapter", "--help"])]
print(codes, [name for name in {HEAVY} if name in sys.modules])
"""
    told = python("-c", script)
    assert told.stdout.splitlines()[-1] == "[0, 0] []"


def test_modules_run_as_the_script_does() -> None:
    for module in ("hf_selfspec_command", "hf_selfspec"):
        told = python("-m", module, "fit")
        assert told.returncode == 2
        assert told.stderr.splitlines()[-1] == "hf-selfspec: Missing command. See `hf-selfspec fit --help`."
