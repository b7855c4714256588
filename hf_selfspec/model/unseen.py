"""What the tests of this package have not seen of a model and of the code that runs with it.

Drafts are verified several tokens at once, from stored states, in trees, and in rows of different lengths. That this
leaves logits as they are is tested for some classes of transformers; everything else is compared before it drafts, see
:mod:`~hf_selfspec.verify.probation`.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .attention import attention_functions, is_usual_attention
from .contents import contents_of
from .internals import STEP_METHODS, attention_implementation, loop_of, why_unusable
from .module_tools import (
    ROW_BLIND,
    all_modules,
    forward_of_others,
    forward_parameters,
    global_hooks,
    hooks_of,
    libraries_of,
    library_of,
)
from .prompt import CACHE_NAMES

# The classes of transformers that the tests cover, without the ends of their names.
_SEEN = """
Apertus Arcee AyaVision BailingHybrid Bamba BioGpt BitNet Bloom CTRL CodeGen Cohere Cohere2 Dbrx DeepseekV2 DeepseekV3
DeepseekV32 DiffLlama Doge Dots1 Ernie4_5 Exaone4 Exaone4_5_ Falcon FalconH1 FalconMamba GPT2 GPTBigCode GPTJ GPTNeo
GPTNeoX Gemma Gemma2 Gemma3 Gemma3n Gemma4 Glm Glm4 Glm4Moe Glm4v Glm5Next GlmMoeDsa GptOss Granite GraniteMoe
GraniteMoeHybrid GraniteSpeech HYV4 Helium HunYuanDenseV1 Idefics3 Inkling Inkling2 Jais2 Jamba KimiLinear LaraMini
Lfm2 Lfm2Moe Lfm2Vl Lfm3 Llama Llama4 Llava LlavaNext Mamba Mamba2 Ministral Mistral Mistral3 Mixtral
ModernBertDecoder Mpt Nemotron NemotronH OPT Olmo Olmo2 Olmo3 OlmoHybrid Olmoe PaliGemma Persimmon Phi Phi3 Phimoe
Qwen2 Qwen2Audio Qwen2Moe Qwen2VL Qwen2_5_VL Qwen3 Qwen3Moe Qwen3Next Qwen3VL Qwen3_5 Qwen3_5Moe Qwen4Exp SeedOss
SmolLM3 StableLm Starcoder2 VaultGemma Voxtral XGLM Zamba Zamba2"""
SEEN = frozenset(_SEEN.split())
# PEFT's layers that change single layers of a model, not how these go together.
_TUNER_LAYERS = {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}
_NAME_ENDS = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel|(Text)?(Model|Decoder|Transformer))$")
# Libraries whose modules treat each token alone, beside Python's own modules.
_TRUSTED = {*ROW_BLIND, "peft", "builtins", "functools"}
# Libraries whose functions modelling files of transformers import.
_IMPORTED = {"numpy", "safetensors", "einops", "kernels", "fla", "mamba_ssm", "causal_conv1d", "flash_attn", "triton"}
_MIXING = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, torch.jit.ScriptModule)
_MODELS = "transformers.models."
# Modules whose functions others may replace, beside those of models.
_FUNCTIONS = ("torch.nn.functional", "transformers.masking_utils", "transformers.integrations.sdpa_attention")


@dataclass(frozen=True)
class Unseen:
    """What was not seen of a model.

    Attributes:
        reasons: what that is, in words; empty for a model as the tests have it.
        holders: the functions and objects that were not seen, whose contents may change what they do.
        state: changes when these contents change, as far as that can be told without running anything.
    """

    reasons: tuple[str, ...]
    state: Hashable
    holders: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return ", ".join(self.reasons)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Unseen:
        """Looks at the class, modules, weights, hooks and attention of ``model``, in each call anew."""
        reasons: dict[str, None] = {}
        holders: list[Any] = []

        def note(reason: str, *what: Any) -> None:
            reasons[reason] = None
            holders.extend(what)

        # FSDP makes classes of its own of a model's.
        model_class: Any = next(base for base in type(model).__mro__ if library_of(base) != "torch")
        if not _is_seen(model_class):
            note(f"its class {model_class.__name__}", *([] if _is_of_models(model_class) else [model]))
        modules = all_modules(model)
        classes: set[Any] = set(map(type, modules))
        foreign = {each for each in classes if _is_foreign(each)}
        for module in [module for module in modules if type(module) in foreign] if foreign else ():
            note(f"modules of class {type(module).__name__}", module)
        weights: dict[type, Any] = {}
        for module in modules:  # thousands, so each is looked at once and briefly
            attributes = module.__dict__
            if parameters := attributes.get("_parameters"):
                weights |= {type(weight): weight for weight in parameters.values()}
            type_: Any = type(module)
            if not attributes.keys().isdisjoint(methods := _methods_of(type_)):
                for name in methods & attributes.keys():
                    method = forward_of_others(module) if name == "forward" else attributes[name]
                    if method is not None and not _TRUSTED.issuperset(libraries_of(method)):
                        note(f"the {name} {_name_of(method)} of a module", method)
        for weight_class in weights.keys() - _PLAIN_WEIGHTS:
            if not _treats_rows_alone(model, weights[weight_class]):
                note(f"weights of class {weight_class.__name__}")
        files = {each.__module__ for each in classes if _is_of_models(each)}
        for file in files - {each.__module__ for each in classes if issubclass(each, PreTrainedModel)}:
            note(f"modules of {file.removeprefix(_MODELS)}")
        decoder: Any = type(model.get_decoder())
        if _is_of_models(decoder) and not _is_seen(decoder):
            note(f"its decoder's class {decoder.__name__}")
        bases = {base for each in classes for base in each.__mro__} - {object}
        for place in (*(sys.modules[name] for name in (*_FUNCTIONS, *files)), *bases, *_CACHES):
            for function in _foreign_functions(place):
                users = [module for module in modules if isinstance(place, type) and isinstance(module, place)]
                note(f"{_name_of(function)} in {place.__name__}", function, *users)
        for *owner, hook in (*hooks_of(modules), *((hook,) for hook in global_hooks())):
            if not ROW_BLIND.issuperset(libraries_of(hook)):
                note(f"the hook {_name_of(hook)}", hook, *owner)
        implementation = attention_implementation(model.config.get_text_config(decoder=True))
        functions = attention_functions(implementation)
        if not all(map(is_usual_attention, functions)):
            note(f"its attention function for {implementation!r}", *functions)
        state = (tuple(reasons), model.training, implementation, tuple(map(contents_of, holders)))
        return cls(tuple(reasons), state if reasons else (), tuple(holders))


_PLAIN_WEIGHTS = {type(None), torch.Tensor, nn.Parameter}
# Classes of caches, whose methods others may replace.
_CACHES = (DynamicCache, DynamicCache.__mro__[1], DynamicLayer, DynamicSlidingWindowLayer)
# For each class and module of Python the values in it when it was last looked at, their ids, and the foreign functions.
_functions: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[int], list[Any]]] = weakref.WeakKeyDictionary()


def _foreign_functions(place: Any) -> list[Any]:
    """What can be called in a module of Python, or a class of a library, and is from libraries that are not trusted."""
    values = list(vars(place).values())
    ids = list(map(id, values))
    before = _functions.get(place)
    if before is None or before[1] != ids:
        is_theirs = isinstance(place, type) and not _is_trusted(library_of(place))
        candidates = [] if is_theirs else [value for value in values if callable(value) and not isinstance(value, type)]
        theirs = [function for function in candidates if not all(map(_is_trusted, libraries_of(function)))]
        _functions[place] = before = values, ids, theirs
    return before[2]


# For a model that could not be looked at.
UNKNOWN = Unseen(("its structure",), ())


def why_plain(model: PreTrainedModel) -> str:
    """Returns why transformers' own loop has to decode, as far as that shows without a forward; else empty."""
    model_class: Any = type(model)
    name = model_class.__name__
    if why := why_unusable():
        return why
    loop = loop_of(model_class)
    if loop is not loop_of(GenerationMixin) or {*libraries_of(loop)} != {"transformers"}:
        return f"{name} has a decode loop of its own (`_sample`)"
    for method in STEP_METHODS:
        # PEFT sets one on the model inside, which calls that of the class.
        steps = (getattr(model_class, method), vars(model).get(method))
        if any(step is not None and not {*libraries_of(step)} <= {"transformers", "peft", "torch"} for step in steps):
            return f"{name} has a `{method}` of its own, which plain generate calls for each token"
    return "" if {*CACHE_NAMES, "**"} & forward_parameters(model) else f"{name} takes no cache"


def _is_of_models(type_: Any) -> bool:
    return str(type_.__module__).startswith(_MODELS)


def _is_seen(type_: Any) -> bool:
    """Whether the tests cover the class of a model or of its decoder."""
    return _is_of_models(type_) and _NAME_ENDS.sub("", type_.__name__) in SEEN


def _is_trusted(library: str) -> bool:
    return library in ("", "None") or library in _TRUSTED or library in _IMPORTED or library in sys.stdlib_module_names


@lru_cache(1024)
def _methods_of(type_: Any) -> frozenset[str]:
    return frozenset(name for base in type_.__mro__ for name, value in vars(base).items() if callable(value))


@lru_cache(1024)
def _is_foreign(type_: Any) -> bool:
    """Whether a class of modules is not of a library that is trusted, PEFT's but no tuner layer, or mixes tokens."""
    if library_of(type_) == "peft":
        return not {base.__name__ for base in type_.__mro__} & _TUNER_LAYERS
    return library_of(type_) not in _TRUSTED or issubclass(type_, _MIXING)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _treats_rows_alone(model: PreTrainedModel, weight: Any) -> bool:
    """Whether products with weights of a class do not depend on what else is multiplied, tried once for a model."""
    outcomes = _weights.setdefault(model, {})
    if type(weight) not in outcomes:
        try:
            generator = torch.Generator("cpu").manual_seed(0)
            rows = torch.randn(2, weight.shape[-1], generator=generator, dtype=torch.float32, device="cpu")
            rows[1] *= 30
            rows = rows.to(weight.device, weight.dtype)
            with torch.no_grad():
                together, alone = (nn.functional.linear(batch, weight)[0].float() for batch in (rows, rows[:1]))
            rounding = _ROUNDINGS * torch.finfo(weight.dtype).eps
            outcomes[type(weight)] = bool((together - alone).abs().max() <= rounding * alone.abs().max())
        except Exception:  # which weights of others may raise in any operation
            outcomes[type(weight)] = False
    return outcomes[type(weight)]


# For each model the classes of its weights, and whether they treat rows alone.
_weights: weakref.WeakKeyDictionary[PreTrainedModel, dict[type, bool]] = weakref.WeakKeyDictionary()
_ROUNDINGS = 8
