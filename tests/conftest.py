"""Models for tests: tiny, built from configs, with layers that matter less the deeper they are."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For processes that tests start: threads of several workers wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import slow
import torch
from findings import FirstDraft
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.generation.streamers import BaseStreamer

import hf_selfspec
from hf_selfspec import EarlyExit, FixedLength, GenerationStats, SelfSpec, errors
from hf_selfspec.control import arms as control
from hf_selfspec.control.arms import ArmStats
from hf_selfspec.control.costs import CostCurve
from hf_selfspec.draft import probe
from hf_selfspec.draft.partial import PartialDraft
from hf_selfspec.draft.probe import ProbingDraft
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model import graphs
from hf_selfspec.model.graphs import Graph
from hf_selfspec.search.costs import ForwardCosts, Stopwatch
from hf_selfspec.search.exit_study import ExitStudy

VOCABULARY = 97

# PEFT reads an attribute of transformers' models that has a new name there.
peft_calls_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def probes_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes look at all exits at once, so that what they find does not depend on how fast the machine is."""
    monkeypatch.setattr(probe, "_BUDGET", 1.0)
    monkeypatch.setattr(probe, "_PROMISING", 1.0)
    monkeypatch.setattr(ExitStudy, "is_promising", True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    some = any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob", "deselect", "keyword"))
    slow.mark(items, is_whole=config.args == config.getini("testpaths") and not some)


def library(name: str) -> Any:
    """A library of the test extras; a test that needs it is skipped where it is not installed."""
    return pytest.importorskip(name, reason=f"{name} is a test extra that not all platforms have")


def damp(model: PreTrainedModel, layers: torch.nn.ModuleList, start: int, factor: float) -> None:
    """Makes the layers from ``start`` on contribute less, so that drafts are sometimes right."""
    with torch.no_grad():
        for layer in list(layers)[start:]:
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(factor)


def tiny_llama(layers: int = 6, seed: int = 0, vocabulary: int = VOCABULARY, factor: float = 0.3) -> LlamaForCausalLM:
    """A Llama with grouped queries whose upper half is damped; no end-of-text token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    damp(model, model.model.layers, layers // 2, factor)
    return model


def tiny_gpt2(positions: int = 32) -> GPT2LMHeadModel:
    """A GPT-2 with this many learned positions, upper half damped; no end-of-text token."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=6,
        n_head=4,
        n_positions=positions,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    damp(model, model.transformer.h, 3, 0.5)
    return model


def ragged_batch(
    lengths: tuple[int, ...] = (4, 9, 6), vocabulary: int = VOCABULARY, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


ROW, BATCH = ragged_batch((12,), seed=11), ragged_batch()


def new_spec() -> SelfSpec:
    return SelfSpec(EarlyExit(3), FixedLength(4))


def calls(spec: SelfSpec) -> int:
    """Returns how many calls ``spec`` has served, without those that were left to plain generate."""
    return sum(not call.left_to_generate for call in spec._knowledge.calls)


def assert_mixed(spec: SelfSpec) -> None:
    """The drafts of the last call were partly kept and partly rejected."""
    assert spec.stats is not None
    # A search may have found a draft that is always right.
    assert 0 < spec.stats.acceptance_rate < (1.1 if spec.stats.phase else 1)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One character per token."""
    characters = ["<pad>", "<s>", *(chr(token + 30) for token in range(2, VOCABULARY))]
    core = Tokenizer(models.BPE({character: token for token, character in enumerate(characters)}, [], unk_token="<s>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", padding_side="left")


class Recorder(BaseStreamer):
    """Keeps what a streamer receives."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def check_lossless(model: PreTrainedModel, spec: SelfSpec, new_tokens: int = 24) -> list[GenerationStats]:
    """One row and a ragged batch have the ids of plain ``generate``; returns the statistics of both."""
    found = []
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    for inputs in (ragged_batch((12,)), ragged_batch((4, 9, 6))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what some models cannot do is said once
            ids = model.generate(**inputs, **options, assistant=spec)
        assert torch.equal(ids, model.generate(**inputs, **options))
        assert spec.stats is not None
        found.append(spec.stats)
    return found


@pytest.fixture
def no_grad() -> Iterator[None]:
    """For files whose tests call the model's forward by hand."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _rare_collections() -> Iterator[None]:
    """Collections of garbage, which tests spent an eighth of their time in, are rare."""
    usual = gc.get_threshold()
    gc.set_threshold(20_000, 20, 20)
    yield
    gc.set_threshold(*usual)
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Those that each training asks for do not look through what other tests have left: 2 s a test, late in a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """The model that most tests decode and leave as it is: text without loops, drafts that are partly rejected."""
    return tiny_llama(factor=0.5)


@pytest.fixture
def fresh_llama() -> LlamaForCausalLM:
    """The same model for one test alone, which may change it."""
    return tiny_llama(factor=0.5)


@pytest.fixture
def spec() -> SelfSpec:
    return new_spec()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes warnings that are issued once come again, whatever earlier tests have seen."""
    monkeypatch.setattr(errors, "_warned", set())


def in_two_processes(script: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script (of this folder, unless the path is whole) with these arguments, as torchrun does."""
    here = Path(__file__).parent
    paths = (str(Path(hf_selfspec.__file__).parents[1]), str(here), os.environ.get("PYTHONPATH", ""))
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            here / script,
            *arguments,
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def always_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and taken early, however fast they are here; the choice has tests of its own."""
    monkeypatch.setattr(graphs, "_USES", 2)
    monkeypatch.setattr(Graph, "faster_of", lambda self, count, by_graph, eager: by_graph())


@contextmanager
def interrupted_in(place: Any, name: str) -> Iterator[None]:
    """The user stops what runs inside as soon as it calls this function of a module."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a large model, whatever the machine is doing: another token in a verification costs little."""

    def costs(self: Stopwatch, of: object = min) -> ForwardCosts:
        return ForwardCosts(0.1, 1.0, 1.0, 0.0, 0.01, 0.0, self.early.num_layers)

    monkeypatch.setattr(Stopwatch, "costs", costs)


def only_promises_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sources expect of themselves decides, whatever rounds take on this machine; free drafts never rest."""
    monkeypatch.setattr(control, "ArmStats", lambda *given: ArmStats(1 << 30))
    monkeypatch.setattr(CostCurve, "wants_plain", False)


@pytest.fixture(autouse=True)
def _machine_does_not_decide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what is drafted do not depend on times; those marked ``times_decide`` do."""
    if request.node.get_closest_marker("times_decide") is None:
        only_promises_count(monkeypatch)


@pytest.fixture
def verification_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds cost what they do where memory bounds them, and only promises count."""
    monkeypatch.setattr(control, "CostCurve", lambda on_cpu, rows=1, is_frozen=False: CostCurve(False, is_frozen=True))


@pytest.fixture
def first_draft(monkeypatch: pytest.MonkeyPatch) -> FirstDraft:
    """Filled with what the first call would draft with at its beginning, after its plan was emptied."""
    found = FirstDraft()

    def watch(kind: type[PartialDraft]) -> None:
        original = kind.__init__

        def watched(self: Any, *given: Any) -> None:
            original(self, *given)
            if not found.plan:
                found.plan, found.stop, found.reuse_from = self.plan.picture(), self.limits.stop, self.reuse_from
                found.phase = self.search.phase if isinstance(self, SearchingDraft) else ""

        monkeypatch.setattr(kind, "__init__", watched)

    watch(SearchingDraft)
    watch(ProbingDraft)
    return found
