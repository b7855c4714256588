"""Private parts of transformers, PEFT, accelerate and torch that this package uses.

:func:`why_unusable` names those that the installed version lacks; then plain ``generate`` serves.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
import torch.overrides
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import GenerationMixin, PreTrainedModel, __version__
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import unsupported

# What the loop of transformers consists of: models that have others are left to it.
STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
LOOP_METHODS = (*STEP_METHODS, "_sample")
# The attribute that all modules with PEFT adapters have, further ones that choose among these, and accelerate's hook.
ADAPTED, ACTIVE_ADAPTER, ACCELERATE_HOOK = "_disable_adapters", "_active_adapter", "_hf_hook"
ADAPTER_SETTINGS = (ADAPTED, ACTIVE_ADAPTER, "scaling", "merged_adapters")
# What a pipeline calls with its own arguments and those of a call.
EXPERTS, CHECKPOINTING = "_experts_implementation_internal", "_gradient_checkpointing_func"


@lru_cache
def why_unusable() -> str:
    """Returns which parts this version of transformers lacks that every call needs; empty for none."""
    attention = (ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS)
    missing = [f"GenerationMixin.{name}" for name in LOOP_METHODS if not hasattr(GenerationMixin, name)]
    missing += [f"{type(each).__name__}._local_mapping" for each in attention if not hasattr(each, "_local_mapping")]
    return f"transformers {__version__} has no {' and no '.join(missing)}" if missing else ""


def loop_of(model_class: Any) -> Any:
    """Returns the method of a class that decodes in plain ``generate``."""
    return model_class._sample


def sample(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Any:
    """Runs the loop of plain ``generate`` of a model's class, with what ``generate`` passes to it."""
    return loop_of(type(model))(model, input_ids, **options)


def prefill(model: PreTrainedModel, input_ids: torch.Tensor, config: Any, arguments: dict[str, Any]) -> Any:
    """Runs the prompt as plain ``generate`` does; returns what the model's forward does."""
    return model._prefill(input_ids, config, arguments)


def next_arguments(model: PreTrainedModel, output: Any, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the arguments of plain ``generate``'s next step, after a forward that returned ``output``."""
    following: dict[str, Any] = model._update_model_kwargs_for_generation(output, arguments, **options)
    return following


def is_of_user(cache: Any) -> bool:
    """Returns whether a cache was given to ``generate`` and not made there."""
    return bool(getattr(cache, "_is_user_defined", False))


def pad_token(config: Any) -> int | None:
    """Returns the padding id that ``generate`` has settled on."""
    pad = getattr(config, "_pad_token_tensor", None)
    return None if pad is None else int(pad)


def mask_length(config: Any) -> int | None:
    """Returns the length of a mask of ones that ``generate`` has dropped, as newer versions do."""
    length: int | None = getattr(config, "_mask_length", None)
    return length


def let_compile_on_cpu(config: Any) -> Any:
    """Returns a ``CompileConfig`` that is meant for CPUs, too."""
    config._compile_all_devices = True
    return config


def attention_implementation(config: Any) -> str:
    """Returns the name of the attention functions of a model with this config, empty if it has none."""
    return getattr(config, "_attn_implementation", None) or ""


def copy_attention_implementation(source: Any, target: Any) -> None:
    """Gives a config the attention functions of another one."""
    target._attn_implementation = source._attn_implementation


def registered(interface: Any) -> MutableMapping[str, Any]:
    """Returns where attention functions, or those for masks, are registered before the global ones."""
    mapping: MutableMapping[str, Any] = interface._local_mapping
    return mapping


def experts_implementation(config: Any) -> str | None:
    """Returns the name of the function for experts; its attribute is :data:`EXPERTS`."""
    name: str | None = getattr(config, "_experts_implementation", None)
    return name


def is_stateful(model: PreTrainedModel) -> bool:
    """Returns whether a class has states that cannot be cropped."""
    return bool(getattr(model, "_is_stateful", False))


def modes_of_torch() -> list[Any]:
    """Returns the modes that see all functions and operators which this thread calls."""
    return [*torch.overrides._get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


@lru_cache
def operations_of_torch() -> frozenset[str]:
    """Returns the names of torch's functions that compute."""
    return frozenset(dir(torch._C._VariableFunctions))


def tensor_parallel_size(model: PreTrainedModel) -> int:
    """Returns over how many processes a model's layers are spread.

    Raises:
        UnsupportedModelError: this version does not tell.
    """
    if not hasattr(model, "_tp_size"):
        raise unsupported(
            f"{type(model).__name__} has no _tp_size, so that it cannot be told whether its layers are spread over "
            "processes",
            "Take another version of transformers",
        )
    return model._tp_size or 1


def keeps_weights(hook: Any) -> bool:
    """Returns whether a hook is accelerate's of a module whose weights stay on their device; it moves inputs alone."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload


def is_cast_by_accelerate(model: PreTrainedModel) -> bool:
    """Returns whether accelerate has put autocast around a model's forward."""
    return hasattr(model, "_original_forward")


def compute_buffers(module: nn.Module, of: PreTrainedModel) -> None:
    """Computes a module's buffers, as transformers does when it loads a model."""
    of._init_weights(module)


def copy_file_layout(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Makes a model save the names and layouts of another one's files."""
    if hasattr(source, "_weight_conversions"):
        target._weight_conversions = source._weight_conversions


def prefix_function(processor: Any) -> Callable[..., Any]:
    """Returns the function of a ``PrefixConstrainedLogitsProcessor``."""
    function: Callable[..., Any] = processor._prefix_allowed_tokens_fn
    return function


def use_one_device(args: Any) -> None:
    """Keeps a ``Trainer`` from copying a model to further devices of its process."""
    args._n_gpu = 1
