"""The report of a comparison: Markdown, one page that loads nothing, pictures, and the page in a browser."""

from __future__ import annotations

import base64
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from comparing import DEMO
from conftest import tiny_llama
from matplotlib.image import imread
from transformers import AutoTokenizer

from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SettingError
from hf_selfspec.bench.comparison import drawing
from hf_selfspec.bench.comparison.compare import Asked, Comparison
from hf_selfspec.bench.comparison.journal import Parted
from hf_selfspec.bench.comparison.page import html
from hf_selfspec.bench.comparison.prompts import Prompt
from hf_selfspec.bench.comparison.settings import Settings

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Tags that have no end.
_VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """What a page holds; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Comparison:
    """A report of prompts of two kinds, greedy and drawn, with a name that has to be escaped."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    texts = ["def read(path):", "class Stack:", "import os", "for line in lines:"]
    prompts = [
        Prompt("code" if index % 2 else "a & b", tokenizer(text)["input_ids"]) for index, text in enumerate(texts)
    ]
    methods = {"<exit>": SelfSpec(EarlyExit(3), FixedLength(3)), "free": SelfSpec.lookup()}
    settings = Settings(max_new_tokens=16, temperatures=(0.0, 0.7))
    asked = Asked(
        tiny_llama(vocabulary=4096), tokenizer, prompts, settings, methods, out=folder, about={"note": "a | b"}
    )
    return asked.measured(progress=False)


@pytest.mark.usefixtures("compared")
def test_page_is_whole_and_loads_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.all_of("script") == page.all_of("link") == page.all_of("iframe") == []
    sources = [image["src"] or "" for image in page.all_of("img")]
    assert len(sources) == 2 * 3 + 1
    assert all(image["alt"] for image in page.all_of("img"))
    for source in sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert "url(" not in text
    assert "@import" not in text
    assert "<exit>" in page.words
    assert "Not measured" not in page.words


@pytest.mark.usefixtures("compared")
def test_page_answers_first(folder: Path) -> None:
    words = Page((folder / "report.html").read_text()).words
    text = " ".join(words)
    headline = text.index("plain generate")
    assert headline < text.index("All ways") < text.index("Latency") < text.index("Model, machine and settings")


@pytest.mark.usefixtures("compared")
def test_markdown_tables_have_as_many_cells_as_columns(folder: Path) -> None:
    lines = (folder / "report.md").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if set(line) == {"|", "-"}]
    assert len(starts) >= 12
    for start in starts:
        rows = [lines[start - 1]]
        for line in lines[start + 1 :]:
            if not line.startswith("|"):
                break
            rows.append(line)
        assert len(rows) > 1
        assert {row.count("|") for row in rows} == {lines[start].count("|")}
    assert "| note | a / b |" in lines


def test_pictures_tell_ways_apart_without_colour(compared: Comparison) -> None:
    condition = compared.results["conditions"][0]
    kinds = drawing.by_kind(condition)
    assert kinds is not None
    points = [line for line in kinds.axes[0].get_lines() if line.get_label()[0] != "_"]
    assert len({line.get_marker() for line in points}) == len({line.get_color() for line in points}) == 2
    styles = set(drawing._STYLES.values())
    assert len(styles) == len(drawing._STYLES)
    assert len({hatch for _, hatch in styles if hatch}) == 2
    bars = drawing.speedups(condition).axes[0]
    assert [text.get_text() for text in bars.get_yticklabels()].count("plain") == 1


def test_without_matplotlib_there_is_a_report_without_pictures(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise SettingError("matplotlib could not be imported")

    monkeypatch.setattr(drawing, "new_figure", missing)
    compared.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md", "report.html"}
    page = Page((tmp_path / "report.html").read_text())
    assert page.all_of("img") == []
    assert any("Plots need matplotlib" in word for word in page.words)


def test_texts_that_part_are_shown_with_their_gaps(compared: Comparison) -> None:
    found = {**compared.results, "conditions": [dict(compared.results["conditions"][0])]}
    ways = [dict(way) for way in found["conditions"][0]["ways"]]
    part = vars(Parted(0, 2, "free", 0, 7, 0.0123, True))
    parted = {name: part[name] for name in ("prompt", "row", "position", "margin")} | {"near_tie": True}
    ways[2]["equal_ids"] = {"texts": 3, "equal": 2, "share": 2 / 3, "parted": [parted]}
    found["conditions"][0]["ways"] = ways
    words = Page(html(found, {})).words
    place = words.index("Texts that differ")
    assert words[place:].count("0.012") == 1


@pytest.mark.usefixtures("compared")
def test_page_opens_in_a_browser(folder: Path, tmp_path: Path) -> None:
    """A browser shows it all, with no network and nothing to complain of."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(
            f"needs a browser on the path, one of {', '.join(BROWSERS)}: Debian has it as `apt install chromium`"
        )
    shot = tmp_path / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--proxy-server=127.0.0.1:9", "--window-size=1100,2400"]
    page = (folder / "report.html").as_uri()
    done = subprocess.run([*command, f"--screenshot={shot}", page], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    shown = imread(shot)[..., :3]
    assert shown.shape[:2] == (2400, 1100)
    colours = {tuple(round(float(part), 2) for part in pixel) for pixel in shown[::3, ::3].reshape(-1, 3)}
    assert (0.0, 0.45, 0.7) in colours, "the pictures' blue"
    found = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120).stdout
    assert found.count("<table") == (folder / "report.html").read_text().count("<table")
