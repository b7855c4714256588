"""Names, folders and expressions that a command line gives for a ``SelfSpec``."""

from pathlib import Path

import pytest

from helpers.fitted import mtp_of
from helpers.models import tiny_llama
from hf_selfspec import Adapter, ConfidenceThreshold, ExitHeads, LinearProbe, SelfSpec, SettingError, TopKTree
from hf_selfspec.drafts import Cascade, EarlyExit, Lookup, SkipLayers
from hf_selfspec.tools.methods import SPECS, read_spec, split


def test_names_and_expressions() -> None:
    for text, spec in {
        **{name: SelfSpec() if name == "selfspec" else getattr(SelfSpec, name)() for name in SPECS},
        "SelfSpec()": SelfSpec(),
        " SelfSpec.layerskip(8, num_draft=3) ": SelfSpec.layerskip(8, num_draft=3),
        "SelfSpec(EarlyExit(2), ConfidenceThreshold(0.5))": SelfSpec(EarlyExit(2), ConfidenceThreshold(0.5)),
        "SelfSpec(draft=SkipLayers(attention=[1, 2], mlp=(3,)), tree=TopKTree(((0.5, 2), (1.0, 1))), max_draft=7)": (
            SelfSpec(SkipLayers((1, 2), (3,)), None, TopKTree(((0.5, 2), (1.0, 1))), 7)
        ),
        "SelfSpec(Cascade([Lookup(0)]), graphs=False)": SelfSpec(Cascade([Lookup(0)]), graphs=False),
    }.items():
        assert read_spec(text) == spec


def test_folders(tmp_path: Path) -> None:
    SelfSpec.layerskip(2, 3).save_pretrained(tmp_path / "spec")
    assert read_spec(str(tmp_path / "spec")) == SelfSpec.layerskip(2, 3)
    hidden = tiny_llama().config.hidden_size
    for name, part, preset in (
        ("mtp", mtp_of(tiny_llama()), SelfSpec.mtp),
        ("adapter", Adapter(2, hidden, 4), SelfSpec.kangaroo),
        ("probe", LinearProbe(2, hidden), SelfSpec.adaspeed),
        ("heads", ExitHeads([1, 3], hidden, 97), None),
    ):
        part.save_pretrained(tmp_path / name)
        if preset is not None:
            assert repr(read_spec(str(tmp_path / name))) == repr(preset(str(tmp_path / name)))
    with pytest.raises(SettingError, match="exit heads"):  # that have no thresholds
        read_spec(str(tmp_path / "heads"))
    for content in (None, "{", "[1]", '{"architectures": ["Llama"]}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(SettingError, match=r"has no config\.json|holds no p"):
            read_spec(str(tmp_path))


def test_what_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, words in {
        "lokup": "--spec lokup: there is no such folder or preset. Give one of adaspeed, layerskip, lookup, mtp",
        "": "there is no such folder or preset",
        "(" * 100_000: "there is no such folder or preset",
        "SelfSpec.layerskip(0)": "must be at least 1, got 0",
        "SelfSpec.layerskip(depth=3)": "`SelfSpec.layerskip` does not take that",
        "SelfSpec(print)": "`print` is not allowed in it",
        "SelfSpec(1 + 1)": "`1 + 1` is not allowed in it",
        "open('a', 'w')": "`open` cannot be called in it",
        "SelfSpec().save_pretrained('a')": "cannot be called in it",
        "SelfSpec.__init_subclass__()": "cannot be called in it",
        "Lookup()": "this is not a SelfSpec but Lookup",
        "SelfSpec.kangaroo('nowhere/at-all')": "there is no saved part",
    }.items():
        with pytest.raises(SettingError) as raised:
            read_spec(text)
        assert words in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_commas_separate_outside_brackets() -> None:
    texts = ["selfspec, SelfSpec.layerskip(8, num_draft=3),a", "SelfSpec.kangaroo('a,b'),"]
    found = ["selfspec", "SelfSpec.layerskip(8, num_draft=3)", "a", "SelfSpec.kangaroo('a,b')"]
    assert split(texts) == found
