"""Draft sources and stop rules that a user writes: used everywhere, and saved by their names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TopPLogitsWarper

import hf_selfspec
from helpers.models import ROW
from helpers.processes import EXAMPLES
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from helpers.sources import Alternating, Recalled
from helpers.watched import Proposing
from hf_selfspec import Draft, SelfSpec, Verdict
from hf_selfspec.drafts import Cascade, Drafter, DraftSource, EarlyExit, Lookup, Session
from hf_selfspec.errors import SettingError, SettingTypeError, UnsupportedModelError
from hf_selfspec.learned import saving


@pytest.mark.slow
def test_joint_distribution_is_that_of_the_full_model() -> None:
    """Two calls, the second of which drafts with what the first one has shown."""
    spec = SelfSpec(Cascade([Lookup(max_nodes=2), Recalled(2.0)]))
    check_exact(sample(spec, rows=600, calls=2, top_p=0.9), exact_joint(tiny_vocabulary(), [TopPLogitsWarper(0.9)]))


def test_findings_of_an_own_source_last(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """In a folder, in a cache folder, and from one call or kind of call to the next."""

    def drafted_by(spec: SelfSpec, rows: int = 1) -> int:
        inputs = {name: value.repeat(rows, 1) for name, value in ROW.items()}
        llama.generate(**inputs, max_new_tokens=20, assistant=spec)
        return spec.stats.drafted

    first = SelfSpec(Recalled(), cache_dir=tmp_path / "cache")
    early = drafted_by(first)
    assert first.stats.plan.endswith("tokens recalled")
    first.save_pretrained(tmp_path / "saved")
    for later in (SelfSpec.from_pretrained(tmp_path / "saved"), SelfSpec(Recalled(), cache_dir=tmp_path / "cache")):
        assert drafted_by(later) > early > 0
    assert drafted_by(first, rows=2) > 2 * early


class Unknown(Recalled):
    """Nobody registers it."""


class UnknownRule(Alternating):
    """Nor this rule."""


@pytest.mark.parametrize(
    ("make", "place", "name"),
    [
        (lambda draft, _: SelfSpec(draft), "draft", "Unknown"),
        (lambda _, rule: SelfSpec(EarlyExit(3), rule), "stop", "UnknownRule"),
        (lambda draft, _: SelfSpec(Cascade([Lookup(), draft])), "draft.sources", "Unknown"),
    ],
    ids=["draft", "stop", "cascade"],
)
def test_registered_classes_alone_are_saved_and_loaded(
    make: Callable[[Any, Any], SelfSpec], place: str, name: str, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Files are those of a process in which these names were registered."""
    spec, other = make(Recalled(), Alternating(3)), make(Unknown(), UnknownRule())
    spec.save_pretrained(tmp_path)
    assert SelfSpec.from_pretrained(tmp_path) == spec
    file = tmp_path / saving.FILE_NAME
    file.write_text(file.read_text().replace('"Recalled"', '"Unknown"').replace('"Alternating"', '"UnknownRule"'))
    with pytest.raises(SettingError, match=rf"{place} has the class '{name}'.*registers it \(hf_selfspec.register\)"):
        SelfSpec.from_pretrained(tmp_path)
    with pytest.raises(SettingError, match=rf"is {name}"):
        other.save_pretrained(tmp_path / "unsaved")
    assert not (tmp_path / "unsaved").exists()
    llama.generate(**ROW, max_new_tokens=4, assistant=other)


def test_a_source_and_a_rule_are_one_file(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the notebook draft, alone and in a cascade, are saved by their names, and exact."""
    cells = json.loads((EXAMPLES / "your_own_draft.ipynb").read_text(encoding="utf-8"))["cells"]
    classes = ["".join(cell["source"]) for cell in cells if "@register" in "".join(cell["source"])]
    (tmp_path / "your_own_draft.py").write_text("import torch\n" + "\n\n".join(classes))
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("your_own_draft")
    source, options = own.Successors(2), {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    specs = SelfSpec(source), SelfSpec(Cascade([Lookup(), source])), SelfSpec(EarlyExit(3), own.Entropy(3.0))
    for rows, spec in product((1, 3), specs):
        inputs = {name: value.repeat(rows, 2) for name, value in ROW.items()}
        ids = llama.generate(**inputs, **options, assistant=spec)
        assert torch.equal(ids, llama.generate(**inputs, **options))
        assert spec.stats.drafted > 0
        spec.save_pretrained(tmp_path)
        assert SelfSpec.from_pretrained(tmp_path) == spec


def fixed(*parts: Any, **others: Any) -> DraftSource:
    """Drafts the same in each round."""
    return Proposing(lambda text, max_new: Draft(*parts, **others))


WHOLE: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def test_tokens_that_a_source_lists_count(llama: LlamaForCausalLM) -> None:
    """So that what goes through the model is what is judged."""
    plain = llama.generate(**ROW, **WHOLE)
    for parents in (None, [[0, 0, 0]]):
        lengths, listed = [3 if parents is None else 1], [plain[0, -3:].tolist()]
        spec = SelfSpec(fixed(torch.tensor([[5, 6, 7]]), lengths, parents, listed=listed))
        assert torch.equal(llama.generate(**ROW, **WHOLE, assistant=spec), plain)
        assert spec.stats.accepted


def test_acceptance_by_hand() -> None:
    """A line of three tokens with siblings of each, one of two, and a tree whose longest path is 2, 3, 5."""
    parents = [[0, 1, 2, 0, 1, 2], [0, 1, -1, 0, 1, -1], [0, 0, 2, 1, 3, -1]]
    draft = Draft(torch.zeros(3, 6, dtype=torch.long), [3, 2, 3], parents)
    for paths, accepted in (
        (((1, 2, 3, -1), (1, 2, -1), (2, 3, 5, -1)), [3, 2, 3]),
        (((1, 5, -1), (4, -1), (2, 3, -1)), [1, 0, 2]),
        (((4, -1), (1, 5, -1), (1, 4, -1)), [0, 1, 0]),
        (((1, 2, 6, -1), (-1,), (-1,)), [2, 0, 0]),
    ):
        verdicts = [Verdict([7] * len(nodes), list(nodes), False, [0] * len(nodes)) for nodes in paths]
        assert draft.accepted(verdicts) == accepted


def test_siblings_that_are_accepted_are_no_drafting_steps(llama: LlamaForCausalLM) -> None:
    """Where each line is wrong, and a sibling right: α is 0, and the tokens are kept."""
    plain = llama.generate(**ROW, **WHOLE)
    never = next(token for token in range(3, 97) if token not in plain)
    spec = SelfSpec(fixed(torch.tensor([[never, int(plain[0, -1])]]), [1], [[0, 0]]))
    assert torch.equal(llama.generate(**ROW, **WHOLE, assistant=spec), plain)
    stats = spec.stats
    assert stats.siblings == stats.accepted == sum(stats.from_draft[0]) > 0
    assert stats.acceptance_rate == 0.0 < stats.drafted


FIT = r"Draft\(tokens \[1, 2\]\) needs 1 lengths of 0 to 2"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        *((fixed(torch.tensor([[5, 6]]), lengths), SettingError, FIT) for lengths in ([2, 2], [3], [-1])),
        (fixed(torch.tensor([[5, 6]]), [2], [[0]]), SettingError, FIT),
        (fixed(torch.tensor([[5, 6]]), [2], listed=[[1, 2], [3, 4]]), SettingError, FIT),
        (DraftSource(), NotImplementedError, r"DraftSource needs a method `start\(session\) -> Drafter`"),
    ],
)
def test_wrong_sources(source: DraftSource, error: type[Exception], words: str, llama: LlamaForCausalLM) -> None:
    with pytest.raises(error, match=words):
        llama.generate(**ROW, max_new_tokens=8, assistant=SelfSpec(source))


def test_registering() -> None:
    @dataclass(frozen=True)
    class Lookup(DraftSource):
        """Another class of that name."""

    with pytest.raises(SettingError, match=r"Lookup cannot be registered: hf_selfspec.drafts.free.lookup.Lookup has t"):
        hf_selfspec.register(Lookup)
    with pytest.raises(SettingTypeError, match="register takes a dataclass"):
        hf_selfspec.register(SelfSpec.lookup)
    # A module that is loaded again, as in a notebook.
    reloaded = type("Recalled", (Recalled,), {"__module__": Recalled.__module__, "__qualname__": "Recalled"})
    for again in (dataclass(frozen=True)(reloaded), Recalled):
        assert hf_selfspec.register(again) is again


@dataclass(frozen=True)
class Picky(DraftSource):
    """Finds out that it cannot draft when it starts."""

    def start(self, session: Session) -> Drafter:
        raise UnsupportedModelError(f"{session.anatomy.model_name} is not picked.")


@pytest.mark.usefixtures("no_warnings_yet")
def test_a_source_that_refuses_a_model(fresh_llama: LlamaForCausalLM) -> None:
    """Before any forward; plain serves where it is attached, and in a cascade others draft."""
    plain, forwards = fresh_llama.generate(**ROW, max_new_tokens=8), list[Any]()
    hook = fresh_llama.register_forward_pre_hook(lambda *args: forwards.append(args))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is not picked"):
        fresh_llama.generate(**ROW, max_new_tokens=8, assistant=SelfSpec(Picky()))
    assert not forwards
    hook.remove()
    for spec, words in (
        (SelfSpec(Picky()), "plain generate serves it: LlamaForCausalLM is not picked"),
        (SelfSpec(Cascade([Lookup(), Picky()])), "is left out of the drafts of this model: .* not picked"),
    ):
        with hf_selfspec.attach(fresh_llama, spec), pytest.warns(UserWarning, match=words):
            assert torch.equal(fresh_llama.generate(**ROW, max_new_tokens=8), plain)
