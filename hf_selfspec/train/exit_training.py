"""The early-exit losses of a running training: hooks on the model, and the sums of each step."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate.utils import reduce
from torch.autograd.function import once_differentiable

from ..errors import UnsupportedModelError, UnsupportedOptionError
from ..model.patching import InstanceForwards
from .exits import LOGIT_ELEMENTS, Exits
from .trainer import TrainingRun

# The weights of the layers in step t of T, for L layers.
Weights = Callable[[int, int, int], dict[int, float]]
# The label of positions without a target, as in transformers.
_IGNORED = -100


class ExitTraining(TrainingRun):
    """The exits of one model in training, whose losses join the loss that the model returns."""

    def __init__(self, exits: Exits, weights: Weights) -> None:
        self.exits, self._weights_of = exits, weights
        self.model = model = exits.model
        self._in_step, self._thread = False, threading.get_ident()
        self._hooks = InstanceForwards()
        config = model.config.get_text_config(decoder=True)
        self._balance = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0.0))
        precise = torch.float32 if model.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        # [L, 2]: for each exit the summed loss since the last log, and the number of its tokens.
        self.table = torch.zeros(exits.anatomy.num_layers, 2, dtype=precise, device=model.device)
        self._weights: list[float] = []
        self._last_weight = 1.0
        self._targets: torch.Tensor | None = None  # [b, s] the tokens that each position learns to predict
        self._places: torch.Tensor | None = None
        self._has_effect = False

    def attach(self, model: nn.Module) -> None:
        self.exits.attach()
        self._hooks.hook(model.register_forward_pre_hook, self._begin_batch, with_kwargs=True)
        # Before other hooks: sharded parameters of the head are available until FSDP2's hooks run, and are gathered
        # again when the gradient of the returned loss arrives, which is before the exits' backward.
        self._hooks.hook(model.register_forward_hook, self._add_exits, with_kwargs=True, prepend=True)

    def detach(self) -> None:
        self.exits.detach()
        self._hooks.close()

    def begin_step(self, step: int, steps: int) -> None:
        weights = self._weights_of(step, steps, self.exits.anatomy.num_layers)
        self._last_weight = weights.pop(self.exits.anatomy.num_layers - 1)
        earlier = {layer: weight for layer, weight in weights.items() if weight > 0}
        self.exits.chosen = tuple(layer + 1 for layer in earlier)
        self._weights = list(earlier.values())
        self._in_step, self._has_effect = True, not earlier

    def end_step(self) -> None:
        """Raises if the exits' losses have got no gradient."""
        self.exits.chosen = ()
        self.exits.release()
        self._in_step = False
        self._targets = self._places = None
        if not self._has_effect:
            raise UnsupportedModelError(
                f"EarlyExitLoss had no effect: no training forward went through the layers of "
                f"{self.exits.anatomy.model_name}, or the Trainer did not train with the loss that the model returns. "
                "The weights were not changed."
            )

    def logs(self) -> dict[str, float]:
        table = reduce(self.table, reduction="sum").tolist()
        self.table.zero_()
        return {f"loss/exit_{layer}": total / tokens for layer, (total, tokens) in enumerate(table, 1) if tokens}

    @torch.compiler.disable
    def _trains(self) -> bool:
        """Whether a forward is one of this training: evaluation, references without gradients and others are not."""
        is_here = threading.get_ident() == self._thread
        return self._in_step and is_here and self.model.training and torch.is_grad_enabled()

    @torch.compiler.disable
    def _begin_batch(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._trains():
            return
        targets, labels = kwargs.get("shift_labels"), kwargs.get("labels")
        if not isinstance(targets, torch.Tensor):
            if not isinstance(labels, torch.Tensor):
                raise UnsupportedOptionError(
                    f"EarlyExitLoss needs `labels` in the batches, got {sorted(kwargs)}. Use a data collator that "
                    "makes them, such as DataCollatorForLanguageModeling(tokenizer, mlm=False)."
                )
            targets = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        self._targets = targets
        if self._weights:
            # A GPU's host waits for their number: here, where the Trainer has just waited for the last batch's loss.
            self._places = (self._targets != _IGNORED).flatten().nonzero().flatten()

    @torch.compiler.disable
    def _add_exits(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Makes the loss ``Σ ẽ · CE`` plus a router's; TRL's trainers compute it from ``log_probs``."""
        if not self._trains():
            return output
        assert self._targets is not None
        tokens = (self._targets != _IGNORED).sum()
        num_layers = self.exits.anatomy.num_layers
        if (log_probs := getattr(output, "log_probs", None)) is not None:
            self._count(num_layers, -log_probs.detach().sum(), tokens)
            if self._weights and self.exits.states is not None:
                earlier = self._earlier(self.exits.states).to(log_probs.device)
                output["log_probs"] = self._last_weight * log_probs - earlier / log_probs.numel()
                output["log_probs"].register_hook(self._check_summed)
            return output
        loss = output[0] if isinstance(output, tuple) else output["loss"]
        balance = getattr(output, "aux_loss", None)
        added = 0.0 if balance is None else self._balance * balance.to(loss.device)
        last = loss - added
        # As in the Trainer: the tokens of the whole step if the model gets their number, else those of this batch.
        count = kwargs.get("num_items_in_batch")
        count = tokens if count is None else count
        count = count.to(last.device) if isinstance(count, torch.Tensor) else count
        self._count(num_layers, last.detach() * count, tokens)
        if not self._weights or self.exits.states is None:
            return output
        earlier = self._earlier(self.exits.states).to(last.device)
        total = self._last_weight * last + added + earlier / count
        if isinstance(output, tuple):
            return (total, *output[1:])
        output["loss"] = total
        return output

    def _check_summed(self, gradient: torch.Tensor) -> None:
        """Raises if a loss is something else than a share of the sum of ``log_probs``. A GPU's host waits here, as it
        has just done for the metrics of TRL's trainer."""
        if (gradient != gradient.flatten()[:1]).any():
            raise UnsupportedModelError(
                f"EarlyExitLoss adds the exits of {self.exits.anatomy.model_name} to the sum of its `log_probs`, and "
                "the trainer makes its loss of them in another way. Train without EarlyExitLoss."
            )

    def _earlier(self, states: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the earlier exits' losses, from what goes into the head, ``[k, b, s, d]``."""
        targets, places = self._targets, self._places
        assert targets is not None
        assert places is not None
        if states.shape[1:3] != targets.shape:
            raise UnsupportedModelError(
                f"EarlyExitLoss needs a label for each hidden state, but {self.exits.anatomy.model_name} has states "
                f"for {list(states.shape[1:3])} tokens and labels for {list(targets.shape)} (virtual tokens of a "
                "prompt-learning method, or images?). Train without EarlyExitLoss."
            )
        targets, places = targets.to(states.device).flatten(), places.to(states.device)
        total, sums = ExitLosses.apply(
            self.exits.head,
            targets[places],
            self._weights,
            max(1, LOGIT_ELEMENTS // self.model.config.get_text_config(decoder=True).vocab_size),
            states.flatten(1, 2).index_select(1, places),
            *self.exits.head_parameters(),
        )
        for layer, loss in zip(self.exits.chosen, sums, strict=True):
            self._count(layer, loss, len(places))
        total.register_hook(lambda gradient: setattr(self, "_has_effect", True))
        return total

    def _count(self, layer: int, loss: torch.Tensor, tokens: torch.Tensor | int) -> None:
        self.table[layer - 1, 0] += loss.to(self.table)
        self.table[layer - 1, 1] += tokens if isinstance(tokens, int) else tokens.to(self.table)


class ExitLosses(torch.autograd.Function):
    """``Σ weight · Σ loss`` of exits with states ``[k, n, d]``, and the sums ``[k]`` of cross entropies. Gradients are
    computed in the forward pass already, so the head runs once for each token.

    They are computed as if the weight were 1, and weighted and scaled in float32, for they would be too small for
    float16; those of the parameters are added up in float32, four bytes for each parameter, since a sum in 16 bits
    loses what is small beside it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[torch.Tensor], torch.Tensor],
        targets: torch.Tensor,
        weights: Sequence[float],
        chunk: int,
        states: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = torch.zeros(len(weights), dtype=torch.float32, device=states.device)
        state_gradient = torch.empty_like(states)
        totals: list[torch.Tensor | None] = [None] * len(parameters)
        for start in range(0, len(targets), chunk):
            piece = slice(start, start + chunk)
            for exit_index, weight in enumerate(weights):
                with torch.enable_grad():
                    rows = states[exit_index, piece].detach().requires_grad_()
                    logits = head(rows).float()
                    loss = F.cross_entropy(logits, targets[piece].to(logits.device), reduction="sum")
                    row_gradient, *gradients = torch.autograd.grad(loss, (rows, *parameters), allow_unused=True)
                state_gradient[exit_index, piece] = row_gradient
                sums[exit_index] += loss.detach().to(sums.device)
                for index, gradient in enumerate(gradients):
                    if gradient is not None:
                        if (total := totals[index]) is None:
                            dtype = torch.promote_types(gradient.dtype, torch.float32)
                            total = totals[index] = torch.zeros_like(gradient, dtype=dtype)
                        total.add_(gradient, alpha=weight)
        ctx.weights, ctx.dtypes = weights, [parameter.dtype for parameter in parameters]
        ctx.gradients = state_gradient, totals
        ctx.mark_non_differentiable(sums)
        weighted = sums.new_zeros(())  # the weights are not uploaded: that would make the host of a GPU wait
        for weight, loss in zip(weights, sums, strict=True):
            weighted += weight * loss
        return weighted, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, grad_sums: torch.Tensor) -> Any:
        (state_gradient, totals), ctx.gradients = ctx.gradients, None
        # One value, not a scalar, which would be rounded to 16 bits before the product.
        factor = grad_total.to(state_gradient.device).view(1)
        for rows, weight in zip(state_gradient, ctx.weights, strict=True):
            rows.mul_(factor * weight)
        scaled = [
            None if total is None else total.mul_(grad_total.to(total.device)).to(dtype)
            for total, dtype in zip(totals, ctx.dtypes, strict=True)
        ]
        return (None, None, None, None, state_gradient, *scaled)
