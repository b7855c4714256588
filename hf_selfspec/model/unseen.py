"""What of a model, and of what runs with it, the tests of this package have not seen.

Drafts are verified several tokens at once, from stored states, in trees, and in rows of different lengths. That this
leaves logits as they are is tested for some classes of transformers. Of all else it is checked, see
:mod:`~hf_selfspec.verify.probation`.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional
from transformers import GenerationMixin, PreTrainedModel

from .attention import attention_functions, is_usual_attention
from .modules import ROW_BLIND, all_modules, forward_of_others, hooks_of, library_of
from .prompt import CACHE_NAMES

# The classes of transformers that the tests cover, without the ends of their names.
_SEEN = """
Apertus Arcee AyaVision BailingHybrid Bamba BioGpt BitNet Bloom CTRL CodeGen Cohere Cohere2 Dbrx DeepseekV2
DeepseekV3 DeepseekV32 DiffLlama Doge Dots1 Ernie4_5 Exaone4 Exaone4_5_ Falcon FalconH1 FalconMamba GPT2 GPTBigCode
GPTJ GPTNeo GPTNeoX Gemma Gemma2 Gemma3 Gemma3n Glm Glm4 Glm4Moe Glm4v Glm5Next GlmMoeDsa GptOss Granite GraniteMoe
GraniteMoeHybrid GraniteSpeech HYV4 Helium HunYuanDenseV1 Idefics3 Inkling Inkling2 Jais2 Jamba KimiLinear LaraMini
Lfm2 Lfm2Moe Lfm2Vl Lfm3 Llama Llama4 Llava LlavaNext Mamba Mamba2 Ministral Mistral Mistral3 Mixtral
ModernBertDecoder Mpt Nemotron NemotronH OPT Olmo Olmo2 Olmo3 OlmoHybrid Olmoe PaliGemma Persimmon Phi Phi3 Phimoe
Qwen2 Qwen2Audio Qwen2Moe Qwen2VL Qwen2_5_VL Qwen3 Qwen3Moe Qwen3Next Qwen3VL Qwen3_5 Qwen3_5Moe Qwen4Exp SeedOss
SmolLM3 StableLm Starcoder2 VaultGemma Voxtral XGLM Zamba Zamba2"""
SEEN = frozenset(_SEEN.split())
# PEFT's layers that change single layers of a model, not how these go together.
_TUNER_LAYERS = {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}
_NAME_ENDS = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$")
# Libraries whose modules treat each token alone, beside Python's own modules.
_TRUSTED = {*ROW_BLIND, "peft", "builtins", "functools"}
# Whose weights may round what is multiplied with them by all tokens of a forward.
_QUANTISING = ("torchao",)
_MODELS = "transformers.models."
# Modules whose functions others may replace, beside those of models.
_FUNCTIONS = ("torch.nn.functional", "transformers.masking_utils", "transformers.integrations.sdpa_attention")
# What transformers' loop calls in each step, and ours does not.
_STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")


@dataclass(frozen=True)
class Unseen:
    """What was not seen of a model.

    Attributes:
        reasons: what that is, in words; empty for a model as the tests have it.
        state: changes when what is not seen changes, as far as that can be told without running it.
    """

    reasons: tuple[str, ...]
    state: Hashable

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return ", ".join(self.reasons)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Unseen:
        """Looks at the class, modules, weights, hooks and attention of ``model``, in each call anew."""
        reasons: dict[str, None] = {}
        contents: list[Hashable] = [model.training]
        # FSDP makes classes of its own of a model's.
        kind: Any = next(base for base in type(model).__mro__ if library_of(base) != "torch")
        if not kind.__module__.startswith(_MODELS) or _NAME_ENDS.sub("", kind.__name__) not in SEEN:
            reasons[f"its class {kind.__name__}"] = None
        modules = all_modules(model)
        kinds: set[Any] = set(map(type, modules))
        foreign = {kind for kind in kinds if _is_foreign(kind, kind.forward)}
        reasons |= dict.fromkeys(f"modules of class {kind.__name__}" for kind in foreign)
        contents += [_contents(module) for module in modules if foreign and type(module) in foreign]
        for module in [module for module in modules if "forward" in module.__dict__]:
            forward = forward_of_others(module)
            if forward is not None and not _TRUSTED.issuperset(_libraries_of(forward)):
                reasons[f"the forward {_name_of(forward)} of a module"] = None
                contents.append(_contents(forward))
        for kind in {type(weight) for module in modules for weight in module._parameters.values()} - _PLAIN_WEIGHTS:
            if library_of(kind) in _QUANTISING:
                reasons[f"weights of class {kind.__name__}"] = None
        for name in {*_FUNCTIONS, *(kind.__module__ for kind in kinds if kind.__module__.startswith(_MODELS))}:
            for function in _foreign_functions(name):
                reasons[f"{function.__name__} in {name}"] = None
                contents.append(_contents(function))
        for hook in (*hooks_of(model), *_global_hooks()):
            if library_of(hook) not in ROW_BLIND:
                reasons[f"the hook {_name_of(hook)}"] = None
                contents.append(_contents(hook))
        implementation = model.config._attn_implementation or ""
        functions = attention_functions(implementation)
        if not all(map(is_usual_attention, functions)):
            reasons[f"its attention function for {implementation!r}"] = None
            contents += map(_contents, (*functions, torch.nn.functional.scaled_dot_product_attention))
        return cls(tuple(reasons), (tuple(reasons), tuple(contents)))


_PLAIN_WEIGHTS = {type(None), torch.Tensor, nn.Parameter}
# For each module of Python what it held when it was last looked at, and the functions of others among that.
_functions: dict[str, tuple[list[Any], list[FunctionType]]] = {}


def _foreign_functions(name: str) -> list[FunctionType]:
    """The functions in a module of Python that are from other libraries than those which are trusted."""
    values = list(vars(sys.modules[name]).values())
    if name not in _functions or list(map(id, _functions[name][0])) != list(map(id, values)):
        functions = [value for value in values if type(value) is FunctionType]
        _functions[name] = values, [one for one in functions if not all(map(_is_trusted, _libraries_of(one)))]
    return _functions[name][1]


def why_plain(model: PreTrainedModel) -> str:
    """Returns why transformers' own loop has to decode, as far as that is seen without a forward; else empty."""
    kind = type(model)
    name = kind.__name__
    if kind._sample is not GenerationMixin._sample or {*_libraries_of(kind._sample)} != {"transformers"}:
        return f"{name} has a decode loop of its own (`_sample`)"
    for method in _STEP_METHODS:
        # PEFT sets one on the model inside, which calls that of the class.
        steps = (getattr(kind, method), vars(model).get(method))
        if any(step is not None and not {*_libraries_of(step)} <= {"transformers", "peft", "torch"} for step in steps):
            return f"{name} has a `{method}` of its own, which plain generate calls for each token"
    takes = _parameters_of(kind.forward)
    if not {*CACHE_NAMES, "**"} & takes:
        return f"{name} takes no cache"
    return ""


@lru_cache
def _parameters_of(forward: Any) -> frozenset[str]:
    parameters = inspect.signature(forward).parameters.values()
    return frozenset("**" if one.kind is one.VAR_KEYWORD else one.name for one in parameters)


def _libraries_of(function: Any) -> Iterator[str]:
    """The libraries of a function and of what it wraps, after which it may be called (``functools.wraps``)."""
    while function is not None:
        inner = getattr(function, "__func__", function)
        is_function = isinstance(inner, FunctionType)
        yield str(inner.__globals__.get("__name__")).partition(".")[0] if is_function else library_of(function)
        function = getattr(function, "__wrapped__", None)


def _is_trusted(library: str) -> bool:
    return library in _TRUSTED or library in sys.stdlib_module_names


@lru_cache(1024)
def _is_foreign(kind: Any, forward: Any) -> bool:
    """Whether a class of modules, or its forward, is not of a library that is trusted, or PEFT's but no tuner layer."""
    libraries = {library_of(kind), *_libraries_of(forward)}
    if library_of(kind) == "peft":
        return not {base.__name__ for base in kind.__mro__} & _TUNER_LAYERS
    return not libraries <= _TRUSTED


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _global_hooks() -> Iterator[Any]:
    yield from list(nn.modules.module._global_forward_pre_hooks.values())
    yield from list(nn.modules.module._global_forward_hooks.values())


def _contents(thing: Any, depth: int = 3) -> Hashable:
    """What a function or an object holds that may change what it does; of counters and records of its own nothing."""
    if thing is None or isinstance(thing, (bool, float, str)):
        return thing
    if isinstance(thing, torch.Tensor):
        return _magnitude(thing)
    if not depth:
        return type(thing).__name__
    if isinstance(thing, partial):
        parts = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        parts = (thing.__func__, thing.__self__)
    elif isinstance(thing, FunctionType):
        code = thing.__code__
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        named = [thing.__globals__[name] for name in code.co_names if name in thing.__globals__]
        values = [value for value in named if isinstance(value, (bool, float, str, torch.Tensor))]
        parts = (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *values)
        return code, tuple(_contents(part, depth - 1) for part in parts)
    else:
        attributes = sorted(getattr(thing, "__dict__", {}).items(), key=lambda pair: pair[0])
        # Forwards are looked at on their own, below ours.
        return type(thing).__name__, tuple(
            (name, _contents(value, 0)) for name, value in attributes if name != "forward"
        )
    return tuple(_contents(part, depth - 1) for part in parts)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def _magnitude(values: torch.Tensor) -> Hashable:
    """Roughly how large a few values of a tensor are."""
    if values.device.type == "meta" or not values.numel():
        return None
    largest = float(values.detach().reshape(-1)[:: max(1, values.numel() // 8)].abs().max())
    return None if not math.isfinite(largest) else (largest > 0, math.frexp(largest)[1] // 4)
