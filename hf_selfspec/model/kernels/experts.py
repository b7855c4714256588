"""Which of transformers' functions multiplies with the experts of a mixture, by the number of tokens.

``batched_mm`` is the one of transformers' decoding, and works in graphs, but gathers the weights of an expert for each
token that goes there: 2.4 GB in each layer for 32 tokens of Qwen3-30B-A3B (computed). ``grouped_mm``, which prefills
use, reads the weights of each expert once, but waits for the device where torch has no kernel for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ..graphs.captures import NoGraphError, capturing
from ..internals import EXPERTS, experts_implementation
from ..patching import InstanceForwards, PerThread, shared_change

# Devices on which ``grouped_mm`` is the faster one for few tokens, too.
GROUPED_ALWAYS = ("cpu",)
_GROUPED, _BATCHED, _BY_SIZE = "grouped_mm", "batched_mm", "hf_selfspec_by_size"


# Whether few tokens take the way of transformers' decoding: the other one may round differently.
_is_exact = PerThread[bool]()


@contextmanager
def decoding_experts(model: PreTrainedModel, is_exact: bool = False) -> Iterator[None]:
    """Sends few tokens to experts as transformers' decoding does, unless ``is_exact`` only where nothing is faster, and
    more tokens as its prefills do."""
    with _is_exact.during(is_exact), nullcontext() if model.device.type in GROUPED_ALWAYS else experts_by_size(model):
        yield


@shared_change
def experts_by_size(forwards: InstanceForwards, model: PreTrainedModel) -> None:
    """Lets ``batched_mm`` serve as many tokens as gather fewer weights than there are."""
    for interface in (ExpertsInterface, *ExpertsInterface.__subclasses__()):
        interface.register(_BY_SIZE, partial(_by_size, interface()))
    for config in _configs(model.config):
        if experts_implementation(config) == _GROUPED:
            forwards.put(config.__dict__, EXPERTS, _BY_SIZE)


def _by_size(
    functions: ExpertsInterface, experts: Any, states: torch.Tensor, chosen: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What goes to experts, ``[n, d]``, with the ``k`` experts of each token in ``chosen`` ``[n, k]``."""
    has_kernel, are_few = has_grouped_kernel(next(experts.parameters())), chosen.numel() < experts.num_experts
    if capturing.now is not None and not (has_kernel or are_few):
        raise NoGraphError(f"{chosen.numel()} choices of {experts.num_experts} experts")
    # With a kernel for groups weights are read once, and not three times as where they are gathered. For one token its
    # preparations take as long (computed).
    is_batched = are_few and (not has_kernel or len(states) == 1 or _is_exact.now)
    output: torch.Tensor = functions[_BATCHED if is_batched else _GROUPED](experts, states, chosen, *args, **kwargs)
    return output


def has_grouped_kernel(weight: torch.Tensor) -> bool:
    """Whether a device multiplies groups of tokens with such weights by itself: elsewhere, and in other dtypes, torch
    multiplies group by group, and the host waits for their sizes."""
    has_function = hasattr(torch.nn.functional, "grouped_mm")  # since torch 2.10
    is_served = has_function and weight.is_cuda and weight.dtype is torch.bfloat16
    return is_served and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)
