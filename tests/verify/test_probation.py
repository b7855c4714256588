"""Models, hooks and attention that no other test has: ids are plain ``generate``'s, with drafts or with a reason."""

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama

import hf_selfspec
from helpers import architectures, multimodal
from helpers.compiled import QUICK
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.attention import speculative_attention
from hf_selfspec.model.forward_pass import partial_forwards
from hf_selfspec.model.graphs import graphs_of
from hf_selfspec.model.unseen import SEEN, Unseen
from hf_selfspec.verify import probation

ROW = {name: value[1:2] for name, value in ragged_batch().items()}
BATCH = ragged_batch()
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
LLAMA = functools.partial(tiny_llama, 4, factor=0.5)
SPECS = {"default": SelfSpec, "exit": lambda: SelfSpec(EarlyExit(3), FixedLength(4))}


def of_class(kind: type[LlamaForCausalLM], layers: int = 4) -> LlamaForCausalLM:
    llama = tiny_llama(layers, factor=0.5)
    model = kind(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    return model


def why_plain(model: Any, spec: SelfSpec, **options: Any) -> str:
    """The reason for which plain generate served a call, if it did; the ids are its own."""
    options = OPTIONS | options
    assert torch.equal(model.generate(**ROW, **options, assistant=spec), model.generate(**ROW, **options))
    assert spec.stats is not None
    return spec.stats.left_to_generate


# Loops


class OwnEmbeddings(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"inputs_embeds": self.get_input_embeddings()(inputs.pop("input_ids")).flip(-1)}


class CountsSteps(LlamaForCausalLM):
    def forward(self, *args: Any, step: int = 0, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(step % 5, -1)
        return output

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        later = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return later | {"step": later.get("step", 0) + 1}


class Signs(LlamaForCausalLM):
    def _sample(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids = super()._sample(input_ids, *args, **kwargs)
        return torch.cat([ids, ids.new_full((len(ids), 1), 7)], dim=1)


def patched_instance() -> LlamaForCausalLM:
    model = LLAMA()
    usual = model.prepare_inputs_for_generation

    @functools.wraps(usual)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = usual(*args, **kwargs)
        return inputs | {"inputs_embeds": self.get_input_embeddings()(inputs.pop("input_ids")).flip(-1)}

    model.prepare_inputs_for_generation = MethodType(prepare, model)
    return model


# Forwards


class WithoutCache(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=False)


class LastLogits(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[:, -1:]
        return output


class SomethingBefore(LlamaForCausalLM):
    """Its decoder alone has other states: what it gets is scaled first."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=3 * embedded, **kwargs)


class Unchanged(LlamaForCausalLM):
    pass


class Counting(nn.Module):
    """An embedding that counts positions itself."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.count = embedding, 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count = ids.shape[1] + (self.count if ids.shape[1] < 6 else 0)
        places = torch.arange(self.count - ids.shape[1], self.count)
        return self.embedding(ids) + 0.3 * torch.sin(places[:, None] / (1 + torch.arange(64)))


class Scaled(nn.Module):
    """A linear layer in eight bits, by the largest number of all tokens of a forward."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().amax() / 7
        return self.linear((states / scale).round() * scale)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 1.1 * self.inner(ids)


def with_embedding(wrapper: Callable[[Any], nn.Module]) -> LlamaForCausalLM:
    model = LLAMA()
    model.model.embed_tokens = wrapper(model.model.embed_tokens)
    return model


def with_scaled_layers() -> LlamaForCausalLM:
    model = LLAMA()
    for layer in model.model.layers:
        layer.mlp.down_proj = Scaled(layer.mlp.down_proj)
    return model


def with_a_forward_of_its_own() -> LlamaForCausalLM:
    model = LLAMA()
    usual = model.model.layers[2].mlp.forward

    @functools.wraps(usual)
    def forward(states: torch.Tensor) -> torch.Tensor:
        return usual(states) * states.shape[1]

    model.model.layers[2].mlp.forward = forward
    return model


def add_hook_to(model: LlamaForCausalLM) -> LlamaForCausalLM:
    add_hook_to_module(model.model.layers[2].mlp, ModelHook())
    return model


def with_another_method() -> Any:
    """Of a module, which its forward calls."""
    model = architectures.build("falcon")
    attention: Any = model.transformer.h[2].self_attention
    usual = attention._split_heads
    attention._split_heads = lambda fused: usual(fused * fused.shape[1])
    return model


def with_a_block_of_another_family() -> LlamaForCausalLM:
    model = LLAMA()
    model.model.norm = GemmaRMSNorm(64)
    return model


def gpt() -> OpenAIGPTLMHeadModel:
    torch.manual_seed(0)
    config = OpenAIGPTConfig(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=4, n_head=4)
    return OpenAIGPTLMHeadModel(config).eval()


# Hooks

_DIRECTION = torch.randn(64, generator=torch.Generator().manual_seed(3))


def steered(wanted: Callable[[int], bool], columns: Any = slice(None)) -> Callable[[], LlamaForCausalLM]:
    def make() -> LlamaForCausalLM:
        model = LLAMA()

        def hook(module: Any, args: Any, output: Any) -> Any:
            if wanted(output.shape[1]):
                output = output.clone()
                output[:, columns] += 3 * _DIRECTION
            return output

        model.model.layers[2].register_forward_hook(hook)
        return model

    return make


def with_last_logits_changed() -> LlamaForCausalLM:
    model = LLAMA()

    def hook(module: Any, args: Any, output: Any) -> Any:
        output.logits[:, -1, 5:40] -= 2.0
        return output

    model.register_forward_hook(hook)
    return model


def pruned(only: Callable[[Any], bool], least: int = 0) -> Callable[[], LlamaForCausalLM]:
    """With hooks that compress what the cache keeps of the prompt, or of more than ``least`` tokens."""

    def make() -> LlamaForCausalLM:
        model = tiny_llama(4, factor=1.0)

        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            layer = cache.layers[module.layer_idx]
            if not only(layer) or (layer.keys.shape[2] <= least if least else kwargs["hidden_states"].shape[1] == 1):
                return output
            kept = layer.keys.norm(dim=-1).topk(3, dim=-1).indices.sort(-1).values[..., None]
            kept = kept.expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)
            return output

        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(hook, with_kwargs=True)
        return model

    return make


def recorded() -> LlamaForCausalLM:
    model = LLAMA()
    seen: list[torch.Size] = []
    model.model.layers[2].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    return model


# What layers call


def replaced(owner: Any, name: str, function: Any) -> AbstractContextManager[Any]:
    stack, usual = ExitStack(), getattr(owner, name)
    stack.callback(setattr, owner, name, usual)
    setattr(owner, name, function(usual))
    return stack


def registered(interface: Any, function: Any, usual: Any) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.callback(interface.register, "sdpa", usual)
    interface.register("sdpa", function)
    return stack


def other_values(usual: Any) -> Any:
    return lambda q, k, v, *args, **kwargs: usual(q, k, 3 * v.roll(1, -1), *args, **kwargs)


@functools.wraps(sdpa_attention_forward)
def wrapped_attention(*args: Any, **kwargs: Any) -> Any:
    """By its names that of transformers."""
    output, weights = sdpa_attention_forward(*args, **kwargs)
    return 1.7 * output, weights


def registered_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, q, k, 3 * v.roll(1, -1), mask, **kwargs)


def nearest_alone(*args: Any, **kwargs: Any) -> Any:
    """A mask function that also hides what is further away than 4 tokens."""
    mask = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
    return mask & ~torch.ones_like(mask).tril(mask.shape[-1] - mask.shape[-2] - 4)


def rotated_by_count(usual: Any) -> Any:
    def rotate(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        q, k = usual(q, k, *args, **kwargs)
        return q * (1 + 0.2 * q.shape[2]), k

    return rotate


def own_mask(usual: Any) -> Any:
    """As models of the Hub make it: from the length of the cache and the mask of the prompts."""

    def mask(config: Any, inputs_embeds: Any, attention_mask: Any, past: Any = None, **kwargs: Any) -> Any:
        past = kwargs.get("cache", kwargs.get("past_key_values", past))
        (b, s), seen = inputs_embeds.shape[:2], 0 if past is None else past.get_seq_length()
        allowed = torch.ones(s, seen + s, dtype=torch.bool).tril(seen).expand(b, 1, -1, -1)
        return allowed if attention_mask is None else allowed & attention_mask[:, None, None].bool()

    return mask


# What makes a model, what is around its calls, and a part of the reason for which plain serves;
# empty for drafts, ``None`` for either.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]], str | None]] = {
    "own embeddings": (lambda: of_class(OwnEmbeddings), nullcontext, "prepare_inputs_for_generation"),
    "own embeddings of an instance": (patched_instance, nullcontext, "prepare_inputs_for_generation"),
    "counted steps": (lambda: of_class(CountsSteps), nullcontext, "_update_model_kwargs"),
    "own loop": (lambda: of_class(Signs), nullcontext, "decode loop of its own"),
    "no cache": (lambda: of_class(WithoutCache), nullcontext, "leave the cache empty"),
    "no argument for a cache": (gpt, nullcontext, "leave the cache empty"),
    "last logits": (lambda: of_class(LastLogits), nullcontext, "logits of 1 of"),
    "something before the decoder": (lambda: of_class(SomethingBefore), nullcontext, ""),
    "a class without changes": (lambda: of_class(Unchanged), nullcontext, ""),
    "counted positions": (lambda: with_embedding(Counting), nullcontext, "Counting"),
    "embedding in a wrapper": (lambda: with_embedding(Wrapped), nullcontext, ""),
    "layers scaled by all tokens": (with_scaled_layers, nullcontext, "Scaled"),
    "a forward of its own": (with_a_forward_of_its_own, nullcontext, "forward"),
    "a method of a module": (with_another_method, nullcontext, "the _split_heads"),
    "a forward below accelerate's": (
        lambda: add_hook_to(with_a_forward_of_its_own()), nullcontext, "forward",
    ),
    "a block of another family": (with_a_block_of_another_family, nullcontext, ""),
    "hook on generated tokens": (steered(lambda count: count == 1), nullcontext, "hook"),
    "hook on prompts": (steered(lambda count: count > 1), nullcontext, "hook"),
    "hook on last tokens": (steered(lambda count: True, -1), nullcontext, "hook"),
    "hook on all tokens": (steered(lambda count: True), nullcontext, ""),
    "hook on the last logits": (with_last_logits_changed, nullcontext, "hook"),
    "hook that records": (recorded, nullcontext, ""),
    "hook that prunes": (pruned(lambda layer: True), nullcontext, "hook"),
    "hook that prunes where there are keys": (pruned(lambda layer: layer.keys is not None), nullcontext, "hook"),
    "hook that prunes later": (pruned(lambda layer: True, 14), nullcontext, "hook"),
    "other kernel": (
        LLAMA, lambda: replaced(torch.nn.functional, "scaled_dot_product_attention", other_values), "",
    ),
    "other attention": (
        LLAMA, lambda: registered(AttentionInterface, registered_attention, sdpa_attention_forward), "",
    ),
    "attention that calls itself transformers'": (
        LLAMA, lambda: registered(AttentionInterface, wrapped_attention, sdpa_attention_forward), "",
    ),
    "other masks": (LLAMA, lambda: registered(AttentionMaskInterface, nearest_alone, sdpa_mask), None),
    "own masks": (LLAMA, lambda: replaced(modeling_llama, "create_causal_mask", own_mask), ""),
    "other rotation": (LLAMA, lambda: replaced(modeling_llama, "apply_rotary_pos_emb", rotated_by_count), "rotate"),
}  # fmt: skip


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("kind", "spec", "rows"),
    [
        pytest.param(kind, spec, rows, marks=pytest.mark.slow if sum(places) % 6 else ())
        for *places, kind, spec, rows in (
            (one, other, 2 * third, kind, spec, rows)
            for one, kind in enumerate(KINDS)
            for other, spec in enumerate(SPECS)
            for third, rows in enumerate(("row", "batch", "attached"))
        )
    ],
)
def test_ids_are_plains(kind: str, spec: str, rows: str) -> None:
    make, around, why = KINDS[kind]
    if rows == "batch" and kind in ("counted positions", "no cache"):
        rows = "row"  # plain generate itself counts the padding, or fails
    model, prompts, assistant = make(), BATCH if rows == "batch" else ROW, SPECS[spec]()
    with around():
        expected = model.generate(**prompts, **OPTIONS, pad_token_id=0)
        with hf_selfspec.attach(model, assistant) if rows == "attached" else nullcontext():
            options = {} if rows == "attached" else {"assistant": assistant}
            assert torch.equal(model.generate(**prompts, **OPTIONS, pad_token_id=0, **options), expected)
    stats = assistant.stats
    assert stats is not None
    assert (why or "") in stats.left_to_generate
    assert why is None or bool(stats.left_to_generate) == bool(why)
    assert stats.checked or stats.left_to_generate


def test_layers_that_are_never_called(quiet: None) -> None:
    model = LLAMA()
    inner = model.model

    def forward(input_ids: Any = None, **kwargs: Any) -> Any:
        if (cache := kwargs.get("cache", kwargs.get("past_key_values"))) is not None:
            cache.update(*[torch.zeros(len(input_ids), 1, input_ids.shape[1], 4)] * 2, 0)
        states = inner.embed_tokens(input_ids)
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=states)

    inner.forward = forward
    for make in SPECS.values():
        assert "never called" in why_plain(model, make())


def test_a_model_is_checked_once_and_within_sixteen_forwards(quiet: None) -> None:
    """And hooks that record see nothing of that."""
    model, calls, seen = of_class(Unchanged), itertools.count(), list[torch.Size]()

    def hook(module: Any, args: Any, output: Any) -> None:
        next(calls)  # which cannot be put back
        seen.append(output.logits.shape)

    model.register_forward_hook(hook)
    for prompts in (ROW, BATCH):
        counts = []
        for _ in range(2):
            seen.clear()
            before = next(calls)
            model.generate(**prompts, **OPTIONS, assistant=SelfSpec.lookup())
            counts.append(next(calls) - before - 1 - len(seen))
        assert 0 < counts[0] <= 16
        assert counts[1] == 0


# For each place of a count, what counts there once more, and returns how often it has.
COUNTERS: dict[str, Callable[[Any, Any], int]] = {
    "attribute": lambda hook, module: setattr(hook, "number", hook.number + 1) or hook.number,
    "class": lambda hook, module: setattr(_Counts, "of_class", _Counts.of_class + 1) or _Counts.of_class,
    "module": lambda hook, module: setattr(module, "count", module.count + 1) or module.count,
    "list": lambda hook, module: hook.items.append(1) or len(hook.items),
    "deque": lambda hook, module: hook.last.append(len(hook.last)) or len(hook.last),
    "set": lambda hook, module: hook.different.add(len(hook.different)) or len(hook.different),
    "array": lambda hook, module: int(np.add(hook.array, 1, out=hook.array)[0]),
    "iterator": lambda hook, module: next(hook.iterator),
}


class _Counts:
    """Steers after the first 8 forwards."""

    of_class = 0

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output + 3 * _DIRECTION if COUNTERS[self.where](self, module) > 8 else output

    def begin(self, module: Any) -> None:
        self.number = _Counts.of_class = module.count = 0
        # One of them alone, since any may be a reason.
        places: dict[str, tuple[str, Any]] = {
            "list": ("items", []),
            "deque": ("last", deque()),
            "set": ("different", set()),
            "array": ("array", np.zeros(1)),
            "iterator": ("iterator", itertools.count(1)),
        }
        if self.where in places:
            setattr(self, *places[self.where])


@pytest.mark.parametrize("where", [*COUNTERS, "closure", "switch"])
def test_a_hook_that_counts_forwards(quiet: None, where: str) -> None:
    model, number = LLAMA(), 0
    counts = _Counts(where)

    def hook(module: Any, args: Any, output: Any) -> Any:
        nonlocal number
        number += 1
        return output + 3 * _DIRECTION if number > 8 else output

    def switch(module: Any, args: Any, output: Any) -> Any:
        """Steers after its first prompt."""
        nonlocal number
        is_later, number = isinstance(number, str), "later"  # type: ignore[assignment]  # a count becomes a switch
        return output + 3 * _DIRECTION if is_later else output

    model.model.layers[2].register_forward_hook({"closure": hook, "switch": switch}.get(where, counts))
    texts, spec = [], SelfSpec.lookup()
    for assistant in (None, spec):
        counts.begin(model.model.layers[2])
        number = 0
        texts.append(model.generate(**ROW, **OPTIONS, assistant=assistant))
    assert torch.equal(*texts)
    assert spec.stats is not None
    assert spec.stats.left_to_generate


class MaxScaled(nn.Parameter):
    """Rounds what is multiplied with it by the largest number of all tokens."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.nn.functional.linear:
                scale = args[0].abs().amax() / 7
                args = ((args[0] / scale).round() * scale, *args[1:])
            return func(*args, **(kwargs or {}))


def test_weights_of_a_class_that_looks_at_all_tokens(quiet: None) -> None:
    model = LLAMA()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = MaxScaled(layer.mlp.down_proj.weight.detach(), requires_grad=False)
    assert "weights of class MaxScaled" in why_plain(model, SelfSpec.lookup())


def test_what_gradients_need_stays(quiet: None) -> None:
    model, vector = LLAMA(), nn.Parameter(torch.ones(64))
    model.model.layers[2].register_forward_hook(lambda module, args, output: output * vector)
    loss = model(**ROW, labels=ROW["input_ids"]).loss
    model.generate(**ROW, **OPTIONS, assistant=SelfSpec())
    loss.backward()
    assert vector.grad is not None


class WithoutDecoder(LlamaForCausalLM):
    def get_decoder(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_model_that_cannot_be_looked_at(quiet: None) -> None:
    model = of_class(WithoutDecoder)
    expected = model.generate(**ROW, **OPTIONS)
    assert torch.equal(model.generate(**ROW, **OPTIONS, assistant=SelfSpec()), expected)
    with hf_selfspec.attach(model, SelfSpec()):
        assert torch.equal(model.generate(**ROW, **OPTIONS), expected)


class Gated(LlamaForCausalLM):
    """Does something else for several tokens as far as a weight lets it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.gate * output.logits.shape[1] * output.logits.roll(1, -1)
        return output


def test_weights_that_were_trained_are_checked_again(quiet: None) -> None:
    model = Gated(LLAMA().config).eval()
    for gate in (0.0, 1.0):
        with torch.no_grad():
            model.gate.fill_(gate)
        assert bool(why_plain(model, SelfSpec.lookup())) is bool(gate)


def test_a_hook_that_reads_the_cache_later(quiet: None) -> None:
    """Not in silence, since the keys of drafts are there as well."""
    model = LLAMA()

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache.get_seq_length() > 16:
            cache.layers[module.layer_idx].values.mul_(2)

    model.model.layers[1].self_attn.register_forward_hook(hook, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="reads the values in the cache"):
        model.generate(**ROW, **OPTIONS, assistant=SelfSpec.lookup())


@pytest.mark.machine("graphs_are_taken")
def test_graphs_of_what_was_not_seen_are_compared(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model's own code, when they are new."""
    runs: list[int] = []

    def compiled(graph: Any, **_: Any) -> Any:
        return lambda *inputs: [runs.append(1), [2 * value for value in graph(*inputs)]][1]

    monkeypatch.setattr(torch, "compile", compiled)
    model, spec = of_class(Unchanged, 6), SelfSpec(EarlyExit(2), FixedLength(3), compile=QUICK)
    options = OPTIONS | {"max_new_tokens": 16}
    expected = model.generate(**ROW, **options)
    for _ in range(3):
        assert torch.equal(model.generate(**ROW, **options, assistant=spec), expected)
    assert runs
    assert graphs_of(model, QUICK).refused.endswith("not those of the model's own code")


def test_the_language_model_inside_is_looked_at() -> None:
    settings = multimodal.MODELS["llava"][1]
    text = {name: value for name, value in settings["text_config"].items() if name != "model_type"}
    config = AutoConfig.for_model("llava", **settings | {"text_config": {"model_type": "minimax", **text}})
    assert "its decoder's class MiniMaxModel" in Unseen.of(LlavaForConditionalGeneration(config)).reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_is_checked_again(quiet: None, dtype: torch.dtype) -> None:
    """Steering that is off in the first call, of a hook that stays."""
    model, direction = LLAMA().to(dtype), _DIRECTION.to(dtype)

    class Hook:
        strength = 0.0

        def __call__(self, module: Any, args: Any, output: Any) -> Any:
            return output + self.strength * direction if output.shape[1] == 1 else output

    hook = Hook()
    model.model.layers[2].register_forward_hook(hook)
    for strength, is_drafted in ((0.0, True), (4.0, False), (0.0, True)):
        hook.strength, spec = strength, SelfSpec.lookup()
        ids = model.generate(**ROW, **OPTIONS, assistant=spec)
        assert spec.stats is not None
        assert bool(spec.stats.left_to_generate) is not is_drafted
        assert dtype is torch.bfloat16 or torch.equal(ids, model.generate(**ROW, **OPTIONS))


def test_a_short_call_is_left_to_plain_without_a_warning() -> None:
    assert "too few" in why_plain(of_class(Unchanged), SelfSpec(), max_new_tokens=probation.TOKENS - 1)


def test_what_another_thread_has_installed_hides_nothing(quiet: None) -> None:
    """Ours is above a forward of others while any thread generates."""
    model = with_a_forward_of_its_own()
    before = Unseen.of(model)
    with partial_forwards(model, Anatomy.of(model)), speculative_attention():
        assert Unseen.of(model) == before


def test_random_numbers_are_those_of_plain(quiet: None) -> None:
    """What is left to plain after a check draws what it would have drawn."""
    model, options = steered(lambda count: count == 1)(), OPTIONS | {"do_sample": True}
    torch.manual_seed(4)
    expected = model.generate(**ROW, **options)
    torch.manual_seed(4)
    assert torch.equal(model.generate(**ROW, **options, assistant=SelfSpec()), expected)


def test_models_of_the_tests_are_not_checked(quiet: None) -> None:
    """The list of seen classes is that of the tests; nothing about them is new."""
    names = set()
    kinds = ((text_model, architectures.ARCHITECTURES), (multimodal.undamped, multimodal.MODELS))
    for make, table in kinds:
        for name in table:
            try:
                with torch.device("meta"):  # no weights are drawn
                    model = make(name)
            except pytest.skip.Exception:  # not in this release of transformers
                continue
            names.add(probation_name(model))
            assert Unseen.of(model).reasons == (), name
    assert names <= SEEN


def text_model(name: str) -> Any:
    return AutoModelForCausalLM.from_config(architectures.config_of(name))


def probation_name(model: Any) -> str:
    name = type(model).__name__
    for end in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"):
        name = name.removesuffix(end)
    return name
