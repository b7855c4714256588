"""What tests share: models, one thread, few collections of garbage, and that the machine's speed decides nothing."""

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

from helpers.calls import counted, new_spec
from helpers.machine import Machine
from helpers.models import character_tokenizer, tiny_llama
from hf_selfspec import SelfSpec, errors
from hf_selfspec.learned.knowledge import Knowledge


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow what ``every_run`` does not name among a test's parameters."""
    for item in items:
        if (marker := item.get_closest_marker("every_run")) is not None:
            ids = item.nodeid.removesuffix("]").partition("[")[2]
            if re.fullmatch(marker.args[0], ids) is None:
                item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_rare_collections() -> Iterator[None]:
    """Tests spent an eighth of their time in collections of garbage."""
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)
    yield
    gc.unfreeze()  # libraries report what is left at the end


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Those that each training asks for do not look through what other tests have left: 2 s a test, late in a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """What decides by time is given, see :class:`Machine`; in tests marked ``times_decide`` rounds are timed."""
    with pytest.MonkeyPatch.context() as patch:  # which `monkeypatch.undo` of a test leaves alone
        found = Machine(patch)
        patch.setattr(Knowledge, "add_call", counted)
        if request.node.get_closest_marker("attached") is None:
            found.code_of_tests_is_seen(request.module.__name__.partition(".")[0])
        if request.node.get_closest_marker("times_decide") is None:
            found.rounds_are_not_timed()
        for name in [name for marker in request.node.iter_markers("machine") for name in marker.args]:
            getattr(found, name)()
        yield found


@pytest.fixture
def no_grad() -> Iterator[None]:
    """For files whose tests call the model's forward by hand."""
    with torch.no_grad():
        yield


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
def no_warnings_yet() -> Iterator[None]:
    """Makes warnings that are issued once come again, whatever earlier tests have seen."""
    before = errors.issued.copy()
    errors.issued.clear()
    yield
    errors.issued.update(before)
