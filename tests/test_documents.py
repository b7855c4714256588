"""README, guide and figures: short, and without links, names or calls that do not exist."""

import ast
import re
from pathlib import Path

import pytest

import hf_selfspec
from hf_selfspec import SelfSpec

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", ".github/CONTRIBUTING.md", "examples/GUIDE.md", "examples/RESULTS.md", "CHANGELOG.md")
README_LINES = 180

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks(document: str) -> list[str]:
    return _BLOCK.findall((ROOT / document).read_text())


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = _HEADING.findall(path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_nothing_is_left_to_fill_in(document: str) -> None:
    assert not re.search(r"@[A-Z0-9]+@|TODO|XXX", (ROOT / document).read_text())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for link in _LINK.findall(path.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else path.parent / file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


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
    monkeypatch.chdir(ROOT)
    use = next(block for block in blocks("README.md") if "from_pretrained" in block)
    exec(use, {})
    assert "tokens" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_the_training_example_of_the_guide_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    example = next(block for block in blocks("examples/GUIDE.md") if "EarlyExitLoss" in block)
    exec(example.replace("max_steps=20", "max_steps=2"), {})
    told = capsys.readouterr().out
    assert "agreement" in told
    assert "acceptance rate" in told
