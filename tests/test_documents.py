"""README, guide and figures: short, and without links, names or calls that do not exist."""

import ast
import inspect
import json
import re
import sys
import types
from pathlib import Path

import pytest

import hf_selfspec
import reference
from helpers import models_table
from helpers.architectures import ARCHITECTURES, STATEFUL
from helpers.multimodal import MODELS
from hf_selfspec import SelfSpec

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md", ".github/CONTRIBUTING.md", "examples/GUIDE.md", "examples/MODELS.md", "examples/RESULTS.md",
    "examples/TRAINING.md", "CHANGELOG.md",
)  # fmt: skip
# The most lines of what is read first.
LINES = {"README.md": 160, "examples/GUIDE.md": 450, "examples/RESULTS.md": 350}
# What each has to print.
NOTEBOOKS = {
    "tour": ("acceptance rate", "prompt-lookup", "against plain generate", " rounds, then "),
    "your_own_draft": ("acceptance rate", "successors and free drafts  ", "Entropy(most=2.0)  "),
}

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks(document: str) -> list[str]:
    return _BLOCK.findall((ROOT / document).read_text())


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = _HEADING.findall(path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """Nothing is left to fill in either, and what is read first is short."""
    path = ROOT / document
    assert not re.search(r"@[A-Z0-9]+@|TODO|XXX", path.read_text())
    assert len(path.read_text().splitlines()) <= LINES.get(document, 500)
    for link in map("".join, _LINK.findall(path.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else path.parent / file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_table_of_models_is_current() -> None:
    """``python tests/helpers/models_table.py`` writes it, with ``tests`` among Python's paths."""
    assert models_table.PATH.read_text(encoding="utf-8") == models_table.table()


def test_numbers_of_models_are_those_of_the_tests() -> None:
    sound = len(models_table.SOUND)
    assert f"[{len(ARCHITECTURES)} architectures](examples/MODELS.md)" in (ROOT / "README.md").read_text()
    guide = " ".join((ROOT / "examples" / "GUIDE.md").read_text().split())
    assert f"{len(MODELS) - sound} model types that take images" in guide
    assert f"and {sound} that take sound" in guide
    assert f"{len(STATEFUL)} types of text models" in guide


def test_the_loop_that_is_shown_is_the_one_that_is_tested() -> None:
    assert inspect.getsource(reference.generate) in blocks(".github/CONTRIBUTING.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_has_names_that_exist(document: str) -> None:
    for block in blocks(document):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_selfspec":
                missing = [alias.name for alias in node.names if alias.name not in hf_selfspec.__all__]
                assert not missing, missing
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {"SelfSpec": SelfSpec, "hf_selfspec": hf_selfspec}.get(node.value.id)
                assert owner is None or hasattr(owner, node.attr), node.attr


def test_the_first_code_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With shorter texts."""
    monkeypatch.chdir(ROOT)
    use = next(block for block in blocks("README.md") if "from_pretrained" in block)
    exec(re.sub(r"(max_new_tokens=)\d+", r"\g<1>8", use), {})
    assert "tokens" in capsys.readouterr().out


@pytest.mark.every_run("your_own_draft")
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_run(notebook: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Their cells one after another, where Jupyter runs them, with shorter texts."""
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setitem(sys.modules, notebook, module := types.ModuleType(notebook))
    for cell in json.loads((ROOT / "examples" / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("TOKENS = 96", "TOKENS = 24"), module.__dict__)
    printed = capsys.readouterr().out
    for part in NOTEBOOKS[notebook]:
        assert part in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_the_training_example_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    example = next(block for block in blocks("examples/TRAINING.md") if "EarlyExitLoss" in block)
    exec(example.replace("max_steps=20", "max_steps=2"), {})
    told = capsys.readouterr().out
    assert "agreement" in told
    assert "acceptance rate" in told


def test_every_public_name_is_described() -> None:
    for name in hf_selfspec.__all__:
        described = inspect.getdoc(getattr(hf_selfspec, name))
        assert described, name
        assert not described.startswith(f"{name}("), "what a dataclass makes of its fields is no docstring"
