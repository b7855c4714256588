"""Whether what this package computes on a device is what transformers computes there, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

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
from .ways import WAYS, Way

# So that drafts are sometimes right.
_DAMPING = 0.1
_PROMPT, _NEW = 24, 48
_ROWS = (1, 4)
# A tree reads how wide it becomes at each depth.
_READ_ELSEWHERE = {"early exit, tree"}
# Of the loss, relative: the sums of two float32 kernels.
_LOSS_TOLERANCE = 1e-5
_LOSS_BATCH = 2


class CheckError(RuntimeError):
    """Something differs from what transformers computes."""


def _specs(shape: DeviceLlama) -> dict[str, SelfSpec]:
    """Drafts of each kind."""
    early, three = EarlyExit(shape.exit_layer), FixedLength(3)
    sure = ConfidenceThreshold(4 / shape.vocabulary)  # the confidence of a random model is a few times that of chance
    return {
        "early exit, fixed length": SelfSpec(early, three),
        "early exit, stop rule": SelfSpec(early, sure, max_draft=6),
        "early exit, tree": SelfSpec(early, three, TopKTree()),
        "skip set": SelfSpec(SkipLayers(attention=(1,), mlp=(2,)), three),
        "lookup": SelfSpec.lookup(),
    }


def check_pieces(options: Options) -> list[Piece]:
    """All checks."""
    shape = SHAPES[options.check_shape].on(options.device, torch.float32)
    kind = options.place.type
    settings = {"shape": options.check_shape, "device": options.device, "dtype": "float32"}

    def piece(group: str, name: str, work: Callable[[], Result], on: tuple[str, ...], why: str) -> Piece:
        unfit = "" if kind in on or not on else why
        return Piece(group, name, settings, lambda _: work(), is_check=True, unfit=unfit)

    compiled = {name: way for name, way in WAYS.items() if way.is_compiled}
    nowhere_else = "torch tells what waits on CUDA alone"
    return [
        *(piece("ids", name, partial(_ids, shape, name), (), "") for name in _specs(shape)),
        *(
            piece("waits", f"{name}, {how}", partial(_waits, shape, name, do_sample), ("cuda",), nowhere_else)
            for name in _specs(shape)
            if name not in _READ_ELSEWHERE
            for how, do_sample in (("greedy", False), ("drawn", True))
        ),
        *(
            piece("graphs", name, partial(_graphs, shape, way), ("cuda",), "there are CUDA graphs on CUDA alone")
            for name, way in compiled.items()
        ),
        piece(
            "loss", "training, callbacks at zero", partial(_loss, shape), ("cuda", "cpu"), "Trainer does not know it"
        ),
    ]


def _batch(shape: DeviceLlama, rows: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(2, shape.vocabulary, (rows, _PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(shape.device), "attention_mask": mask.to(shape.device)}


def _written(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return model.generate(**batch, **{"max_new_tokens": _NEW, "do_sample": False, **options})


def _compare(
    model: LlamaForCausalLM, batch: dict[str, torch.Tensor], plain: torch.Tensor, ours: torch.Tensor
) -> list[str]:
    """Near ties at which two texts part.

    Raises:
        CheckError: they part elsewhere.
    """
    if plain.tolist() == ours.tolist():
        return []
    found = first_differences(model, plain, ours, batch["attention_mask"])
    wrong = [difference for difference in found if not difference.is_near_tie]
    if wrong:
        raise CheckError(f"ids are not plain generate's: {wrong[0]}")
    return [str(difference) for difference in found]


def _ids(shape: DeviceLlama, name: str) -> Result:
    """Greedy ids of one text and of a ragged batch, and the acceptance rates."""
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
    """Rounds wait in ``transfer.read`` alone; torch raises where they wait elsewhere."""
    model = shape.damped(_DAMPING)
    with waits_are_errors():
        for rows in _ROWS:
            _written(model, _batch(shape, rows), assistant=_specs(shape)[name], do_sample=do_sample)
    return {}


def _graphs(shape: DeviceLlama, way: Way) -> Result:
    """A compiled way has graphs, skips none, and writes plain ids."""
    from torch._dynamo.utils import counters

    model, batch = shape.damped(_DAMPING), _batch(shape, 1)
    plain = _written(model, batch)
    counters.clear()
    near_ties = _compare(model, batch, plain, _written(model, batch, **way.options(shape.exit_layer)))
    graphs, skips = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    if not graphs or skips:
        raise CheckError(f"{graphs} graphs were compiled, and torch was skipping cudagraphs {skips} times")
    return {"near_ties": near_ties, "graphs": graphs}


def _loss(shape: DeviceLlama) -> Result:
    """The loss of a step whose callbacks have no weight and drop nothing is that of a step without them."""
    tokens = TrainingShape(
        shape.width, shape.layers, shape.intermediate or 0, shape.vocabulary, _LOSS_BATCH, _PROMPT, bf16=False
    )
    plain = train(shape.model(), tokens, list, 1, shape.device).loss
    ours = train(shape.model(), tokens, lambda: [EarlyExitLoss(0.0), LayerDropout(0.0)], 1, shape.device).loss
    if not abs(ours - plain) <= _LOSS_TOLERANCE * abs(plain):
        raise CheckError(f"the loss with callbacks at zero is {ours}, without them {plain}")
    return {"plain": plain, "ours": ours}
