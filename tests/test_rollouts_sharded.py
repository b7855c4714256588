"""Generation during training with sharded weights: as many forwards on every process, and plain generate's ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import in_two_processes, ragged_batch, tiny_llama
from distributed_rollouts import CALLS, OPTIONS, train_once
from transformers import LlamaForCausalLM

from hf_selfspec import Cascade, EarlyExit, Lookup, SelfSpec, UnsupportedOptionError
from hf_selfspec import call as one_call


def test_rollouts_of_sharded_weights(tmp_path: Path) -> None:
    model = tiny_llama(layers=4, factor=0.5)
    model.save_pretrained(tmp_path / "model")
    done = in_two_processes("distributed_rollouts.py", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for moment in ("before", "after"):
        for (lengths, new), of_rank in zip(CALLS, found, strict=True):
            plain = model.generate(**ragged_batch(lengths), **OPTIONS, max_new_tokens=new).tolist()
            assert [of_rank[f"{name}, {moment}"][0] for name in ("lookup", "default", "mixed")] == [plain] * 3
        train_once(model)
    assert any(of_rank[f"lookup, {moment}"][1] for of_rank in found for moment in ("before", "after"))


def test_a_finished_process_runs_along(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks as often as it runs a forward, and once more."""
    asked: list[bool] = []

    def others(device: torch.device) -> object:
        def ask(is_unfinished: bool) -> bool:
            asked.append(is_unfinished)
            return len(asked) < 30

        return ask

    monkeypatch.setattr(one_call, "_others_are_unfinished", others)
    forwards: list[int] = []
    handle = llama.register_forward_pre_hook(lambda module, args, kwargs: forwards.append(1), with_kwargs=True)
    spec = SelfSpec.lookup()
    options = {**ragged_batch((9,)), "max_new_tokens": 12, "do_sample": False}
    try:
        ids = llama.generate(**options, synced_gpus=True, assistant=spec)
    finally:
        handle.remove()
    assert torch.equal(ids, llama.generate(**options))
    assert len(asked) == 30
    assert len(forwards) == 29  # the prefill, and one after each question but for the first and the last
    assert asked == [True] * asked.count(True) + [False] * asked.count(False)
    assert asked.count(False) > 10


def test_only_drafts_without_forwards(llama: LlamaForCausalLM) -> None:
    options = {**ragged_batch((9,)), "max_new_tokens": 12, "do_sample": False, "synced_gpus": True}
    with pytest.raises(UnsupportedOptionError, match=r"synced_gpus .* EarlyExit\(.*SelfSpec\.lookup\(\)"):
        llama.generate(**options, assistant=SelfSpec(EarlyExit(2)))
    spec = SelfSpec(Cascade([Lookup(), EarlyExit(2)]))
    with pytest.warns(UserWarning, match=r"EarlyExit.* is left out"), pytest.raises(ValueError, match="process group"):
        llama.generate(**options, assistant=spec)
