"""What the tests of this package have not seen of a model and of the code that runs with it.

Drafts are verified several tokens at once, from stored states, in trees, and in rows of different lengths. That this
leaves logits as they are is tested for some classes of transformers. Everything else is of two kinds: a model's own
code is compared before it drafts, see :mod:`~hf_selfspec.generate.probation`; what was attached from outside may count
forwards, or record what it sees, and is left to plain ``generate``.
"""

from __future__ import annotations

import re
import sys
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..model.attention.interface import attention_functions, is_of_transformers, is_sdpa_of_torch
from ..model.internals import (
    STEP_METHODS,
    attention_implementation,
    loop_of,
    modes_of_torch,
    operations_of_torch,
    why_unusable,
)
from ..model.module_tools import (
    ROW_BLIND,
    ModelView,
    forward_of_others,
    forward_parameters,
    global_hooks,
    is_trusted,
    libraries_of,
    library_of,
    once_for_each,
)
from ..model.prompt import CACHE_NAMES

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
# Libraries of which models are built (quantised layers, kernels, blocks), or that change a forward for training. They
# keep nothing of what they see.
_OF_MODELS = """
aqlm auto_gptq auto_round awq bitsandbytes causal_conv1d compressed_tensors eetq einops fbgemm_gpu fla flash_attn
gptqmodel hqq intel_extension_for_pytorch kernels liger_kernel mamba_ssm neural_compressor optimum peft quark
sageattention spqr_quant torchao triton trl vptq xformers"""
_PARTS = frozenset(_OF_MODELS.split())
_MIXING = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, torch.jit.ScriptModule)
_MODELS = "transformers.models."
# Where others may replace functions, beside the files of models: all of torch that computes.
_PLACES = ("torch", "torch.nn.functional", "transformers.masking_utils", "transformers.integrations.sdpa_attention")


@dataclass(frozen=True)
class Unseen:
    """What was not seen of a model.

    Attributes:
        own: what of the model's own code that is, in words.
        attached: what was attached to it from outside.
        holders: the functions and objects of both, whose contents may change what they do.
    """

    own: tuple[str, ...]
    attached: tuple[str, ...] = ()
    holders: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.own or self.attached)

    def __str__(self) -> str:
        return ", ".join(self.own + self.attached)

    @property
    def why_plain(self) -> str:
        """Why plain ``generate`` serves a model with what is attached to it; empty if nothing is."""
        if not self.attached:
            return ""
        return (
            f"{', '.join(self.attached)} may count forwards, or record what goes through the model, and drafts would "
            "change both. If it does neither, pass SelfSpec(trust=True), which compares it with plain generate once."
        )

    @classmethod
    def of(cls, view: ModelView) -> Unseen:
        """Looks at the class, modules, weights, hooks, functions and attention of a model, in each call anew."""
        model, modules, classes = view.model, view.modules, set[Any](map(type, view.modules))
        own: dict[str, None] = {}
        attached: dict[str, None] = {}
        holders: list[Any] = []
        # FSDP makes classes of its own of a model's.
        model_class: Any = next(base for base in type(model).__mro__ if library_of(base) != "torch")
        libraries = _PARTS | ROW_BLIND | ({library_of(model_class)} - {"transformers"})

        def note(reason: str, is_own: bool, *what: Any) -> None:
            (own if is_own else attached)[reason] = None
            holders.extend(what)

        if not _is_seen(model_class):
            note(f"its class {model_class.__name__}", True, model)
        foreign = {each for each in classes if _is_foreign(each)}
        for module in [module for module in modules if type(module) in foreign] if foreign else ():
            library = library_of(type(module))
            holder = () if library in _PARTS else (module,)  # those keep nothing
            note(f"modules of class {type(module).__name__}", library in libraries, *holder)
        methods_of = {each: _methods_of(each) for each in classes}
        for module in modules:  # thousands, so each is looked at once and briefly
            attributes, type_ = module.__dict__, type(module)
            if not (methods := methods_of[type_]).isdisjoint(attributes):
                for name in methods & attributes.keys():
                    method = forward_of_others(module) if name == "forward" else attributes[name]
                    of = set() if method is None else {*libraries_of(method, but=getattr(type_, name, None))}
                    if not of <= _METHODS_OF:
                        note(f"the {name} {_name_of(method)} of a module", of <= _PARTS | _METHODS_OF, method, module)
        for weight_class in _weight_classes(view) - _PLAIN_WEIGHTS:
            note(f"weights of class {weight_class.__name__}", True)
        files = {each.__module__ for each in classes if _is_of_models(each)}
        for file in files - {each.__module__ for each in classes if issubclass(each, PreTrainedModel)}:
            note(f"modules of {file.removeprefix(_MODELS)}", True)
        decoder: Any = type(model.get_decoder())
        if _is_of_models(decoder) and not _is_seen(decoder):
            note(f"its decoder's class {decoder.__name__}", True)
        bases = {base for each in classes for base in each.__mro__} - {object}
        named = [sys.modules[name] for name in (*_PLACES, *files) if name in sys.modules]
        for place in (*named, torch.Tensor, *(bases - {GenerationMixin}), *_CACHES):
            for function in _foreign_functions(place):
                is_own = all(library in _PARTS or is_trusted(library) for library in libraries_of(function))
                users = [module for module in modules if isinstance(place, type) and isinstance(module, place)]
                note(f"{_name_of(function)} in {place.__name__}", is_own, function, *users)
        for *owner, hook in (*view.hooks, *((hook,) for hook in global_hooks())):
            if not _HOOKS_OF.issuperset(of := set(libraries_of(hook))):
                note(f"the hook {_name_of(hook)}", of <= _PARTS | _HOOKS_OF, hook, *owner)
        for mode in modes_of_torch():
            if not is_trusted(library_of(mode)):
                note(f"the mode {type(mode).__name__}", False, mode)
        implementation = attention_implementation(model.config.get_text_config(decoder=True))
        functions = attention_functions(implementation)
        if not (all(map(is_of_transformers, functions)) and is_sdpa_of_torch()):
            note(f"its attention function for {implementation!r}", True, *functions, model.config)
        return cls(tuple(own), tuple(attached), tuple(holders))


# Names that code of forwards does not use, so that others may replace them: public ones, and what prints. Nor does it
# use those that were added to torch's and transformers' own classes since this was imported.
_PUBLIC = {name for kind in (nn.Module, PreTrainedModel, GenerationMixin) for name in dir(kind) if name[0] != "_"}
_NOT_IN_FORWARDS = _PUBLIC - {"forward"} | {"__init__", "__repr__", "__str__", "__format__", "__dir__"}
_AT_FIRST: dict[Any, set[str]] = {kind: set(vars(kind)) for kind in (torch.Tensor, nn.Module, PreTrainedModel)}
# Libraries whose hooks modules may have, and whose functions may be set on them.
_HOOKS_OF = ROW_BLIND
_METHODS_OF = ROW_BLIND | {"peft", "builtins", "functools"}
_PLAIN_WEIGHTS = {torch.Tensor, nn.Parameter}
# Classes of caches, whose methods others may replace.
_CACHES = (DynamicCache, DynamicCache.__mro__[1], DynamicLayer, DynamicSlidingWindowLayer)
# For each class and module of Python the values in it when it was last looked at, and the foreign functions.
_functions: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[Any]]] = weakref.WeakKeyDictionary()


def _foreign_functions(place: Any) -> list[Any]:
    """What can be called in a module of Python, or a class of a library, and is from libraries that are not trusted."""
    if isinstance(place, type) and not is_trusted(library_of(place)):
        return []
    values, before = list(vars(place).values()), _functions.get(place)
    try:
        is_as_before = before is not None and before[0] == values  # of the same objects, in most cases
    except Exception:  # of objects that cannot be compared
        is_as_before = False
    if before is None or not is_as_before:
        names = operations_of_torch() if place is torch else vars(place).keys() - _NOT_IN_FORWARDS
        names = names & _AT_FIRST.get(place, names)
        functions = [value for name, value in list(vars(place).items()) if name in names and callable(value)]
        theirs = [each for each in functions if not all(map(is_trusted, libraries_of(each)))]
        _functions[place] = before = values, [each for each in theirs if not isinstance(each, type)]
    return before[1]


# For a model that could not be looked at.
UNKNOWN = Unseen(("its structure",))


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


def _weight_classes(view: ModelView) -> set[type]:
    """The classes of a model's weights; of sharded ones (FSDP2, tensor parallelism) those of their parts."""
    sharded = {each for each in view.weights if each.__module__.startswith("torch.distributed.tensor")}
    weights = (weight for module in view.modules for weight in module._parameters.values()) if sharded else ()
    parts = {type(cast(Any, weight).to_local()) for weight in weights if type(weight) in sharded}
    return (view.weights.keys() - sharded) | parts


@once_for_each
def _methods_of(type_: Any) -> frozenset[str]:
    names = frozenset(name for base in type_.__mro__ for name, value in vars(base).items() if callable(value))
    return names - _NOT_IN_FORWARDS


@once_for_each
def _is_foreign(type_: Any) -> bool:
    """Whether modules of a class may mix tokens: of a library that is not trusted, of PEFT but no tuner layer, of torch
    with several tokens as its input or with numbers of fewer bits."""
    if library_of(type_) == "peft":
        return not {base.__name__ for base in type_.__mro__} & _TUNER_LAYERS
    is_mixing = issubclass(type_, _MIXING) or str(type_.__module__).startswith("torch.ao.")
    return is_mixing or library_of(type_) not in ROW_BLIND


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
