"""What of a model, and of what runs with it, the tests of this package have not seen.

Drafts are verified several tokens at once, from stored states, in trees, and in rows of different lengths. That this
leaves logits as they are is tested for some classes of transformers. Of all else it is checked, see
:mod:`~hf_selfspec.verify.probation`.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .attention import attention_functions, implementation_of, is_usual_attention
from .contents import contents_of
from .internals import ACCELERATE_HOOK, STEP_METHODS, loop_of, why_unusable
from .modules import ROW_BLIND, all_modules, forward_of_others, hooks_of, libraries_of, library_of
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
        things: the functions and objects.
        state: changes when what is not seen changes, as far as that can be told without running it.
    """

    reasons: tuple[str, ...]
    state: Hashable
    things: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return ", ".join(self.reasons)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Unseen:
        """Looks at the class, modules, weights, hooks and attention of ``model``, in each call anew."""
        reasons: dict[str, None] = {}
        things: list[Any] = []

        def note(reason: str, *what: Any) -> None:
            reasons[reason] = None
            things.extend(what)

        # FSDP makes classes of its own of a model's.
        kind: Any = next(base for base in type(model).__mro__ if library_of(base) != "torch")
        if not kind.__module__.startswith(_MODELS) or _NAME_ENDS.sub("", kind.__name__) not in SEEN:
            note(f"its class {kind.__name__}", *([] if kind.__module__.startswith(_MODELS) else [model]))
        modules = all_modules(model)
        kinds: set[Any] = set(map(type, modules))
        foreign = {kind for kind in kinds if _is_foreign(kind)}
        for module in [module for module in modules if type(module) in foreign] if foreign else ():
            note(f"modules of class {type(module).__name__}", module)
        hooked, weights = list[nn.Module](), dict[type, Any]()
        for module in modules:  # thousands, so each is looked at once and briefly
            attributes = module.__dict__
            if (
                attributes.get("_forward_hooks")
                or attributes.get("_forward_pre_hooks")
                or ACCELERATE_HOOK in attributes
            ):
                hooked.append(module)
            if parameters := attributes.get("_parameters"):
                weights |= {type(weight): weight for weight in parameters.values()}
            kind = type(module)
            if not attributes.keys().isdisjoint(methods := _methods_of(kind)):
                for name in methods & attributes.keys():
                    method = forward_of_others(module) if name == "forward" else attributes[name]
                    if method is not None and not _TRUSTED.issuperset(libraries_of(method)):
                        note(f"the {name} {_name_of(method)} of a module", method)
        for kind in weights.keys() - _PLAIN_WEIGHTS:
            if not _treats_rows_alone(model, weights[kind]):
                note(f"weights of class {kind.__name__}")
        names = {kind.__module__ for kind in kinds if kind.__module__.startswith(_MODELS)}
        for name in names - {kind.__module__ for kind in kinds if issubclass(kind, PreTrainedModel)}:
            note(f"modules of {name.removeprefix(_MODELS)}")
        decoder: Any = type(model.get_decoder())
        if decoder.__module__.startswith(_MODELS) and _NAME_ENDS.sub("", decoder.__name__) not in SEEN:
            note(f"its decoder's class {decoder.__name__}")
        bases = {base for kind in kinds for base in kind.__mro__} - {object}
        for holder in (*(sys.modules[name] for name in (*_FUNCTIONS, *names)), *bases, *_CACHES):
            for function in _foreign_functions(holder):
                holders = [module for module in modules if isinstance(holder, type) and isinstance(module, holder)]
                note(f"{_name_of(function)} in {holder.__name__}", function, *holders)
        for place in (*hooked, None):
            for hook in _global_hooks() if place is None else hooks_of([place]):
                if not ROW_BLIND.issuperset(libraries_of(hook)):
                    note(f"the hook {_name_of(hook)}", hook, *([] if place is None else [place]))
        implementation = implementation_of(model)
        functions = attention_functions(implementation)
        if not all(map(is_usual_attention, functions)):
            note(f"its attention function for {implementation!r}", *functions)
        state = (tuple(reasons), model.training, implementation, tuple(map(contents_of, things)))
        return cls(tuple(reasons), state if reasons else (), tuple(things))


_PLAIN_WEIGHTS = {type(None), torch.Tensor, nn.Parameter}
# Classes of caches, whose methods others may replace.
_CACHES = (DynamicCache, DynamicCache.__mro__[1], DynamicLayer, DynamicSlidingWindowLayer)
# For each class and module of Python what it held when it was last looked at, and what of that is of others.
_functions: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[int], list[Any]]] = weakref.WeakKeyDictionary()


def _foreign_functions(holder: Any) -> list[Any]:
    """What can be called in a module of Python, or a class of a library, and is from libraries that are not trusted."""
    values = list(vars(holder).values())
    ids = list(map(id, values))
    before = _functions.get(holder)
    if before is None or before[1] != ids:
        is_theirs = isinstance(holder, type) and not _is_trusted(library_of(holder))
        candidates = [] if is_theirs else [value for value in values if callable(value) and not isinstance(value, type)]
        theirs = [function for function in candidates if not all(map(_is_trusted, libraries_of(function)))]
        _functions[holder] = before = values, ids, theirs
    return before[2]


# Of a model that nothing is known of.
UNKNOWN = Unseen(("its structure",), ())


def why_plain(model: PreTrainedModel) -> str:
    """Returns why transformers' own loop has to decode, as far as that is seen without a forward; else empty."""
    kind: Any = type(model)
    name = kind.__name__
    if why := why_unusable():
        return why
    sample, usual = (loop_of(one) for one in (kind, GenerationMixin))
    if sample is not usual or {*libraries_of(sample)} != {"transformers"}:
        return f"{name} has a decode loop of its own (`_sample`)"
    for method in STEP_METHODS:
        # PEFT sets one on the model inside, which calls that of the class.
        steps = (getattr(kind, method), vars(model).get(method))
        if any(step is not None and not {*libraries_of(step)} <= {"transformers", "peft", "torch"} for step in steps):
            return f"{name} has a `{method}` of its own, which plain generate calls for each token"
    takes = _parameters_of(kind.forward)
    if not {*CACHE_NAMES, "**"} & takes:
        return f"{name} takes no cache"
    return ""


@lru_cache
def _parameters_of(forward: Any) -> frozenset[str]:
    parameters = inspect.signature(forward).parameters.values()
    return frozenset("**" if one.kind is one.VAR_KEYWORD else one.name for one in parameters)


def _is_trusted(library: str) -> bool:
    return library in ("", "None") or library in _TRUSTED or library in _IMPORTED or library in sys.stdlib_module_names


@lru_cache(1024)
def _methods_of(kind: Any) -> frozenset[str]:
    return frozenset(name for base in kind.__mro__ for name, value in vars(base).items() if callable(value))


@lru_cache(1024)
def _is_foreign(kind: Any) -> bool:
    """Whether a class of modules is not of a library that is trusted, PEFT's but no tuner layer, or mixes tokens."""
    if library_of(kind) == "peft":
        return not {base.__name__ for base in kind.__mro__} & _TUNER_LAYERS
    return library_of(kind) not in _TRUSTED or issubclass(kind, _MIXING)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _treats_rows_alone(model: PreTrainedModel, weight: Any) -> bool:
    """Whether products with weights of a class do not depend on what else is multiplied, seen once for a model."""
    looked_at = _weights.setdefault(model, {})
    if type(weight) not in looked_at:
        try:
            generator = torch.Generator("cpu").manual_seed(0)
            rows = torch.randn(2, weight.shape[-1], generator=generator, dtype=torch.float32, device="cpu")
            rows[1] *= 30
            rows = rows.to(weight.device, weight.dtype)
            with torch.no_grad():
                together, alone = (nn.functional.linear(given, weight)[0].float() for given in (rows, rows[:1]))
            rounding = _ROUNDINGS * torch.finfo(weight.dtype).eps
            looked_at[type(weight)] = bool((together - alone).abs().max() <= rounding * alone.abs().max())
        except Exception:  # which weights of others may raise in any operation
            looked_at[type(weight)] = False
    return looked_at[type(weight)]


# For each model the classes of its weights, and whether they do so.
_weights: weakref.WeakKeyDictionary[PreTrainedModel, dict[type, bool]] = weakref.WeakKeyDictionary()
_ROUNDINGS = 8


def _global_hooks() -> Iterator[Any]:
    yield from list(nn.modules.module._global_forward_pre_hooks.values())
    yield from list(nn.modules.module._global_forward_hooks.values())
