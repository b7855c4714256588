"""Checks that this package computes on a device what transformers computes there, in float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import hf_selfspec

from ...differences import first_differences
from ...draft.early_exit import EarlyExit
from ...draft.skip_layers import SkipLayers
from ...selfspec import SelfSpec
from ...stop.rules import ConfidenceThreshold, FixedLength
from ...train import EarlyExitLoss, LayerDropout
from ...verify.tree import TopKTree
from ..training import TrainingShape, train
from .options import Options
from .record import Piece, Result
from .shapes import SHAPES, DeviceLlama
from .waits import waits_are_errors
from .ways import WAYS, Way, graphs_of

# The factor of the blocks after the exit, with which drafts are sometimes right.
_DAMPING = 0.1
_PROMPT, _NEW = 24, 48
_ROWS = (1, 4)
# Drafts that also wait elsewhere: sampled siblings are tried one after another.
_READ_ELSEWHERE = {"early exit, tree, drawn"}
# The relative tolerance of the loss: two float32 kernels sum in different orders.
_LOSS_TOLERANCE = 1e-5
_LOSS_BATCH = 2
_TESTS = Path(hf_selfspec.__file__).parent.parent / "tests"
# Characters of the tests' output that are kept.
_TOLD = 1500


class CheckError(RuntimeError):
    """Something differs from what transformers computes."""


def _specs(shape: DeviceLlama) -> dict[str, SelfSpec]:
    """A ``SelfSpec`` for each kind of draft."""
    early, three = EarlyExit(shape.exit_layer), FixedLength(3)
    sure = ConfidenceThreshold(4 / shape.vocabulary)  # the confidence of a random model is a few times that of chance
    return {
        "early exit, fixed length": SelfSpec(early, three),
        "early exit, stop rule": SelfSpec(early, sure, max_draft=6),
        "early exit, tree": SelfSpec(early, three, TopKTree()),
        "skip set": SelfSpec(SkipLayers(attention=(shape.layers - 2,), mlp=(shape.exit_layer + 1,)), three),
        "lookup": SelfSpec.lookup(),
    }


def check_pieces(options: Options) -> list[Piece]:
    """Returns all checks."""
    shape = SHAPES[options.check_shape].on(options.device, torch.float32)
    specs = _specs(shape)
    settings = {"shape": options.check_shape, "device": options.device, "dtype": "float32"}

    def pieces(group: str, works: Mapping[str, Callable[[], Result]], unfit: str = "") -> list[Piece]:
        return [
            Piece(group, name, settings, partial(_without_need, work), is_check=True, unfit=unfit)
            for name, work in works.items()
        ]

    def elsewhere(why: str, *fit: str) -> str:
        return "" if options.place.type in fit else why

    waits = {
        f"{name}, {how}": partial(_waits, shape, name, do_sample)
        for name in specs
        for how, do_sample in (("greedy", False), ("drawn", True))
        if f"{name}, {how}" not in _READ_ELSEWHERE
    }
    graphs = {name: partial(_graphs, shape, way) for name, way in WAYS.items() if way.is_compiled}
    loss = {"training, callbacks at zero": partial(_loss, shape)}
    no_tests = "" if _TESTS.is_dir() else "the tests are not beside the package"
    return [
        *pieces("ids", {name: partial(_ids, shape, name) for name in specs}),
        *pieces("waits", dict(sorted(waits.items())), elsewhere("torch reports what waits only on CUDA", "cuda")),
        *pieces("graphs", graphs, elsewhere("there are CUDA graphs only on CUDA", "cuda")),
        *pieces("loss", loss, elsewhere("Trainer does not know the device", "cuda", "cpu")),
        *pieces("tests", {"marked cuda": _marked_tests}, elsewhere("they are for CUDA", "cuda") or no_tests),
    ]


def _without_need(work: Callable[[], Result], _: Result) -> Result:
    return work()


def _batch(shape: DeviceLlama, rows: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator("cpu").manual_seed(1)
    ids = torch.randint(2, shape.vocabulary, (rows, _PROMPT), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(shape.device), "attention_mask": mask.to(shape.device)}


def _written(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return model.generate(**batch, **{"max_new_tokens": _NEW, "do_sample": False, **options})


def _compare(
    model: LlamaForCausalLM, batch: dict[str, torch.Tensor], plain: torch.Tensor, ours: torch.Tensor
) -> list[str]:
    """Returns the near ties at which two texts differ.

    Raises:
        CheckError: they differ elsewhere.
    """
    if plain.tolist() == ours.tolist():
        return []
    found = first_differences(model, plain, ours, batch["attention_mask"])
    wrong = [difference for difference in found if not difference.is_near_tie]
    if wrong:
        raise CheckError(f"ids are not plain generate's: {wrong[0]}")
    return [str(difference) for difference in found]


def _ids(shape: DeviceLlama, name: str) -> Result:
    """Checks greedy ids of one text and of a ragged batch, and returns the acceptance rates."""
    model = shape.damped(_DAMPING)
    result: Result = {"near_ties": [], "acceptance_rates": []}
    for rows in _ROWS:
        spec, batch = _specs(shape)[name], _batch(shape, rows)
        ours = _written(model, batch, assistant=spec)
        result["near_ties"] += _compare(model, batch, _written(model, batch), ours)
        assert spec.stats is not None
        result["acceptance_rates"].append(spec.stats.acceptance_rate if spec.stats.drafted else None)
    return result


def _waits(shape: DeviceLlama, name: str, do_sample: bool) -> Result:
    """Checks that rounds wait only in ``transfer.read``; torch raises where they wait elsewhere."""
    model = shape.damped(_DAMPING)
    with waits_are_errors():
        for rows in _ROWS:
            _written(model, _batch(shape, rows), assistant=_specs(shape)[name], do_sample=do_sample)
    return {}


def _graphs(shape: DeviceLlama, way: Way) -> Result:
    """Checks that a compiled way has graphs, skips none, and generates the ids of plain ``generate``."""
    model, batch, found = shape.damped(_DAMPING), _batch(shape, 1), []
    plain = _written(model, batch)
    graphs = graphs_of(lambda: found.append(_written(model, batch, **way.options(shape.exit_layer))))
    if not graphs.compiled or graphs.skips:
        raise CheckError(f"{graphs.compiled} graphs were compiled, and torch skipped CUDA graphs {graphs.skips} times")
    return {"near_ties": _compare(model, batch, plain, found[0]), "graphs": graphs.compiled}


def _loss(shape: DeviceLlama) -> Result:
    """Checks that callbacks without weight and dropout do not change the loss of a step."""
    tokens = TrainingShape(
        shape.width, shape.layers, shape.intermediate or 0, shape.vocabulary, _LOSS_BATCH, _PROMPT, bf16=False
    )
    plain = train(shape.model(), tokens, list, 1, shape.device).loss
    ours = train(shape.model(), tokens, lambda: [EarlyExitLoss(0.0), LayerDropout(0.0)], 1, shape.device).loss
    if not abs(ours - plain) <= _LOSS_TOLERANCE * abs(plain):
        raise CheckError(f"the loss with callbacks at zero is {ours}, without them {plain}")
    return {"plain": plain, "ours": ours}


def _marked_tests() -> Result:
    """Checks that the tests that need a GPU pass, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", str(_TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_TESTS.parent, check=False)
    if done.returncode:
        raise CheckError(f"pytest returned {done.returncode}: {(done.stdout + done.stderr)[-_TOLD:]}")
    return {"told": done.stdout.splitlines()[-1:]}
