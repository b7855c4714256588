"""What a model would predict at each of its layers, through its own final norm and output head.

The states that leave the chosen layers are appended, along the batch, to what leaves the last layer, so that the
model's own code brings all of them to its output head (final norm, projections). They are then removed again, and
:meth:`Exits.head` runs all that the model does between its stack of layers and its logits on any of them: projections,
head, scale, soft-cap. No architecture is reimplemented, and the logits of an exit are computed only when they are used.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.internals import CHECKPOINTING
from ..model.patching import (
    Autocast,
    InstanceForwards,
    PerThread,
    autocast_on,
    does_checkpoint,
    evaluating,
    shared_change,
    states_of,
    with_states,
    within,
)

# Layer inputs are [b, s, d]; Gemma 3n has [4, b, s, d].
BATCH_DIM = -3
# Logits of exits that may be in memory at a time: 128 MiB in float32.
LOGIT_ELEMENTS = 2**25

# A batch of text: its "ids" [b, s], and hidden states [b, s, d] of the model. For each wanted layer E, "states_E" is
# the output of layer E - 1, and "exits_E" the same after the model's own final norm; "final" goes into the head.
HiddenStates = dict[str, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]
# A value for each token, from the logits [n, v] of a draft and those of the whole model.
Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_returned = PerThread[Any]()  # what stacks return instead of running


@shared_change
def _returning(forwards: InstanceForwards, stack: nn.Module) -> None:
    run = stack.forward
    forwards.replace(stack, lambda *args, **kwargs: run(*args, **kwargs) if _returned.now is None else _returned.now)


def _then(module: nn.Module, original: Any, hook: Any) -> Any:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        changed = hook(module, args, output)
        return output if changed is None else changed

    return checkpointed


class Exits:
    """The exits of one model. A forward brings those after ``chosen`` layers to the head: ``states``
    ``[len(chosen), b, s, d]`` and ``final`` ``[b, s, d]`` are its inputs, ``left`` the states before the final norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.anatomy = Anatomy.of(model)
        self.chosen: tuple[int, ...] = ()
        self.is_watching = False  # forwards for which no exit is chosen, too
        self.states: torch.Tensor | None = None
        self.final: torch.Tensor | None = None
        self.left: dict[int, torch.Tensor] = {}
        self._output: Any = None  # of the stack in the last forward that was observed
        self._autocast: Autocast | None = None  # that was on in it
        self._changes = InstanceForwards()
        self._thread = 0

    def attach(self) -> None:
        """Registers hooks on the model, for forwards of this thread; :meth:`detach` removes them."""
        if not self.anatomy.exits:
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} fixes the batch after its last layer, so the states of its exits cannot go "
                "through its output head together: its exits can neither be trained nor reported."
            )
        self._thread, changes = threading.get_ident(), self._changes
        for layer, module in enumerate(self.anatomy.layers, start=1):
            hook = self._layer_hook(layer)
            if "__call__" in GradientCheckpointingLayer.__dict__ and does_checkpoint(module):
                # Before transformers 5.23, checkpointing includes a layer's hooks, which would run again in backward.
                run = getattr(module, CHECKPOINTING)
                changes.replace(module, _then(module, run, hook), CHECKPOINTING)
            else:
                changes.hook(module.register_forward_hook, hook)
        changes.hook(self.anatomy.stack.register_forward_pre_hook, self._begin)
        changes.hook(self.anatomy.stack.register_forward_hook, self._end)

    def detach(self) -> None:
        self._changes.close()
        self.release()

    def release(self) -> None:
        self.states = self.final = self._output = None
        self.left.clear()

    def head_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that :meth:`head` currently uses (sharded training swaps them)."""
        inside = next(name for name, module in self.model.named_modules() if module is self.anatomy.stack)
        outside = (
            parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and not name.startswith(f"{inside}.")
        )
        return list(dict.fromkeys(outside))

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Maps states ``[n, d]`` or ``[b, s, d]``, as they leave the stack, to logits, by the model's own forward, in
        the precision of the last observed one. Others' hooks on the stack run as well, with ids of zeros."""
        output, stack = self._output, self.anatomy.stack
        assert output is not None, "a forward has to be seen first"
        batch = (states[None] if states.dim() == 2 else states).to(states_of(output).device)
        ids = torch.zeros(batch.shape[:2], dtype=torch.long, device=batch.device)
        with within(self._autocast), _returning(stack), _returned.during(with_states(output, batch)):
            # The forward of the class, without what others have wrapped around the instance's.
            result = type(self.model).forward(self.model, input_ids=ids)
        logits: torch.Tensor = result[0] if isinstance(result, tuple) else result.logits
        logits = logits.to(states.device)
        return logits[0] if states.dim() == 2 else logits

    def _is_wanted(self) -> bool:
        """Whether the hooks apply: other threads' forwards of the same model are not affected."""
        is_meant = (self.chosen or self.is_watching) and _returned.now is None
        return bool(is_meant) and threading.get_ident() == self._thread

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._is_wanted():
            self.release()

    def _layer_hook(self, layer: int) -> Any:
        last = layer == self.anatomy.num_layers

        @torch.compiler.disable
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._is_wanted():
                return None
            hidden = output[0] if isinstance(output, tuple) else output
            if layer in self.chosen:
                self.left[layer] = hidden
            if not last:
                return None
            kept = (self.left[layer].to(hidden.device) for layer in self.chosen)  # layers may be spread over devices
            joined = torch.cat([hidden, *kept], dim=BATCH_DIM)
            return (joined, *output[1:]) if isinstance(output, tuple) else joined

        return hook

    @torch.compiler.disable
    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_wanted():
            return None
        joined, parts = states_of(output), 1 + len(self.chosen)
        if joined.shape[0] % parts:
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} does not keep the batch together after its last layer (got "
                f"{list(joined.shape)} for {parts} exits), so its exits cannot be brought to its head."
            )
        b = joined.shape[0] // parts
        self.states, self.final = joined[b:].unflatten(0, (parts - 1, b)), joined[:b]
        output = with_states(output, self.final)
        if not isinstance(output, tuple) and output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(hidden[:b] for hidden in output["hidden_states"])
        self._output, self._autocast = output, autocast_on(self.final.device)
        return output


class FrozenModel:
    """A model whose states at some exit layers are a fit's data."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.exits = Exits(model)
        self.anatomy = self.exits.anatomy
        self.own_head = self.exits.head

    @property
    def device(self) -> torch.device:
        device = self.model.get_input_embeddings().weight.device
        if device.type == "meta":
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} is offloaded, so nothing can be fitted to it. Load all of it on devices."
            )
        return device

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Sets eval mode, stops gradients and hooks the exits; restores everything afterwards."""
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with evaluating(self.model):
            try:
                for parameter in learning:
                    parameter.requires_grad_(False)
                self.exits.attach()
                yield
            finally:
                self.exits.detach()
                for parameter in learning:
                    parameter.requires_grad_(True)

    def per_token(
        self,
        metric: Metric,
        head: Head,
        drafted: torch.Tensor,
        final: torch.Tensor,
        teacher: Head | None = None,
        vocabulary: int | None = None,
    ) -> torch.Tensor:
        """``[b s]`` values of ``metric``, from logits of ``head`` for the states ``drafted`` ``[b, s, d]`` and those of
        a teacher (by default the model's own head) for ``final``. Logits of many tokens are computed in parts, and
        again in the backward pass, so that they are not in memory together."""

        def of(drafted: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher_logits = (teacher or self.own_head)(final).float()
            return metric(head(drafted).float(), teacher_logits)

        chunk = max(1, LOGIT_ELEMENTS // (vocabulary or self.model.config.get_text_config(decoder=True).vocab_size))
        pairs = list(zip(*(states.flatten(0, 1).split(chunk) for states in (drafted, final)), strict=True))
        if len(pairs) == 1 or not torch.is_grad_enabled():
            return torch.cat([of(*pair) for pair in pairs])
        return torch.cat([checkpoint(of, *pair, use_reentrant=False) for pair in pairs])

    @torch.no_grad()
    def hidden_states(self, ids: torch.Tensor) -> HiddenStates:
        exits, ids = self.exits, ids.to(self.device)
        exits.chosen, exits.is_watching = self.layers, True
        try:
            self.anatomy.stack(input_ids=ids, use_cache=False, return_dict=True)
        finally:
            exits.chosen, exits.is_watching = (), False
        final, states = cast(Any, (exits.final, exits.states))
        if any(state.shape != final.shape for state in exits.left.values()):
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} has other states between its layers (several for each token, or of another "
                "width) than go into its head, so nothing can be fitted to go from there to the head."
            )
        named = {"ids": ids, "final": final}
        for layer, state in zip(self.layers, states, strict=True):
            named |= {f"states_{layer}": exits.left[layer], f"exits_{layer}": state}
        return {name: state.to(self.device) for name, state in named.items()}

    @torch.no_grad()
    def imitate_norm(self, norm: nn.RMSNorm, layer: int) -> None:
        """Sets a norm's weight (``w`` of ``w x / |x|``) to match the model's own norm after a layer if that scales."""
        read = self.hidden_states(torch.arange(2, 10, device=self.device)[None])
        states, normed = read[f"states_{layer}"].double(), read[f"exits_{layer}"].double()
        if states.shape == normed.shape:
            unit = states / states.pow(2).mean(-1, keepdim=True).sqrt()
            norm.weight.copy_((unit * normed).sum((0, 1)) / (unit * unit).sum((0, 1)))

    @torch.no_grad()
    def copy_head(self, linear: nn.Linear) -> None:
        """Copies the weights of the model's own head, without its bias, scale or soft-cap, into a linear layer."""
        weight = getattr(self.model.get_output_embeddings(), "weight", None)
        if weight is None or weight.shape != linear.weight.shape:
            raise UnsupportedModelError(
                f"{self.anatomy.model_name} has no output head of the shape {tuple(linear.weight.shape)} that could be "
                "copied: leave copied=True out."
            )
        linear.weight.copy_(weight)


def cross_entropy(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` cross entropy of the draft's distribution against the whole model's (Kangaroo, equation 3)."""
    return -(teacher.softmax(-1) * drafted.log_softmax(-1)).sum(-1)


def agreement(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` whether both have the same first choice."""
    return (drafted.argmax(-1) == teacher.argmax(-1)).float()
