"""Tiny trainings with the stock Trainer; and as a script, by name, what ``torchrun`` starts in several processes."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from helpers.fitted import EXIT, arguments
from helpers.fitted import rows as rows_to_fit
from helpers.models import SPECIAL_TOKENS, character_tokenizer, ragged_batch, tiny_llama
from hf_selfspec import (
    ConfidenceThreshold,
    EarlyExitLoss,
    FixedLength,
    LayerDropout,
    Rotational,
    SelfSpec,
    TopKTree,
    fit_adapter,
    fit_exit_heads,
    fit_mtp,
    fit_probe,
    tune,
)
from hf_selfspec.drafts import EarlyExit, SkipLayers
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.model import target
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.modules.reduced_head import ReducedHead
from hf_selfspec.train import loss_scale

VOCABULARY, WIDTH, LAYERS = 61, 10, 4
Row = dict[str, torch.Tensor]

# The name that transformers 5.23 has for it, if this transformers knows it.
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)


def tiny(
    layers: int = LAYERS, tied: bool = False, seed: int = 0, kind: type[LlamaForCausalLM] = LlamaForCausalLM
) -> Any:
    """A Llama with more heads than layers, all of whose layers and exits say different things."""
    torch.manual_seed(seed)
    return kind(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.3,
            tie_word_embeddings=tied,
            **SPECIAL_TOKENS,
        )
    )


@contextmanager
def rows_put_back(layers: Iterable[torch.nn.Module], kept: np.ndarray) -> Iterator[None]:
    """Layers run on all rows, and the rows that they drop get their inputs back."""
    handles = []
    for index, layer in enumerate(layers):

        def hook(
            module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any, rows: np.ndarray = kept[:, index]
        ) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            mixed = torch.where(torch.from_numpy(rows)[:, None, None], after, before)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        # Before the hooks with which transformers collects hidden states.
        handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows(count: int, seed: int = 0) -> list[Row]:
    """Samples with 0 to 8 labels that are ignored, so that their numbers of targets differ."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(2, VOCABULARY, (WIDTH,), generator=generator)
        labels = ids.clone()
        labels[: index * 5 % 9] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def trainer(
    model: Any, callbacks: Sequence[TrainerCallback], folder: Path, data: Any = None, settings: Any = (), **options: Any
) -> Trainer:
    """A stock Trainer on the CPU: plain gradient descent on rows in their order, logging each step.

    Args:
        settings: other arguments of ``Trainer``.
        options: arguments of ``TrainingArguments``.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(**(defaults | options))
    if args.fsdp:
        # Accelerate shards where there are accelerators: it takes the processes for such, and shards on the CPU.
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return Trainer(
        model=model,
        args=args,
        train_dataset=rows(16) if data is None else data,
        callbacks=list(callbacks),
        **dict(settings),
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def rows_seen(model: Any) -> list[list[int]]:
    """For each forward from now on the rows that the MLP of each layer runs on."""
    found: list[list[int]] = []
    layers = model.model.layers
    model.register_forward_pre_hook(lambda *_: found.append([0] * len(layers)))
    for index, layer in enumerate(layers):

        def count(module: Any, args: tuple[torch.Tensor, ...], index: int = index) -> None:
            found[-1][index] += args[0].shape[0]

        layer.mlp.register_forward_pre_hook(count)
    return found


def exits(every: int = 2) -> EarlyExitLoss:
    """LayerSkip's loss."""
    return EarlyExitLoss(1.0, Rotational(every), scale=loss_scale)


# What several processes do, and one does for comparison: callbacks, and arguments of TrainingArguments.
CASES: dict[str, tuple[Callable[[], list[TrainerCallback]], dict[str, Any]]] = {
    "exits": (lambda: [exits()], {}),
    "exits, accumulated": (lambda: [exits()], {"gradient_accumulation_steps": 2}),
    "exits, checkpointed": (lambda: [exits()], {CHECKPOINTING: True}),
    "dropout": (lambda: [LayerDropout(0.9)], {}),
    "both, checkpointed": (lambda: [LayerDropout(0.9), exits()], {CHECKPOINTING: True}),
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    },
}


def trainings(folder: Path) -> None:
    """Each case with each wrapper; leaves what was found in a file for each rank."""
    for (wrapper, of_wrapper), (case, (callbacks, options)) in product(WRAPPERS.items(), CASES.items()):
        seen = rows_seen(model := tiny())
        with patch.dict(os.environ):  # in which TrainingArguments leave settings for accelerate
            options = {"per_device_train_batch_size": 2} | options | of_wrapper
            run = trainer(model, callbacks(), folder / "run", **options)
            assert run.args.world_size == 2
            run.train()
            found = {
                name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
                for name, value in run.accelerator.unwrap_model(run.model).named_parameters()
            }
        changed = {"forward", "_loss_function"} & set().union(*map(vars, run.model.modules()))
        result = {"weights": found, "kind": type(run.model_wrapped).__name__, "rows": seen, "changed": changed}
        result["logs"] = [entry for entry in run.state.log_history if "loss" in entry]
        torch.save(result, folder / f"{wrapper}-{case}-{run.args.process_index}.pt")
    torch.distributed.destroy_process_group()


def fit_all(args: TrainingArguments, folder: Path | None = None) -> dict[str, DraftModule]:
    """An adapter, heads, a probe and an MTP head, fitted to the same model."""
    model, tokenizer = tiny_llama(factor=2.0), character_tokenizer()
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adapter": (fit_adapter, {"exit_layer": EXIT}),
        "heads": (fit_exit_heads, {"layers": [2, 4]}),
        "probe": (fit_probe, {"exit_layer": EXIT}),
        "mtp": (fit_mtp, {"steps": 2}),
    }
    found: dict[str, DraftModule] = {}
    for name, (fit, options) in kinds.items():
        out = None if folder is None else folder / name
        found[name] = fit(model, tokenizer, rows_to_fit(43), block_size=32, args=args, output_dir=out, **options)
    return found


def fits(folder: Path) -> None:
    """Rank 0 keeps what was fitted, every rank its weights."""
    args = arguments(folder / "trash", per_device_train_batch_size=4, max_steps=5, learning_rate=1e-2, seed=3)
    weights = {name: part.state_dict() for name, part in fit_all(args, folder).items()}
    torch.save(weights, folder / f"{args.process_index}.pt")


OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
# For each process the prompts and how many tokens follow: one process has to wait for the other.
CALLS = (((9,), 40), ((5, 12), 12))


def train_once(model: torch.nn.Module) -> None:
    """One step of plain gradient descent."""
    model.train()
    ids = ragged_batch((16,), seed=7)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    model.eval()


def rollouts(folder: Path) -> None:
    """Notes ids before and after a training step, how much was accepted, and plain generation beside drafts."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lengths, new = CALLS[rank]
    call: dict[str, Any] = {**ragged_batch(lengths), **OPTIONS, "max_new_tokens": new, "synced_gpus": True}
    # One row ends early, and its last token takes a forward of its own.
    uneven = {"eos_token_id": list(range(40, 60)), "return_dict_in_generate": True}
    found: dict[str, Any] = {}
    specs = {"lookup": SelfSpec.lookup(), "default": SelfSpec()}
    for moment in ("before", "after"):
        for name, spec, options in (
            ("lookup", specs["lookup"], {}),
            ("default", specs["default"], {}),
            ("uneven", specs["lookup"], uneven),  # from what the call before has written
            ("mixed", specs["lookup"] if rank else None, {}),  # one process with drafts, the other without
        ):
            ids = model.generate(**call | options, assistant=spec)
            found[f"{name}, {moment}"] = [getattr(ids, "sequences", ids).tolist(), spec.stats.accepted if spec else 0]
        train_once(model)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


DRAWN: dict[str, Any] = {"max_new_tokens": 30, "pad_token_id": 0}
SPECS = {
    "exit": lambda: SelfSpec(EarlyExit(2), FixedLength(3)),
    "confidence": lambda: SelfSpec(EarlyExit(2), ConfidenceThreshold(0.3)),
    "tree": lambda: SelfSpec(EarlyExit(2), FixedLength(3), TopKTree(((0.6, 2), (1.0, 1)))),
    "skips": lambda: SelfSpec(SkipLayers([1], [2]), FixedLength(3)),
    "lookup": SelfSpec.lookup,
    "default": SelfSpec,
}


def tensor_parallel(folder: Path) -> None:
    """Notes for each spec, decoding mode and call the ids and how much was drafted."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    if rank := torch.distributed.get_rank():
        # The clock of one process runs differently; nothing must follow from that.
        target.perf_counter = lambda: 5.0 * time.perf_counter()
    found: dict[str, Any] = {}

    def noted(spec: SelfSpec, seed: int, rows: tuple[int, ...] = (9,), **options: Any) -> list[Any]:
        torch.manual_seed(seed)
        ids = model.generate(**ragged_batch(rows), **DRAWN | options, assistant=spec).tolist()
        stats = spec.stats
        return [ids, [] if stats is None else [stats.drafted, stats.accepted, stats.plan]]

    for (name, make), do_sample in product(SPECS.items(), (False, True)):
        spec = make()
        found[f"{name}, {do_sample}"] = [noted(spec, 3, rows, do_sample=do_sample) for rows in ((9, 5), (9,))]
    for seed in (4, 5):
        found[f"seed {seed}"] = noted(SPECS["exit"](), seed, do_sample=True)
    for name, call in (
        ("head", lambda: noted(SelfSpec(EarlyExit(2, ReducedHead.of(range(0, 97, 2), 97))), 0)),
        ("layerskip", lambda: noted(SelfSpec.layerskip(), 0)),
        ("swift", lambda: noted(SelfSpec.swift(), 0)),
        ("tune", lambda: tune(model, None, ["a text"])),
    ):
        try:
            call()
        except UnsupportedModelError as error:
            found[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainings": trainings, "fits": fits, "rollouts": rollouts, "tensor_parallel": tensor_parallel}[sys.argv[1]](
        Path(sys.argv[2])
    )
