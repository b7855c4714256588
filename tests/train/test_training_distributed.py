"""Two processes train as one does on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.distributed_training import CASES, WRAPPERS, tiny, trainer, weights
from helpers.processes import in_two_processes
from helpers.train.by_hand import ByHand, assert_close, assert_equal, history, rotational_shares, stays

Results = dict[tuple[str, str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two processes found, by wrapper, case and rank; both wrappers in one launch, for its start takes longest."""
    folder = tmp_path_factory.mktemp("distributed")
    done = in_two_processes("distributed_training.py", folder)
    found = {
        (wrapper, case, rank): torch.load(path)
        for wrapper in WRAPPERS
        for case in CASES
        for rank in (0, 1)
        if (path := folder / f"{wrapper}-{case}-{rank}.pt").exists()
    }
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("exits")])
def test_early_exit_loss(results: Results, tmp_path: Path, wrapper: str, case: str) -> None:
    """Weights and logs of one process with batches twice as large."""
    callbacks, options = CASES[case]
    expected = trainer(tiny(), callbacks(), tmp_path, **({"per_device_train_batch_size": 4} | options))
    expected.train()
    for rank in (0, 1):
        found = results[wrapper, case, rank]
        assert found["kind"] == {"ddp": "DistributedDataParallel", "fsdp": "FSDPLlamaForCausalLM"}[wrapper]
        assert_close(found["weights"], weights(expected.model))
        assert found["attributes"] == []
        logs = [entry["loss"] for entry in found["logs"]]
        assert logs == pytest.approx(history(expected), rel=1e-5)
        for key in ("loss/exit_2", "loss/exit_3", "loss/exit_4"):
            values = [entry[key] for entry in found["logs"] if key in entry]
            assert values == pytest.approx(history(expected, key), rel=1e-5)
            assert values


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("exits")])
def test_layer_dropout(results: Results, wrapper: str, case: str) -> None:
    """Both ranks drop the same of their two rows, also all of them; the weights are those of a training by hand."""
    shares = rotational_shares if "both" in case else lambda step: {4: 1.0}
    expected = ByHand(tiny(), shares, p_max=0.9, copies=2)
    kept = [stays(step, 2, 0.9).sum(0).tolist() for step in range(3)]
    assert any(0 in counts for counts in kept)
    for rank in (0, 1):
        found = results[wrapper, case, rank]
        if "checkpointed" not in case:  # where layers run twice
            assert found["rows"] == kept
        assert_close(found["weights"], expected.weights)
        assert found["attributes"] == []
    one, other = (results[wrapper, case, rank] for rank in (0, 1))
    assert one["rows"] == other["rows"]
    assert_equal(one["weights"], other["weights"])
