"""Draft sources and stop rules that a user writes: used everywhere, and saved by their names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, TopPLogitsWarper

import hf_selfspec
from helpers.calls import LastSeen
from helpers.models import BATCH, ROW, ragged_batch
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from hf_selfspec import FixedLength, GenerationStats, SelfSpec
from hf_selfspec.batch import Draft, Text, Verdict
from hf_selfspec.draft import Cascade, Drafter, DraftSource, EarlyExit, FixedDrafter, Lookup, Session
from hf_selfspec.errors import SettingError, SettingTypeError, UnsupportedModelError
from hf_selfspec.learned import saving
from hf_selfspec.learned.findings import Findings
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.stop.rules import Memory, start


@hf_selfspec.register("draft")
@dataclass(frozen=True)
class Recited(DraftSource):
    """Names what followed the last token in a fixed list, wherever it stands there: so many lines of so many tokens."""

    tokens: tuple[int, ...]
    length: int = 4
    lines: int = 1

    fixed_because = "Recited drafts what is in its list"

    def start(self, session: Session) -> Drafter:
        return Reciting(self, session.takes_trees)


class Reciting(FixedDrafter):
    def __init__(self, settings: Recited, takes_trees: bool) -> None:
        self.settings = settings
        self.lines = settings.lines if takes_trees else 1

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        rows = [self._lines(int(last), most) for last, most in zip(text.last_tokens()[:, 0], max_new, strict=True)]
        size = max(sum(map(len, lines)) for lines in rows)
        tokens, parents = [], []
        for lines in rows:
            above: list[int] = []
            for line in lines:
                above += [0, *range(len(above) + 1, len(above) + len(line))] if line else []
            padding = size - len(above)
            tokens.append([*(token for line in lines for token in line), *[0] * padding])
            parents.append([*above, *[-1] * padding])
        lengths = [max(map(len, lines)) for lines in rows]
        drafted = torch.tensor(tokens, dtype=torch.long).view(text.batch_size, size)
        return Draft(drafted, lengths, parents if self.lines > 1 else None)

    def _lines(self, last: int, most: int) -> list[list[int]]:
        known, length = self.settings.tokens, min(self.settings.length, most)
        lines: dict[int, list[int]] = {}
        for place, token in enumerate(known[:-1]):
            if token == last and length:
                lines.setdefault(known[place + 1], list(known[place + 1 : place + 1 + length]))
        return list(lines.values())[: self.lines] or [[]]


@dataclass
class Table(Findings):
    """What the model predicted after each token the last time that it stood there."""

    logits: dict[int, list[float]] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        return {"logits": [[token, *values] for token, values in self.logits.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        self.logits = {int(token): [float(value) for value in values] for token, *values in state["logits"]}


@hf_selfspec.register("draft")
@dataclass(frozen=True)
class Recalled(DraftSource):
    """Draws each token from what the model predicted after the token before it, the last time."""

    flatness: float = 1.0

    def start(self, session: Session) -> Drafter:
        return Recalling(self, session)


class Recalling:
    def __init__(self, settings: Recalled, session: Session) -> None:
        self.flatness = settings.flatness
        self.steps = 0
        self.limits = session.limits(FixedLength(3))
        self.scorer = session.scorer
        self.vocabulary = session.vocabulary
        self.table = session.knowledge.of("recalled", lambda other: Table() if other is None else Table(other.logits))
        self.rule = start(self.limits.stop, session.num_rows, self.limits.longest, self.limits.memory)
        self._drafted: list[int] = []

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        lengths = [0] * text.batch_size
        tokens, qs = [], []
        last = text.last_tokens()[:, 0]
        self.rule.begin()
        for depth in range(min(self.limits.longest, max(max_new))):
            rows = [self.table.logits.get(int(token)) for token in last]
            drafting = [
                length == depth and depth < most and known is not None
                for length, most, known in zip(lengths, max_new, rows, strict=True)
            ]
            if not any(drafting):
                break
            logits = torch.tensor([known or [0.0] * self.vocabulary for known in rows]) / self.flatness
            scores = self.scorer.ahead(text, depth, logits, drafting)
            if self.scorer.do_sample:
                qs.append(scores.softmax(-1))
                last = torch.multinomial(qs[-1], 1)[:, 0]
            else:
                last = scores.argmax(-1)
            text.write_draft(last, depth)
            tokens.append(last)
            lengths = [length + on for length, on in zip(lengths, drafting, strict=True)]
            self.steps += 1
            ends = self.rule(text.with_draft(depth + 1), logits, logits).tolist()
            if all(end for end, on in zip(ends, drafting, strict=True) if on):
                break
        self._drafted = lengths
        if not tokens:
            return Draft.none(text)
        return Draft(torch.stack(tokens, 1), lengths, q=torch.stack(qs, 1) if qs else None)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        if any(self._drafted):
            self.rule.update(self._drafted, [sum(node >= 0 for node in verdict.nodes) for verdict in verdicts])
        self.observe(text, verdicts, logits)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """After a round of its own, and in a cascade after others'."""
        for row, verdict in enumerate(verdicts):
            kept = len(verdict.tokens)
            before = text.ids[row, text.lengths[row] - kept - 1 : text.lengths[row] - 1].tolist()
            for token, source in zip(before, verdict.sources, strict=True):
                self.table.logits[token] = logits[row, source].tolist()

    def finish(self, text: Text) -> None:
        pass

    def report(self, stats: GenerationStats) -> None:
        stats.plan = f"{len(self.table.logits)} tokens recalled"


@hf_selfspec.register("stop")
@dataclass(frozen=True)
class Alternating:
    """Ends drafts after tokens whose id is a multiple of ``divisor``."""

    divisor: int = 2

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return input_ids[:, -1] % self.divisor == 0


@hf_selfspec.register("stop")
@dataclass(frozen=True)
class Growing:
    """Drafts one token more after each draft that was accepted as a whole, from call to call."""

    first: int = 1

    def start(self, rows: int, max_draft: int, memory: Memory) -> GrowingRule:
        return GrowingRule(self.first, memory)


class GrowingRule:
    def __init__(self, first: int, memory: Memory) -> None:
        self.memory = memory
        self.memory.value = self.memory.value or first
        self.length = 0

    def begin(self) -> None:
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        self.length += 1
        return torch.full((len(logits),), self.length >= self.memory.value)

    def update(self, drafted: list[int], accepted: list[int]) -> None:
        if drafted == accepted:
            self.memory.value += 1


INPUTS = {"one row": ROW, "ragged batch": BATCH}
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def known(llama: LlamaForCausalLM) -> tuple[int, ...]:
    """What the model says after all prompts, with every seventh token changed."""
    said: list[int] = []
    for inputs in INPUTS.values():
        ids = llama.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, inputs["input_ids"].shape[1] :]
        said += ids.flatten().tolist()
    return tuple(5 if place % 7 == 6 else token for place, token in enumerate(said))


SPECS: dict[str, Callable[[tuple[int, ...]], SelfSpec]] = {
    "named": lambda known: SelfSpec(Recited(known)),
    "named tree": lambda known: SelfSpec(Recited(known, lines=3)),
    "drawn, own rule": lambda known: SelfSpec(Recalled(), Alternating(3)),
    "exit, rule that remembers": lambda known: SelfSpec(EarlyExit(3), Growing()),
    "free and named tree": lambda known: SelfSpec(Cascade([Lookup(), Recited(known, lines=3)])),
    "free and all": lambda known: SelfSpec(Cascade([Recalled(), Lookup(), Recited(known), EarlyExit(3)]), Growing(2)),
}


def assert_same(model: Any, spec: SelfSpec, inputs: dict[str, torch.Tensor], **options: Any) -> GenerationStats:
    """The output is plain ``generate``'s, and drafts were right now and then."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    assert torch.equal(model.generate(**inputs, **options, assistant=spec), model.generate(**inputs, **options))
    assert spec.stats is not None
    assert 0 < spec.stats.accepted <= spec.stats.drafted
    return spec.stats


@pytest.mark.parametrize("name", SPECS)
def test_greedy(name: str, llama: LlamaForCausalLM, known: tuple[int, ...]) -> None:
    spec = SPECS[name](known)
    for inputs in INPUTS.values():
        assert_same(llama, spec, inputs)


def test_drafts_are_what_the_sources_know(llama: LlamaForCausalLM, known: tuple[int, ...]) -> None:
    """Several lines of a list hold what one does and more; a source that learns drafts more later."""
    one, several = (assert_same(llama, SelfSpec(Recited(known, lines=lines)), ROW).accepted for lines in (1, 4))
    assert NEW_TOKENS // 4 < one < several
    spec = SelfSpec(Recalled())
    first, second = (assert_same(llama, spec, ROW) for _ in range(2))
    assert second.drafted > first.drafted
    assert second.plan.endswith("tokens recalled")
    assert second.draft_steps >= second.drafted


def test_own_rules_end_drafts(llama: LlamaForCausalLM) -> None:
    spec = SelfSpec(EarlyExit(3), Growing())
    first = assert_same(llama, spec, ROW)
    assert spec._knowledge.record(llama).memories[False, False].value > 1
    assert assert_same(llama, spec, ROW).draft_steps / first.rounds > first.draft_steps / first.rounds
    assert set(assert_same(llama, SelfSpec(EarlyExit(3), Alternating(1)), ROW).accepted_lengths) == {0, 1}
    spec = SelfSpec(Recalled(), FixedLength(8), max_draft=2)
    for _ in range(2):
        stats = assert_same(llama, spec, ROW)
    assert max(stats.accepted_lengths) <= 2 < NEW_TOKENS // stats.rounds + 2


LIST = (3, 0, 1, 4, 2, 2, 3, 1, 0, 4, 4, 1, 2, 0, 3)
SAMPLED: dict[str, Callable[[], SelfSpec]] = {
    "named tree": lambda: SelfSpec(Recited(LIST, 2, 3)),
    "drawn": lambda: SelfSpec(Recalled(0.5)),
    "drawn, own rule": lambda: SelfSpec(Recalled(2.0), Alternating(2)),
    "exit, own rule": lambda: SelfSpec(EarlyExit(2), Alternating(2)),
    "free and drawn": lambda: SelfSpec(Cascade([Lookup(max_nodes=2), Recalled(2.0)])),
    "free and named tree": lambda: SelfSpec(Cascade([Lookup(max_nodes=3), Recited(LIST, 2, 2)])),
}


@pytest.mark.every_run("drawn, own rule|free and named tree")
@pytest.mark.parametrize("name", SAMPLED)
def test_joint_distribution_is_that_of_the_full_model(name: str) -> None:
    """Two calls, the second of which drafts with what the first one has shown."""
    sampled = sample(SAMPLED[name](), rows=600, calls=2, top_p=0.9)
    check_exact(sampled, exact_joint(tiny_vocabulary(), [TopPLogitsWarper(0.9)]))


@pytest.mark.parametrize("name", ["drawn, own rule", "free and all"])
def test_classes_are_saved_by_name(name: str, llama: LlamaForCausalLM, known: tuple[int, ...], tmp_path: Path) -> None:
    spec = SPECS[name](known)
    assert_same(llama, spec, ROW)
    spec.save_pretrained(tmp_path)
    loaded = SelfSpec.from_pretrained(tmp_path)
    assert (loaded.draft, loaded.stop) == (spec.draft, spec.stop)
    assert_same(llama, loaded, ROW)
    config = GenerationConfig(assistant=spec)
    config.save_pretrained(tmp_path / "config")
    restored = GenerationConfig.from_pretrained(tmp_path / "config")
    plain = llama.generate(**ROW, max_new_tokens=NEW_TOKENS)
    assert torch.equal(llama.generate(**ROW, max_new_tokens=NEW_TOKENS, generation_config=restored), plain)
    assert (restored.assistant.draft, restored.assistant.stop) == (spec.draft, spec.stop)
    assert restored.assistant.stats.accepted > 0


def test_findings_of_an_own_source_last(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """In a folder, in a cache folder, and from one kind of call to the next."""
    first = SelfSpec(Recalled(), cache_dir=tmp_path / "cache")
    early = assert_same(llama, first, ROW).drafted
    first.save_pretrained(tmp_path / "saved")
    kept = first._knowledge.latest(llama, lambda found: isinstance(found, Table)).logits
    loaded = SelfSpec.from_pretrained(tmp_path / "saved")
    assert assert_same(llama, loaded, ROW).drafted > early
    assert kept.keys() == loaded._knowledge.latest(llama, lambda found: isinstance(found, Table)).logits.keys()
    again = SelfSpec(Recalled(), cache_dir=tmp_path / "cache")
    assert assert_same(llama, again, ROW).drafted == early
    spec = SelfSpec(Recalled())
    assert_same(llama, spec, ROW)
    batch = {name: value.repeat(2, 1) for name, value in ROW.items()}
    assert assert_same(llama, spec, batch).drafted > 2 * early


class Unknown(Recited):
    """Nobody registers it."""


class UnknownRule(Alternating):
    """Nor this rule."""


def test_what_nobody_registered_is_neither_saved_nor_loaded(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """Files are those of a process in which these names were registered."""
    known, unknown = (Recited((3, 4)), Alternating()), (Unknown((3, 4)), UnknownRule())
    cases: tuple[tuple[Callable[..., SelfSpec], str, str], ...] = (
        (
            lambda draft, _: SelfSpec(draft),
            "draft has the class 'Unknown'",
            r"\(draft\) is Unknown.*hf_selfspec.regist",
        ),
        (lambda _, rule: SelfSpec(EarlyExit(3), rule), "stop has the class 'UnknownRule'", r"\(stop\) is UnknownRule"),
        (lambda draft, _: SelfSpec(Cascade([Lookup(), draft])), "draft.sources has the class 'Unknown'", "is Unknown"),
    )

    def elsewhere(file: Path) -> None:
        text = file.read_text()
        file.write_text(text.replace('"Recited"', '"Unknown"').replace('"Alternating"', '"UnknownRule"'))
        assert file.read_text() != text

    for place, (make, loading, writing) in enumerate(cases):
        other = make(*unknown)
        make(*known).save_pretrained(folder := tmp_path / str(place))
        elsewhere(folder / saving.FILE_NAME)
        with pytest.raises(SettingError) as raised:
            SelfSpec.from_pretrained(folder)
        advice = "import the module that registers it (hf_selfspec.register) before loading"
        assert all(part in str(raised.value) for part in (str(tmp_path), loading, advice))
        with pytest.raises(SettingError, match=writing):
            other.save_pretrained(tmp_path / "unsaved")
        llama.generate(**ROW, max_new_tokens=4, assistant=other)
    assert not (tmp_path / "unsaved").exists()
    GenerationConfig(assistant=SelfSpec(known[0])).save_pretrained(folder := tmp_path / "config")
    elsewhere(folder / "generation_config.json")
    config = GenerationConfig.from_pretrained(folder)
    with pytest.raises(SettingError, match="saved with an assistant that this version of hf_selfspec cannot use"):
        llama.generate(**ROW, generation_config=config)


ONE_FILE = """
from dataclasses import dataclass

import torch

from hf_selfspec import Draft, DraftSource, FixedDrafter, register


@register("draft")
@dataclass(frozen=True)
class Echo(DraftSource):
    length: int = 3
    takes_forwards = False

    def start(self, session):
        return EchoDrafter(min(self.length, session.max_draft))


class EchoDrafter(FixedDrafter):
    def __init__(self, length):
        self.length = length

    def propose(self, text, max_new):
        tokens = text.last_tokens().repeat(1, min(self.length, max(max_new)))
        return Draft(tokens, [min(self.length, count) for count in max_new])
"""


def test_a_source_is_one_file(llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts, alone and in a cascade, is saved by its name, and is exact, with nothing but public names."""
    monkeypatch.setattr(saving, "_places", {place: dict(kinds) for place, kinds in saving._places.items()})
    (tmp_path / "echo_source.py").write_text(ONE_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    echo = importlib.import_module("echo_source").Echo(2)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    for inputs, draft in product(INPUTS.values(), (echo, Cascade([Lookup(), echo]))):
        spec = SelfSpec(draft)
        ids = llama.generate(**inputs, **options, assistant=spec)
        assert torch.equal(ids, llama.generate(**inputs, **options))
        assert spec.stats.drafted > 0
        spec.save_pretrained(tmp_path)
        assert SelfSpec.from_pretrained(tmp_path).draft == spec.draft


def test_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_places", {place: dict(kinds) for place, kinds in saving._places.items()})

    @dataclass(frozen=True)
    class Lookup(DraftSource):
        """Another class of that name."""

    with pytest.raises(SettingError, match=r"Lookup cannot be registered: hf_selfspec.draft.lookup.Lookup has this"):
        hf_selfspec.register("draft")(Lookup)
    assert hf_selfspec.register("stop")(Lookup) is Lookup
    # A module that is loaded again, as in a notebook.
    again = dataclass(frozen=True)(type("Recited", (DraftSource,), {"__module__": __name__, "__qualname__": "Recited"}))
    assert hf_selfspec.register("draft")(again) is again
    with pytest.raises(SettingTypeError, match="register takes a dataclass"):
        hf_selfspec.register("draft")(SelfSpec.lookup)
    for places in (("drafts",), ("draft", "rules"), (), (Recalled,)):
        with pytest.raises(SettingError, match=r"register\(\*places\) .* Write register\(\"draft\"\)"):
            hf_selfspec.register(*places)


class Silent(FixedDrafter, DraftSource):
    """Takes its time and then drafts nothing."""

    asked = 0

    def start(self, session: Session) -> Drafter:
        return self

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        self.asked += 1
        sleep(0.02)
        return Draft.none(text)


@pytest.mark.times_decide
def test_a_source_that_drafts_nothing_is_not_asked_again(llama: LlamaForCausalLM) -> None:
    """Its time counts for it, and not for free drafts."""
    silent = Silent()
    spec = SelfSpec(Cascade([Lookup(), silent]))
    for seed in range(3):
        inputs = ragged_batch((9,), seed=seed)
        options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(llama.generate(**inputs, **options, assistant=spec), llama.generate(**inputs, **options))
    assert 3 < silent.asked < 40  # of more than 100 rounds
    assert spec.stats is not None


@dataclass(frozen=True)
class Picky(DraftSource):
    """Cannot draft, which it finds out when it is checked or when it starts."""

    when: str

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        self._refuse("check", anatomy)

    def start(self, session: Session) -> Drafter:
        self._refuse("start", session.anatomy)
        return FixedDrafter()

    def _refuse(self, when: str, anatomy: Anatomy) -> None:
        if when == self.when:
            raise UnsupportedModelError(f"{anatomy.model_name} is not picked at the {when}.")


@pytest.mark.parametrize("when", ["check", "start"])
def test_a_source_that_refuses_a_model(when: str, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[Any] = []
    hook = llama.register_forward_pre_hook(lambda *args: forwards.append(args))
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM is not picked at the {when}"):
        llama.generate(**ROW, max_new_tokens=8, assistant=SelfSpec(Picky(when)))
    assert not forwards
    hook.remove()
    plain = llama.generate(**ROW, max_new_tokens=8)
    with (
        hf_selfspec.attach(llama, SelfSpec(Picky(when))),
        pytest.warns(UserWarning, match=f"plain generate serves it: LlamaForCausalLM is not picked at the {when}"),
    ):
        assert torch.equal(llama.generate(**ROW, max_new_tokens=8), plain)
    spec = SelfSpec(Cascade([Lookup(), Picky(when)]))
    with pytest.warns(UserWarning, match=f"is left out of the drafts of this model: .* not picked at the {when}"):
        llama.generate(**ROW, max_new_tokens=8, assistant=spec)
    assert torch.equal(llama.generate(**ROW, max_new_tokens=8, assistant=spec), plain)


def test_a_source_needs_a_start(llama: LlamaForCausalLM) -> None:
    with pytest.raises(NotImplementedError, match=r"DraftSource needs a method `start\(session\) -> Drafter`"):
        llama.generate(**ROW, max_new_tokens=8, assistant=SelfSpec(DraftSource()))


@dataclass(frozen=True)
class Lossy(Recited):
    lossless = False


def test_what_has_no_effect_or_changes_the_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"SelfSpec\(stop=FixedLength.*no effect here: Recited drafts what"):
        SelfSpec(Recited((3, 4)), FixedLength(3))
    with pytest.raises(SettingError, match=r"Cascade\(sources\) cannot hold Lossy.*lossless"):
        Cascade([Lookup(), Lossy((3, 4))])
    for sources, error in (
        ([Recited((3, 4))], SettingError),
        ([Lookup(), Lookup(5)], SettingError),
        ([Lookup(), Recalled(), Recalled()], SettingError),
        ([Lookup(), Cascade([Lookup()])], SettingError),
        ([Lookup(), LastSeen()], SettingTypeError),
        ([], SettingTypeError),
        (None, SettingTypeError),
        (Lookup(), SettingTypeError),
    ):
        with pytest.raises(error, match=r"Cascade\(sources\)"):
            Cascade(sources)
