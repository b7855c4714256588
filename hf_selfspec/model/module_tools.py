"""A model's modules, hooks and processes."""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.nn as nn
from transformers import PreTrainedModel

from .forks import cached_property
from .internals import ACCELERATE_HOOK, ADAPTED, ADAPTER_SETTINGS, tensor_parallel_size

# Libraries whose hooks treat the rows of a batch alike.
ROW_BLIND = frozenset(("accelerate", "deepspeed", "hf_selfspec", "torch", "transformers"))
# Libraries whose functions modelling files of transformers import.
_IMPORTED = {"numpy", "safetensors", "einops", "kernels", "fla", "mamba_ssm", "causal_conv1d", "flash_attn", "triton"}
# Objects of torch that run functions of others.
_OPERATORS = {"CustomOpDef", "OpOverload", "OpOverloadPacket", "ScriptFunction", "ScriptMethod"}
_Result = TypeVar("_Result")
# Of ``typing_extensions`` is what marks a method of FSDP2 as deprecated.
_TRUSTED = ROW_BLIND | _IMPORTED | sys.stdlib_module_names | {"", "None", "builtins", "peft", "typing_extensions"}


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Returns what ``model.modules()`` yields, in its order, in a quarter of the time."""
    modules: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in modules:
            modules[module] = None
            if children := module._modules:
                waiting += reversed(children.values())
    return list(modules)


def once_for_each(function: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """Keeps what a function returns for a class or a function, as long as that exists: notebooks define theirs anew."""
    results: weakref.WeakKeyDictionary[Any, _Result] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def kept(of: Any) -> _Result:
        with suppress(KeyError, TypeError):  # some objects take no weak references
            return results[of]
        result = function(of)
        with suppress(TypeError):
            results[of] = result
        return result

    return kept


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters of a model's forward, ``"**"`` for that of all further names."""
    return _parameters(type(model).forward)


@once_for_each
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Returns the number of tokens that a model can read, also where its embedding is inside of a wrapper (PEFT)."""
    sizes = [model.config.get_text_config(decoder=True).vocab_size]
    with suppress(NotImplementedError, AttributeError):
        sizes += [getattr(module, "num_embeddings", 0) for module in model.get_input_embeddings().modules()]
    return int(max(sizes))


def global_hooks() -> list[Any]:
    """Returns the hooks around the forwards of all modules."""
    of = nn.modules.module
    return [*of._global_forward_pre_hooks.values(), *of._global_forward_hooks.values()]


def switches_of(model: nn.Module) -> tuple[list[Any], str]:
    """What code that runs between two forwards may change of a model: what runs, and which adapters of PEFT and how."""
    runs, adapters = global_hooks(), list[Any]()
    for module in all_modules(model):
        runs += module, module.training, forward_of_others(module)
        runs += (*module._forward_pre_hooks, *module._forward_hooks)
        if ADAPTED in module.__dict__:
            adapters += map(module.__dict__.get, ADAPTER_SETTINGS)
    return runs, str(adapters)


def forward_of_others(module: nn.Module) -> Any:
    """Returns the forward that other code has set on this module instance, ``None`` if none has."""
    forward = module.__dict__.get("forward")
    forward = getattr(forward, "of_others", forward)  # below ours, which are there while any thread generates
    return forward if callable(forward) and library_of(forward) != "hf_selfspec" else None


def library_of(value: object) -> str:
    """Returns the name of the library that a function, or the class of an object, names as its own."""
    while isinstance(value, functools.partial):
        value = value.func
    return str(getattr(value, "__module__", "")).partition(".")[0]


def is_trusted(library: str) -> bool:
    """Returns whether code of a library keeps nothing of what it sees, and treats each token alone."""
    return library in _TRUSTED


def libraries_of(function: object, but: object = None) -> Iterator[str]:
    """The libraries of a function, of what it belongs to, and of what it wraps, whose name it may have
    (``functools.wraps``); not that of the function ``but``."""
    waiting, visited = [function], set[int]()
    while waiting and len(visited) < 64:
        inner = waiting.pop()
        owner = getattr(inner, "__self__", None)
        if isinstance(owner, type):
            yield library_of(owner)
        elif isinstance(owner, nn.Module):
            yield from {
                library_of(type(module)) for module in (owner.modules() if library_of(owner) == "torch" else ())
            }
        inner = getattr(inner, "__func__", inner)
        if id(inner) in visited or inner is but:
            continue
        visited.add(id(inner))
        if isinstance(inner, FunctionType) and hasattr(inner, "__wrapped__"):  # whose names are those of what it wraps
            yield str(inner.__globals__.get("__name__")).partition(".")[0]
        elif isinstance(inner, functools.partial):
            waiting.append(inner.func)
        else:
            # TorchScript keeps the place of its source: "__torch__.transformers.models...".
            script = str(getattr(inner, "qualified_name", "")).split(".")[1:-1] or ["unknown"]
            yield script[0] if type(inner).__name__ in _OPERATORS else library_of(inner)
        # What code around a function sets, not attributes of an object that happens to have them.
        around = getattr(inner, "__dict__", {})
        waiting += [around.get(name) for name in ("__wrapped__", "_torchdynamo_orig_callable")]
        waiting = [other for other in waiting if other is not None]


class ModelView:
    """One walk over a model's modules as they are when a call begins, and what all parts of the call read from it.

    Attributes:
        model: the model.
        modules: its modules in the order of ``model.modules()``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.modules = model, all_modules(model)

    @cached_property
    def weights(self) -> dict[type, torch.Tensor]:
        """One of the weights of each class of weights."""
        weights = {type(weight): weight for module in self.modules for weight in module._parameters.values()}
        return {type_: weight for type_, weight in weights.items() if weight is not None}

    @cached_property
    def hooks(self) -> list[tuple[nn.Module, Any]]:
        """The hooks around forwards of single modules, each with its module; accelerate's are attributes of these."""
        hooks = list[tuple[nn.Module, Any]]()
        for module in self.modules:
            if module._forward_pre_hooks or module._forward_hooks:  # which others may change meanwhile
                around = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
                hooks += [(module, hook) for hook in around]
            if (whole := module.__dict__.get(ACCELERATE_HOOK)) is not None:
                hooks += [(module, hook) for hook in getattr(whole, "hooks", (whole,))]
        return hooks

    def has_hooks(self, but_of: Collection[str], but: Callable[[Any], bool] = lambda hook: False) -> bool:
        """Returns whether hooks, other than those of some libraries and ``but`` others, see or change what goes through
        the modules."""
        return nn.modules.module._has_any_global_hook() or any(
            not (but(hook) or set(but_of).issuperset(libraries_of(hook))) for _, hook in self.hooks
        )

    @cached_property
    def is_compiled(self) -> bool:
        """Whether the model, or a module in it, runs as a compiled graph."""
        is_whole = hasattr(self.model.forward, "_torchdynamo_orig_callable")
        return is_whole or any(module._compiled_call_impl is not None for module in self.modules)


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Returns whether each layer of the model is spread over several processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return tensor_parallel_size(model) > 1


def others_are_unfinished(device: torch.device) -> Callable[[bool], bool]:
    """Whether any process is unfinished, given whether this one is; all have to ask together, as in plain generate."""

    def ask(is_unfinished: bool) -> bool:
        count = torch.tensor(float(is_unfinished), device=device)
        torch.distributed.all_reduce(count)
        return bool(count.item())

    return ask
