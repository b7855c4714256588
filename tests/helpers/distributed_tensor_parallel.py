"""Generates with a tensor-parallel model, in processes that ``torchrun`` starts."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import AutoModelForCausalLM

from helpers.models import ragged_batch
from hf_selfspec import (
    ConfidenceThreshold,
    FixedLength,
    OnTheFlySearch,
    SelfSpec,
    TopKTree,
    tune,
)
from hf_selfspec.drafts import EarlyExit, SkipLayers
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.model import module_tools
from hf_selfspec.modules.reduced_head import ReducedHead

OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "pad_token_id": 0}
SPECS = {
    "exit": lambda: SelfSpec(EarlyExit(2), FixedLength(3)),
    "confidence": lambda: SelfSpec(EarlyExit(2), ConfidenceThreshold(0.3)),
    "tree": lambda: SelfSpec(EarlyExit(2), FixedLength(3), TopKTree(((0.6, 2), (1.0, 1)))),
    "skips": lambda: SelfSpec(SkipLayers([1], [2]), FixedLength(3)),
    "lookup": SelfSpec.lookup,
    "default": SelfSpec,
    "swift": lambda: SelfSpec.swift(search=OnTheFlySearch(8, budget=1.0)),
}


def model_forwards(spec: SelfSpec) -> int:
    """How many forwards a call with one prompt has run, besides trials."""
    assert spec.stats is not None
    return 1 + spec.stats.rounds + spec.stats.draft_steps


def main(folder: Path) -> None:
    """Notes for each spec, decoding mode and call the ids and how much was drafted."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    rank = torch.distributed.get_rank()
    if rank:
        # The clock of one process runs differently; whatever follows from timings must not.
        module_tools.perf_counter = lambda: 5.0 * time.perf_counter()
    found: dict[str, Any] = {}
    for name, make in SPECS.items():
        for do_sample in (False, True):
            spec = make()
            torch.manual_seed(3)
            found[f"{name}, {do_sample}"] = [
                [
                    model.generate(**ragged_batch(rows), **OPTIONS, do_sample=do_sample, assistant=spec).tolist(),
                    [spec.stats.drafted, spec.stats.accepted, spec.stats.plan] if spec.stats is not None else [],
                ]
                for rows in ((9, 5), (9,))
            ]
    for seed in (4, 5):
        torch.manual_seed(seed)
        ids = model.generate(**ragged_batch((9,)), **OPTIONS, do_sample=True, assistant=SPECS["exit"]())
        found[f"seed {seed}"] = ids.tolist()
    readings = []
    broadcast = torch.distributed.broadcast
    torch.distributed.broadcast = lambda *given, **named: readings.append(1) or broadcast(*given, **named)
    spec = SPECS["swift"]()
    model.generate(**ragged_batch((9,)), **OPTIONS | {"max_new_tokens": 60}, assistant=spec)
    torch.distributed.broadcast = broadcast
    found["readings"] = [len(readings), model_forwards(spec)]
    head = ReducedHead.of(range(0, 97, 2), 97)
    for name, call in (
        ("head", lambda: model.generate(**ragged_batch((9,)), **OPTIONS, assistant=SelfSpec(EarlyExit(2, head)))),
        ("layerskip", lambda: model.generate(**ragged_batch((9,)), **OPTIONS, assistant=SelfSpec.layerskip())),
        ("tune", lambda: tune(model, None, ["a text"])),
    ):
        try:
            call()
        except UnsupportedModelError as error:
            found[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
