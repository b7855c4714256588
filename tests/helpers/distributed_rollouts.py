"""Generates with a model whose weights are sharded over the processes that ``torchrun`` starts."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from helpers.models import ragged_batch
from hf_selfspec import SelfSpec

OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
# For each process the prompts and how many tokens follow: one process has to wait for the other.
CALLS = (((9,), 40), ((5, 12), 12))
SPECS = {"lookup": SelfSpec.lookup, "default": SelfSpec}


def train_once(model: torch.nn.Module) -> None:
    """One step of plain gradient descent."""
    model.train()
    ids = ragged_batch((16,), seed=7)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    model.eval()


def main(folder: Path) -> None:
    """Notes ids before and after a training step, how much was accepted, and plain generation beside drafts."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lengths, new = CALLS[rank]
    call: dict[str, Any] = {**ragged_batch(lengths), **OPTIONS, "max_new_tokens": new, "synced_gpus": True}
    found: dict[str, Any] = {}
    specs = {name: make() for name, make in SPECS.items()}
    for moment in ("before", "after"):
        for name, spec in specs.items():
            ids = model.generate(**call, assistant=spec)
            found[f"{name}, {moment}"] = [ids.tolist(), spec.stats.accepted]
        # One row ends early, and its last token takes a forward of its own.
        uneven = call | {"eos_token_id": list(range(40, 60)), "return_dict_in_generate": True}
        ids = model.generate(**uneven, assistant=(spec := specs["lookup"])).sequences
        found[f"uneven, {moment}"] = [ids.tolist(), spec.stats.accepted]  # from what the call before has written
        # One process with drafts, the other without.
        ids = model.generate(**call, **({"assistant": specs["lookup"]} if rank else {}))
        found[f"mixed, {moment}"] = [ids.tolist(), None]
        train_once(model)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
