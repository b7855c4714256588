"""What a round makes the host of a GPU wait for, counted on a device in pure Python, where all drafts run, too."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.models import ROW
from helpers.processes import TESTS, python
from hf_selfspec import EarlyExit, FixedLength, SelfSpec
from hf_selfspec.model import transfer

# (spec, call, rows), and what a draft step and the rest of a round may transfer at most: reads and uploads.
BOUNDS: dict[tuple[str, str, int], tuple[int, int]] = {
    ("fixed", "greedy", 1): (0, 2),
    ("fixed", "drawn", 4): (0, 2),
    ("fixed", "eos", 1): (1, 2),
    ("fixed", "streamed", 4): (0, 2),
    ("rule", "greedy", 1): (1, 2),
    ("rule", "eos", 4): (1, 2),
    ("adaptive", "eos", 1): (1, 2),
    ("adaptive", "drawn", 4): (1, 3),  # with the thresholds of all rows
    ("tree", "greedy", 4): (2, 4),
    ("skips", "greedy", 1): (0, 2),
    ("lookup", "drawn", 4): (0, 4),
    ("lookup", "streamed", 1): (0, 4),
}
# Whatever they need, they run there; spread over two devices, too.
FEW = [(spec, "greedy", 3, "two devices") for spec in ("tree", "skips", "adapter")] + [
    ("layerskip", "greedy", 3),
    ("cascade", "drawn", 3),
    ("closest", "greedy", 1),
    ("rule", "penalty", 3),
]
DRAFTS = (
    "fixed", "rule", "tree", "skips", "lookup", "default", "layerskip", "swift", "closest", "adapter", "lora", "probe",
    "heads", "reduced", "cascade",
)  # fmt: skip


def measured(script: str, *cases: tuple[Any, ...]) -> Any:
    return json.loads(python(TESTS / "helpers" / script, json.dumps(cases)).stdout.splitlines()[-1])


def test_what_a_round_needs() -> None:
    """One test, so that one process runs them all. Nothing mixes tensors of two devices, and greedy ids are plain's."""
    cases = [*BOUNDS, *FEW]
    measures = dict(zip(cases, measured("run_on_pretended_cuda.py", *cases), strict=True))
    for case, found in measures.items():
        assert found["same"], case
    for case, (step, rest) in BOUNDS.items():
        found, (spec, call, rows) = measures[case], case
        # Rows that end leave the forwards, which takes two further uploads, now and then.
        few = 0.0 if rows == 1 else 4 * rows / found["rounds"]
        assert found["transfers"] <= step * found["steps"] + rest + few, case
        if spec in ("fixed", "lookup") and call in ("greedy", "streamed"):
            # What judges and what free drafts learn from is one read, and a streamer gets what the host knows already.
            assert found["waits"] == 1, case
        if call == "greedy":
            # All layers of a forward give attention the same shapes, so that a kernel makes one plan. What was drafted
            # last goes through the exact prefix in a forward of its own.
            assert found["attention keys"] <= found["steps"] + (1 if spec == "lookup" else 2) + 1e-9, case
        if rows == 1 and spec in ("fixed", "rule", "adaptive") and call in ("greedy", "eos"):
            assert found["launches a step"] <= 22, case
            assert found["launches a round"] <= 45, case


def test_forwards_are_captured_by_default() -> None:
    """Once shapes have come again; ids are plain's whatever the text, its length, and what fails in captures."""
    warm = [
        *((spec, "graphs llama", rows, "") for spec in ("fixed", "skips", "lookup", "default") for rows in (1, 3)),
        *(("fixed", f"graphs {name}", 3, "") for name in ("gemma3_text", "gpt_oss", "mixtral")),
    ]
    failing = [("tree", "graphs llama", 1, failure) for failure in ("begin", "memory", "replay", "other results")]
    eager = [("lookup", f"graphs {name}", 3, "") for name in ("qwen3_next", "bloom")]
    measures = measured("run_on_pretended_cuda.py", *warm, *failing, *eager)
    for case, found in zip([*warm, *failing, *eager], measures, strict=True):
        assert found["same"], case
        assert bool(found["graphs"]) is (case in warm), case
    for case, found in zip(warm, measures, strict=False):
        if case[0] in ("fixed", "skips"):
            assert found["replays"] > 0.5, (case, found)


def test_what_a_step_of_a_training_needs() -> None:
    """A read of the number of targets, before the layers run; the rows that layers drop go to the device together."""
    found = measured("train/train_on_pretended_cuda.py")
    assert all(case["loss"] == pytest.approx(case["expected"], rel=1e-5) for case in found.values())
    plain = found["plain"]
    more = {name: (case["reads"] - plain["reads"], case["uploads"] - plain["uploads"]) for name, case in found.items()}
    assert more == {"plain": (0, 0), "distilled": (1, 0), "last exit alone": (0, 0), "dropout": (0, 1)}


class Event:
    """An event of a device that takes a second for each layer, however long the host needs to hand it over."""

    layers = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at, self.is_done = 0, not enable_timing

    def record(self, stream: str) -> None:
        self.at = Event.layers

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, later: Event) -> float:
        assert later.is_done, "CUDA raises where the work is not done"
        return 1e3 * (later.at - self.at)


def test_phases_take_the_time_of_the_device(fresh_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Event=Event, current_stream=lambda device: "a stream")
    monkeypatch.setattr(transfer, "TIMED", ("cpu",))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for layer in fresh_llama.model.layers:
        layer.mlp.register_forward_hook(lambda *_: setattr(Event, "layers", Event.layers + 1))
    spec = SelfSpec(EarlyExit(2), FixedLength(3))
    fresh_llama.generate(**ROW, max_new_tokens=5, assistant=spec)  # which checks the hooks
    Event.layers = 0
    fresh_llama.generate(**ROW, max_new_tokens=24, assistant=spec)
    stats = spec.stats
    assert stats is not None
    assert stats.draft_seconds == 2 * stats.draft_steps > 20
    assert stats.prefill_seconds == 6
    assert stats.verify_seconds == Event.layers - 6 - stats.draft_seconds > 4 * stats.rounds


@pytest.mark.slow
def test_all_drafts_run_on_a_device() -> None:
    calls = (("greedy", 1), ("greedy", 3), ("drawn", 1), ("drawn", 3))
    cases = [(kind, *call, *two) for kind in DRAFTS for call in calls for two in ((), ("two devices",))]
    for case, found in zip(cases, measured("run_on_pretended_cuda.py", *cases), strict=True):
        assert found["same"], case
