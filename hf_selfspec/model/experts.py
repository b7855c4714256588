"""Which of transformers' functions multiplies with the experts of a mixture, by the number of tokens.

``batched_mm`` is the faster one for few tokens, and works in graphs, but gathers the weights of an expert for each
token that goes there: 2.4 GB in each layer for 32 tokens of Qwen3-30B-A3B (computed). ``grouped_mm``, which prefills
use, reads the weights of each expert once, but may wait for its device.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from .patching import InstanceForwards, shared_change
from .traceable import NoGraphError, tracing

# Devices on which ``grouped_mm`` is the faster one for few tokens, too.
GROUPED_ALWAYS = ("cpu",)
_GROUPED, _BATCHED, _BY_SIZE = "grouped_mm", "batched_mm", "hf_selfspec_by_size"


def decoding_experts(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Returns a context in which few tokens go to experts as in transformers' own decoding, and more as in prefills."""
    return nullcontext() if model.device.type in GROUPED_ALWAYS else experts_by_size(model)


@shared_change
def experts_by_size(forwards: InstanceForwards, model: PreTrainedModel) -> None:
    """Lets ``batched_mm`` serve as many tokens as gather fewer weights than there are."""
    for kind in (ExpertsInterface, *ExpertsInterface.__subclasses__()):
        kind.register(_BY_SIZE, partial(_by_size, kind()))
    for config in _configs(model.config):
        if config._experts_implementation == _GROUPED:
            forwards.put(config.__dict__, "_experts_implementation_internal", _BY_SIZE)


def _by_size(
    functions: ExpertsInterface, experts: Any, states: torch.Tensor, chosen: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What goes to experts, ``[n, d]``, with the ``k`` experts of each token in ``chosen`` ``[n, k]``."""
    is_few = chosen.numel() < experts.num_experts
    if not is_few and tracing.now:
        raise NoGraphError(f"{chosen.numel()} choices of {experts.num_experts} experts")
    function: Callable[..., torch.Tensor] = functions[_BATCHED if is_few else _GROUPED]
    return function(experts, states, chosen, *args, **kwargs)


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)
