"""The early-exit losses of a running training: hooks on the model, and the sums of each step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError, UnsupportedOptionError
from ..model.exits import Exits
from .losses import weighted_exit_losses

# The label of positions without a target, as in transformers.
_IGNORED = -100


class ExitTraining:
    """The exits of one model while they are trained: hooks, the losses of each step, sums between logs.

    Args:
        model: a causal LM.
        exits: the model's exits.
        distils: whether exits learn the distribution of the last layer instead of the labels.

    Attributes:
        in_step: whether a training step is running (evaluation is not one).
        table: ``[L, 2]`` for each exit the summed loss since the last log, and the number of its tokens.
    """

    def __init__(self, model: PreTrainedModel, exits: Exits, distils: bool = False) -> None:
        self.model = model
        self.exits = exits
        self._distils = distils
        self.in_step = False
        self._handle: RemovableHandle | None = None
        precise = torch.float32 if model.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.table = torch.zeros(exits.anatomy.num_layers, 2, dtype=precise, device=model.device)
        self._weights: list[float] = []
        self._last_weight = 1.0
        self._targets: torch.Tensor | None = None
        self._count: torch.Tensor | int = 0
        self._earlier: torch.Tensor | None = None

    def attach(self, outer: nn.Module) -> None:
        """Puts hooks on the causal LM and on what the Trainer calls (PEFT's wrapper, or the causal LM itself)."""
        self.exits.attach()
        # Before other hooks: sharded parameters of the head are available until FSDP2's hooks run.
        self._handle = outer.register_forward_hook(self._give_out, prepend=True)

    def detach(self) -> None:
        self.exits.detach()
        if self._handle is not None:
            self._handle.remove()

    def begin_step(self, weights: dict[int, float]) -> None:
        last = self.exits.anatomy.num_layers - 1
        self._last_weight = weights[last]
        earlier = {layer: weight for layer, weight in weights.items() if layer != last and weight > 0}
        self.exits.chosen = tuple(layer + 1 for layer in earlier)
        self._weights = list(earlier.values())
        self.in_step = True

    def end_step(self) -> None:
        self.exits.chosen = ()
        self.exits.release()
        self.in_step = False
        self._targets = self._earlier = None

    def begin_batch(self, inputs: dict[str, Any], num_items: torch.Tensor | int | None) -> None:
        """Sets the targets of the exits, and the number of tokens over which the mean is taken."""
        self._earlier = None
        self._targets = _targets(inputs)
        self._count = int((self._targets != _IGNORED).sum()) if num_items is None else num_items

    def _add_exits(self) -> None:
        states, targets = self.exits.states, self._targets
        if targets is None or states is None:
            return
        if states.shape[1:3] != targets.shape:
            raise UnsupportedModelError(
                f"EarlyExitLoss needs a label for each hidden state, but {self.exits.anatomy.model_name} has states "
                f"for {list(states.shape[1:3])} tokens and labels for {list(targets.shape)} (virtual tokens of a "
                "prompt-learning method, or images?). Train without EarlyExitLoss."
            )
        targets = targets.to(states.device).flatten()
        places = (targets != _IGNORED).nonzero().flatten()
        teacher = self.exits.final.detach().flatten(0, 1) if self._distils and self.exits.final is not None else None
        total, sums = weighted_exit_losses(
            self.exits.head,
            self.exits.head_parameters(),
            states.flatten(1, 2).index_select(1, places),
            targets[places],
            self._weights,
            self.model.config.get_text_config(decoder=True).vocab_size,
            None if teacher is None else teacher.index_select(0, places),
        )
        self._earlier = total if self._earlier is None else self._earlier + total
        for layer, loss in zip(self.exits.chosen, sums, strict=True):
            self.table[layer - 1, 0] += loss.to(self.table.device)
            self.table[layer - 1, 1] += len(places)

    @torch.compiler.disable
    def _give_out(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Computes the exits' losses at the end of the model's forward and ties them to its output.

        FSDP2 gathers sharded parameters when the gradient of a forward's output arrives: the exits' backward must come
        after that.
        """
        if not self.in_step:
            return output
        self._add_exits()
        if self._earlier is not None and not isinstance(output, tuple):
            name = next(n for n, v in output.items() if isinstance(v, torch.Tensor) and v.requires_grad)
            output[name] = _Tied.apply(output[name], self._earlier)
        return output

    def total(self, last_loss: torch.Tensor, factor: int) -> torch.Tensor:
        """``Σ ẽ · CE`` of the batch, scaled as ``last_loss`` is.

        Raises:
            UnsupportedModelError: the model's layers did not run.
        """
        assert self._targets is not None
        tokens = int((self._targets != _IGNORED).sum())
        self.table[-1, 0] += (last_loss.detach() * self._count / factor).to(self.table.device)
        self.table[-1, 1] += tokens
        if not self._weights:
            return last_loss
        if self._earlier is None:
            raise UnsupportedModelError(
                f"EarlyExitLoss had no effect: no training forward went through the layers of "
                f"{self.exits.anatomy.model_name}. The weights were not changed."
            )
        return self._last_weight * last_loss + self._earlier.to(last_loss.device) * factor / self._count


def _targets(inputs: dict[str, Any]) -> torch.Tensor:
    """The token ids ``[b, s]`` that each position learns to predict, -100 for none."""
    shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
    if isinstance(shifted, torch.Tensor):
        return shifted
    if not isinstance(labels, torch.Tensor):
        raise UnsupportedOptionError(
            f"EarlyExitLoss needs `labels` in the batches, got {sorted(inputs)}. Use a data collator that makes them, "
            "such as DataCollatorForLanguageModeling(tokenizer, mlm=False)."
        )
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


class _Tied(torch.autograd.Function):
    """Returns the first tensor unchanged; the backward pass reaches the second one only after this node."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.view_as(first) if first.dim() else first.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.new_zeros(())
