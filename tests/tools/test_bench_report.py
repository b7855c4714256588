"""Conclusions and the report of a comparison: verdicts, Markdown, plots."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL
from hf_selfspec import Comparison, EarlyExit, FixedLength, SelfSpec, SettingError
from hf_selfspec.tools import report, results
from hf_selfspec.tools.compare import measured
from hf_selfspec.tools.methods import methods_of
from hf_selfspec.tools.report import verdict
from hf_selfspec.tools.request import Prompt, Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Comparison:
    """A report of prompts of two kinds, greedy and drawn, with a name that has to be escaped."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = ["def read(path):", "class Stack:", "import os", "for line in lines:"]
    kinds = ["code" if index % 2 else "a & b" for index in range(len(texts))]
    prompts = [Prompt(kind, tokenizer(text)["input_ids"]) for kind, text in zip(kinds, texts, strict=True)]
    methods = {"<exit>": SelfSpec(EarlyExit(3), FixedLength(3)), "free": SelfSpec.lookup()}
    settings = Settings(max_new_tokens=6, temperatures=(0.0, 0.7))
    model, about = tiny_llama(4, vocabulary=4096), {"note": "a | b"}
    return measured(model, tokenizer, prompts, settings, methods_of(methods), folder, about, progress=False)


def test_text_is_a_table_and_a_verdict(compared: Comparison, tmp_path: Path) -> None:
    printed = str(compared)
    assert "greedy, batch 1\n\nmethod" in printed
    assert "temperature 0.7, batch 1" in printed
    assert "<exit>" in printed
    assert compared.best in printed
    figure = compared.plot(tmp_path / "speed.png")
    assert len(figure.axes[0].patches) == 3
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()].count("plain") == 1
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("compared")
def test_markdown_tables_have_as_many_cells_as_columns(folder: Path) -> None:
    lines = (folder / "report.md").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if set(line) == {"|", "-"}]
    assert len(starts) >= 10
    for start in starts:
        rows = [lines[start - 1]]
        for line in lines[start + 1 :]:
            if not line.startswith("|"):
                break
            rows.append(line)
        assert len(rows) > 1
        assert {row.count("|") for row in rows} == {lines[start].count("|")}
    assert any(line.split() == ["|", "note", "|", "a", "/", "b", "|"] for line in lines)
    text = "\n".join(lines)
    assert "Not measured" not in text
    places = [text.index(word) for word in ("plain generate", "All methods", "Latency", "Model, machine and settings")]
    assert places == sorted(places)
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE)
    assert pictures == ["speed-up-0.png", "speed-up-1.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_without_matplotlib_there_is_a_report_without_pictures(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise SettingError("matplotlib could not be imported")

    monkeypatch.setattr(report, "new_figure", missing)
    compared.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md"}
    page = (tmp_path / "report.md").read_text()
    assert "![" not in page
    assert "Plots need matplotlib" in page


def test_texts_that_differ_are_shown_with_their_gaps(compared: Comparison) -> None:
    found = json.loads(json.dumps(compared.results))
    place = {"prompt": 2, "row": 0, "position": 7, "margin": 0.0123, "near_tie": True}
    found["conditions"][0]["methods"][2]["equal_ids"] = {"texts": 3, "equal": 2, "share": 2 / 3, "differences": [place]}
    page = report.markdown(found)
    assert page[page.index("Texts that differ") :].count("0.012") == 1


def condition(prompts: int = 12, **changed: Any) -> dict[str, Any]:
    """Two methods of which ours is faster."""

    def method(name: str, group: str, value: float, low: float | None, **more: Any) -> dict[str, Any]:
        means = {"value": value, "low": low, "high": None if low is None else value + 0.2}
        equal = {"texts": 4, "equal": 4, "share": 1.0, "differences": []}
        found = {"name": name, "group": group, "call": f"assistant={name}", "whole": {"ratio_of_means": means}}
        found |= {"output_token_throughput": {"value": 20 * value}, "equal_ids": equal, "is_lossless": True}
        return found | more

    ours = {"value": 1.5, "low": 1.3} | changed
    methods = [
        method("plain", "plain", 1.0, None),
        method("SelfSpec()", "ours", ours.pop("value"), ours.pop("low"), **ours),
    ]
    return {"prompts": prompts, "methods": methods, "best": results.fastest(methods)}


def test_verdicts() -> None:
    found = verdict(condition())
    assert found.headline == (
        "SelfSpec() is 1.50 times as fast as plain generate (95 % interval 1.30 to 1.70): 30.0 tokens per second "
        "instead of 20.0."
    )
    assert found.call == "from hf_selfspec import SelfSpec\nmodel.generate(**inputs, assistant=SelfSpec())"
    assert found.details == ["The ids of SelfSpec() are plain generate's in 4 of 4 texts."]
    assert verdict(condition(low=0.9)).headline.startswith("No clear gain: the fastest, SelfSpec(), runs at 1.50 times")
    few = verdict(condition(9, low=None))
    assert few.headline.startswith("Too few prompts to call it a gain: the fastest, SelfSpec(), runs at 1.50 times")
    assert few.call == ""
    assert few.details[-1] == "Only 9 prompts count, too few for an interval: give more."
    slower = verdict(condition(value=0.8, low=0.7))
    assert slower.headline == "Nothing that was measured is faster than plain generate here."
    assert slower.details == ["The fastest SelfSpec, SelfSpec(), runs at 0.80 times the speed of plain generate."]


def test_other_text_than_the_models_is_never_the_best() -> None:
    place = {"prompt": 1, "row": 0, "position": 3, "margin": 0.5, "near_tie": False}
    equal = {"texts": 4, "equal": 3, "share": 0.75, "differences": [place]}
    wrong = condition(equal_ids=equal, is_lossless=False)
    assert wrong["best"] == "plain"
    found = verdict(wrong)
    assert found.headline == "No method that writes the model's own text is faster than plain generate here."
    assert found.call == ""
    said = "SelfSpec() (1.50) does not count: it does not write the model's own text"
    assert found.details == [f"{said} (the ids are the same in 3 of 4 texts)."]
    assert verdict(condition(equal_ids=None, is_lossless=False)).details == [f"{said}."]
    tie = condition(equal_ids=equal | {"differences": [place | {"near_tie": True}]})
    assert "within rounding of the model's highest" in verdict(tie).details[-1]
