"""Models for tests: tiny, built from configs, with layers that matter less the deeper they are."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For processes that tests start: threads of several workers wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from helpers.calls import new_spec
from helpers.models import character_tokenizer, tiny_llama
from hf_selfspec import SelfSpec, errors
from hf_selfspec.control import controller as control
from hf_selfspec.control.controller import ArmStats
from hf_selfspec.control.costs import CostCurve
from hf_selfspec.draft import probe
from hf_selfspec.model import graphs
from hf_selfspec.model.graphs import Graph
from hf_selfspec.search.costs import ForwardCosts, Stopwatch
from hf_selfspec.search.exit_study import ExitStudy


@pytest.fixture(autouse=True)
def probes_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes look at all exits at once, so that what they find does not depend on how fast the machine is."""
    monkeypatch.setattr(probe, "_BUDGET", 1.0)
    monkeypatch.setattr(probe, "_PROMISING", 1.0)
    monkeypatch.setattr(ExitStudy, "is_promising", True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow what ``every_run`` does not name among a test's parameters; in a whole run it names some."""
    kept: dict[str, bool] = {}
    for item in items:
        marker = item.get_closest_marker("every_run")
        if marker is None:
            continue
        test, _, ids = item.nodeid.removesuffix("]").partition("[")
        named = re.fullmatch(marker.args[0], ids) is not None
        kept[test] = kept.get(test, False) or named
        if not named:
            item.add_marker("slow")
    if config.args == config.getini("testpaths") and not all(kept.values()):
        raise pytest.UsageError(
            f"every_run names no parameter of {[test for test, found in kept.items() if not found]}"
        )


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
def as_before() -> Iterator[None]:
    """Takes back what commands set for their process."""
    verbosity, bars, threads = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_num_threads()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar() if bars else logging.disable_progress_bar()
    torch.set_num_threads(threads)


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


@pytest.fixture
def always_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and taken early, however fast they are here; the choice has tests of its own."""
    monkeypatch.setattr(graphs, "_USES", 2)
    monkeypatch.setattr(Graph, "faster_of", lambda self, count, by_graph, eager: by_graph())


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
