"""What a round makes the host of a GPU wait for, counted on a device in pure Python, where all drafts run, too."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM

from helpers.distributed import rows, tiny
from helpers.models import ROW
from helpers.processes import TESTS, python
from helpers.train.by_hand import stacked
from hf_selfspec import EarlyExit, EarlyExitLoss, FixedLength, LayerDropout, Rotational, SelfSpec
from hf_selfspec.generate import decoder
from hf_selfspec.model import transfer
from hf_selfspec.train import layer_dropout, loss_scale, training

# (spec, call, rows), and what a draft step and the rest of a round may transfer at most: reads and uploads.
BOUNDS: dict[tuple[str, str, int], tuple[int, int]] = {
    ("fixed", "greedy", 1): (0, 2),
    ("fixed", "eos", 1): (0, 2),
    ("rule", "eos", 4): (0, 3),
    ("unsure", "greedy", 1): (0, 2),
    ("probe", "greedy", 1): (0, 2),
    ("adaptive", "drawn", 4): (0, 2),
    ("kangaroo", "greedy", 1): (0, 2),
    ("tree", "greedy", 4): (0, 4),
    ("tree", "drawn", 4): (0, 5),
    ("skips", "greedy", 1): (0, 2),
    ("lookup", "streamed", 1): (0, 4),
    ("lookup", "repetition", 4): (0, 5),  # with the paths of all nodes
    ("lookup", "grammar", 4): (0, 5),  # with the masks of all nodes
    ("block", "drawn", 4): (0, 4),
    ("block beside", "drawn", 4): (0, 5),  # which is cut
    ("mtp", "eos", 4): (0, 8),
    ("peagle", "eos", 4): (0, 8),
}
# Whatever they need, they run there; spread over two devices, too, and where grammars must not be asked after an end.
FEW = [("tree", "greedy", 3, "two devices"), ("window", "eos", 3), ("fixed", "ending", 1), ("lookup", "ending", 1)]
DRAFTS = (
    "fixed", "rule", "tree", "skips", "lookup", "default", "layerskip", "swift", "search", "adapter", "probe",
    "heads", "reduced", "cascade", "block", "peagle", "window", "block beside",
)  # fmt: skip

# Some of what is captured; all of it together is `slow`.
WARM = [
    ("skips", "graphs llama", 3),
    ("fixed", "graphs falcon_h1", 1),
    ("lookup", "graphs mamba2", 1),
    ("block dflash window", "graphs llama", 3),  # whose block is one graph
    ("block dflash2 window", "graphs llama", 2),
    ("default", "graphs llama", 1, False, 1),
    ("default", "graphs llama", 8),
    ("quantized", "graphs llama", 1, False, 0, "bfloat16", 1),  # both the drafts and what verifies them
    ("adaspeed", "graphs llama", 3),
]
# What a round launches beside replays at most: what the host knows goes to the device in one copy, what it reads comes
# in another, accepted tokens of a tree move, and now and then a graph is new.
LAUNCHES = {("default", "graphs llama", 1, False, 1): 12, ("default", "graphs llama", 8): 20}
RECURRENT = ("qwen3_next", "falcon_h1", "bamba", "mamba2")  # of single rows
ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral", *RECURRENT)
# Each replay is compared, in five calls of other texts and lengths.
COMPARED = [("default", "graphs llama", 3, True), ("fixed", "graphs llama", 1, True, 0, "bfloat16", 1)]
THREADS = ("fixed", "graphs llama", 1, False, 4)
EAGER = ("lookup", "graphs bloom", 3)
# Kernels of four layers and of the rest of a forward, at most. Of torch's own Llama has 4 * 36 + 27.
KERNELS = {"llama": 4 * 18 + 60, "qwen3": 4 * 20 + 60, "gemma3_text": 4 * 22 + 60}
WRONG, LATE = ("default", "wrong llama", 1, False, 1), ("fixed", "late llama", 3)


def measured(*cases: tuple[Any, ...]) -> dict[tuple[Any, ...], Any]:
    told = python(TESTS / "helpers" / "run_on_pretended_cuda.py", json.dumps(cases)).stdout.splitlines()[-1]
    return dict(zip(cases, json.loads(told), strict=True))


@pytest.fixture(scope="module")
def measures() -> dict[tuple[Any, ...], Any]:
    """A process runs all cases."""
    return measured(*BOUNDS, *FEW, *WARM, *COMPARED, WRONG, LATE, THREADS, EAGER)


def test_what_a_round_needs(measures: dict[tuple[Any, ...], Any]) -> None:
    """Nothing mixes tensors of two devices, and ids are plain's."""
    for case in measures:
        assert measures[case]["same"], case
    for case in BOUNDS:
        found, (_, call, rows), (step, rest) = measures[case], case, BOUNDS[case]
        assert not found["plans"], case  # of cuDNN, which would make one for each length of the text
        # Rows that end leave the forwards, which takes two further uploads, now and then.
        few = 0.0 if rows == 1 else 4 * rows / found["rounds"]
        assert found["transfers"] <= step * found["steps"] + rest + few, case
        if call != "grammar":  # whose tokens are found on the host
            # What judges, what ends drafts and what free drafts learn from is there at once, and a streamer gets what
            # the host knows already.
            assert found["waits"] == 1, case
    assert measures["unsure", "greedy", 1]["steps"] < 2.5 < measures["rule", "eos", 4]["steps"]


def check_warm(case: tuple[Any, ...], found: dict[str, Any]) -> None:
    assert found["same"], case
    assert not found["warnings"], (case, found)
    assert not found["blocking"], (case, found)
    assert found["waits"] <= 1.05 + 2 / found["rounds"], (case, found)  # what a call reads once
    assert found["replays"] > 0.5, (case, found)
    assert found["first"] <= 3, (case, found)
    assert found["launches"] <= LAUNCHES.get(case, 130), (case, found)
    assert found["kernels"] <= KERNELS.get(case[1].split()[1], 1000), (case, found)


def test_forwards_are_captured_by_default(measures: dict[tuple[Any, ...], Any]) -> None:
    """When a shape first comes, of which a first call has few; ids are plain's whatever the text and its length, and a
    round waits once."""
    for case in WARM:
        check_warm(case, measures[case])


def test_kernels_that_round_otherwise_are_not_used(measures: dict[tuple[Any, ...], Any]) -> None:
    """Each is compared with the model's own code when a graph is made."""
    assert measures[WRONG]["kernels"] >= 4 * 36


def check_compared(case: tuple[Any, ...], found: dict[str, Any]) -> None:
    assert found["same"], case
    assert found["graphs"], case
    assert not found["warnings"], (case, found)


def test_a_graph_whose_kernels_turn_wrong_is_made_again_without_them(measures: dict[tuple[Any, ...], Any]) -> None:
    assert measures[LATE]["replays"] == 1
    assert ["without fused kernels" in message for message in measures[LATE]["warnings"]] == [True]


def test_replays_are_right_in_later_calls(measures: dict[tuple[Any, ...], Any]) -> None:
    for case in COMPARED:
        check_compared(case, measures[case])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_that_is_captured(name: str) -> None:
    presets = ("default", "lookup", "layerskip", "swift", "fixed", "skips")
    presets = presets[: 5 if name == "mamba2" else 6]  # which has no MLPs to skip
    cases = [(spec, f"graphs {name}", rows) for spec in presets for rows in ((1,) if name in RECURRENT else (1, 3, 8))]
    blocks = [("block dspark gated", "graphs llama", 1, *more) for more in ((), (True,)) if name == "llama"]
    for case, found in measured(*cases, *blocks).items():
        (check_compared if case[3:] else check_warm)(case, found)


def test_threads_have_graphs_of_their_own_and_other_models_none(measures: dict[tuple[Any, ...], Any]) -> None:
    for case in (THREADS, EAGER):
        assert bool(measures[case]["graphs"]) == (case == THREADS), case
        told = ["since it builds masks of its own" in message for message in measures[case]["warnings"]]
        assert told == [True] * (case == EAGER), case


class Transfers(TorchFunctionMode):
    """Counts what a GPU's host would wait for, and what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.uploads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        chosen = args[1:] if name in ("__getitem__", "__setitem__") else ()
        self.reads += name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "masked_select")
        self.reads += any(isinstance(value, torch.Tensor) and value.dtype is torch.bool for value in chosen)
        self.uploads += name in ("tensor", "as_tensor")
        return func(*args, **kwargs or {})


def test_what_a_step_of_a_training_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the number of targets; the rows that layers drop go to the device together."""
    sent = Mock(side_effect=transfer.upload)
    monkeypatch.setattr(layer_dropout, "upload", sent)

    def transfers_with(*callbacks: Any) -> tuple[int, int]:
        model, batch = tiny().train(), stacked(rows(4))
        sent.reset_mock()
        with training(model, callbacks, steps=1, seed=5) as loop, loop.step(), Transfers() as found:
            model(**batch, num_items_in_batch=torch.tensor(30), use_cache=False).loss.backward()
        return found.reads, found.uploads + sent.call_count

    reads, uploads = transfers_with(EarlyExitLoss(0.0))  # of the last layer alone, as without callbacks
    assert transfers_with(EarlyExitLoss(1.0, Rotational(1), scale=loss_scale)) == (reads + 1, uploads)
    assert transfers_with(LayerDropout(0.9)) == (reads, uploads + 1)


def test_phases_take_the_time_of_the_device(fresh_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes it a second, however long the host needs to hand it over."""
    done, events = list[Any](), list[Any]()
    monkeypatch.setattr(transfer, "TIMED", ("cpu",))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Mock, current_stream=str))
    monkeypatch.setattr(Mock, "record", lambda event, _: events.append(setattr(event, "at", len(done))), raising=False)
    monkeypatch.setattr(Mock, "elapsed_time", lambda event, later: 1e3 * (later.at - event.at), raising=False)
    for layer in fresh_llama.model.layers:
        layer.mlp.register_forward_hook(lambda *_: done.append(0))
    spec = SelfSpec(EarlyExit(2), FixedLength(3))
    fresh_llama.generate(**ROW, max_new_tokens=5, assistant=spec)  # which checks the hooks
    done.clear()
    fresh_llama.generate(**ROW, max_new_tokens=24, assistant=spec)
    stats = spec.stats
    assert stats is not None
    assert stats.draft_seconds == 2 * stats.draft_steps > 20
    assert stats.prefill_seconds == 6
    assert stats.verify_seconds == len(done) - 6 - stats.draft_seconds > 4 * stats.rounds
    # Events take the host's time, so few rounds have them, and those between are taken to be like the last of these.
    monkeypatch.setattr(decoder, "TIMED", ("cpu",))
    events.clear()
    fresh_llama.generate(**ROW, max_new_tokens=80, eos_token_id=None, assistant=spec)
    assert spec.stats is not None
    timed = [number for number in range(spec.stats.rounds) if number < 4 or number % decoder.TIMED_ROUNDS == 0]
    assert len(events) == 2 + 4 * len(timed) < 2 * spec.stats.rounds
    assert spec.stats.draft_seconds > 0 < spec.stats.verify_seconds


@pytest.mark.slow
def test_all_drafts_run_on_a_device() -> None:
    calls = (("greedy", 1), ("greedy", 3), ("drawn", 1), ("drawn", 3), ("penalty", 3))
    cases = [(kind, *call, *two) for kind in DRAFTS for call in calls for two in ((), ("two devices",))]
    for case, found in measured(*cases).items():
        assert found["same"], case
