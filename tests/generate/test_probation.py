"""Models, hooks and attention that no other test has: ids are plain ``generate``'s, with drafts or with a reason."""

import copy
import functools
import gc
import itertools
import random
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import hf_selfspec
from helpers import architectures, models_table, multimodal
from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.generate.contents import Contents
from hf_selfspec.generate.unseen import SEEN, Unseen
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.attention.interface import speculative_attention
from hf_selfspec.model.forward_pass import partial_forwards
from hf_selfspec.model.module_tools import ModelView

pytestmark = [pytest.mark.attached, pytest.mark.filterwarnings("ignore")]

ROW = {name: value[1:2] for name, value in ragged_batch().items()}
BATCH = ragged_batch()
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
LLAMA = functools.partial(tiny_llama, 4, factor=0.5)
FALCON = functools.partial(architectures.build, "falcon")
SPECS = {"default": SelfSpec, "exit": lambda: SelfSpec(EarlyExit(3), FixedLength(4))}


def why_left(model: Any, spec: SelfSpec, inputs: Any = ROW, is_attached: bool = False, **options: Any) -> str:
    """Why plain ``generate`` serves a call, empty if it is drafted; the ids are plain's."""
    plain = model.generate(**inputs, **OPTIONS, **options, assistant=False)
    with hf_selfspec.attach(model, spec) if is_attached else nullcontext():
        ids = model.generate(**inputs, **OPTIONS, **options, assistant=None if is_attached else spec)
    assert torch.equal(ids, plain)
    return spec.stats.left_to_generate


def of_class(kind: type[LlamaForCausalLM], layers: int = 4) -> LlamaForCausalLM:
    llama = tiny_llama(layers, factor=0.5)
    model = kind(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    return model


# Loops


class OwnEmbeddings(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"inputs_embeds": self.get_input_embeddings()(inputs.pop("input_ids")).flip(-1)}


class Signs(LlamaForCausalLM):
    def _sample(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids = super()._sample(input_ids, *args, **kwargs)
        return torch.cat([ids, ids.new_full((len(ids), 1), 7)], dim=1)


# Forwards


class WithoutCache(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=False)


def with_logits(change: Callable[[Any, torch.Tensor], torch.Tensor], **members: Any) -> type[LlamaForCausalLM]:
    """A class of a model that changes its logits."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = LlamaForCausalLM.forward(self, *args, **kwargs)
        output.logits = change(self, output.logits)
        return output

    return type("Changing", (LlamaForCausalLM,), {"forward": forward} | members)


UNCHANGED = type("Unchanged", (LlamaForCausalLM,), {})
LAST_LOGITS = with_logits(lambda self, logits: logits[:, -1:])


class PassesOn(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class WithoutDecoder(LlamaForCausalLM):
    def get_decoder(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Scaled(nn.Parameter):
    """Scales what is multiplied with it by the number of tokens."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
            return output * args[0].shape[1] if func is torch.nn.functional.linear else output


def with_a_layer_of_another_class() -> LlamaForCausalLM:
    """Which has no keys and values."""
    model = LLAMA()
    model.model.layers[1] = PassesOn()
    return model


def with_another_method(model: Any, module: str, name: str) -> Any:
    """Whose result depends on the number of tokens."""
    of = model.get_submodule(module)
    usual = getattr(of, name)
    setattr(of, name, functools.wraps(usual)(lambda states: usual(states * states.shape[1])))
    return model


def with_weights_of_a_class() -> LlamaForCausalLM:
    model = LLAMA()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = Scaled(layer.mlp.down_proj.weight.detach(), requires_grad=False)
    return model


def with_layers_that_are_never_called() -> LlamaForCausalLM:
    model = LLAMA()
    inner = model.model

    def forward(input_ids: Any = None, **kwargs: Any) -> Any:
        if (cache := kwargs.get("cache", kwargs.get("past_key_values"))) is not None:
            cache.update(*[torch.zeros(len(input_ids), 1, input_ids.shape[1], 4)] * 2, 0)
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=inner.embed_tokens(input_ids))

    inner.forward = forward
    return model


# Hooks

_DIRECTION = torch.randn(64, generator=torch.Generator().manual_seed(3))


def hooked(hook: Callable[..., Any]) -> LlamaForCausalLM:
    model = LLAMA()
    model.model.layers[2].register_forward_hook(hook)
    return model


def steered(wanted: Callable[[int], bool]) -> Callable[[], LlamaForCausalLM]:
    return lambda: hooked(lambda module, args, output: output + 3 * _DIRECTION * wanted(output.shape[1]))


def pruned() -> LlamaForCausalLM:
    """With hooks that compress what the cache keeps of the prompt."""
    model = tiny_llama(4, factor=1.0)

    def compress(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]
        if kwargs["hidden_states"].shape[1] > 1:
            layer.keys, layer.values = layer.keys[:, :, -3:], layer.values[:, :, -3:]

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(compress, with_kwargs=True)
    return model


class Records(list[torch.Size]):
    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.append(output.shape)


# What layers call


@contextmanager
def registered_attention() -> Iterator[None]:
    AttentionInterface.register("sdpa", other_values(sdpa_attention_forward))
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def other_values(usual: Any) -> Any:
    def attention(*args: Any, **kwargs: Any) -> Any:
        of_values = 2 if isinstance(args[0], torch.Tensor) else 3  # behind the module
        values = 3 * args[of_values].roll(1, -1)
        return usual(*args[:of_values], values, *args[of_values + 1 :], **kwargs)

    return attention


def other_positions(query: Any, key: Any, cos: Any, sin: Any, *rest: Any) -> Any:
    return ROTARY(query, key, cos, -sin, *rest)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MLP, HEADS = ("model.layers.2.mlp", "forward"), ("transformer.h.2.self_attention", "_split_heads")
ROTARY = modeling_llama.apply_rotary_pos_emb
SDPA = torch.nn.functional.scaled_dot_product_attention
# What makes a model, what is around its calls, and a part of the reason for which plain serves, empty for drafts: of a
# model's own code, and below of what is attached to one if users trust it.
OWN: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]], str]] = {
    "own embeddings": (lambda: of_class(OwnEmbeddings), nullcontext, "prepare_inputs_for_generation"),
    "own loop": (lambda: of_class(Signs), nullcontext, "decode loop of its own"),
    "no cache": (lambda: of_class(WithoutCache), nullcontext, "leave the cache empty"),
    "last logits": (lambda: of_class(LAST_LOGITS), nullcontext, "logits of 1 of"),
    "a class without changes": (lambda: of_class(UNCHANGED), nullcontext, ""),
    "no decoder": (lambda: of_class(WithoutDecoder), nullcontext, "NotImplementedError"),
    "weights of a class": (with_weights_of_a_class, nullcontext, "several tokens at once differ"),
    "other attention": (LLAMA, registered_attention, ""),
}  # fmt: skip
ATTACHED: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]], str]] = {
    "mode of torch": (LLAMA, Passing, ""),
    "layer of a class": (with_a_layer_of_another_class, nullcontext, ""),
    "a forward of its own": (lambda: with_another_method(LLAMA(), *MLP), nullcontext, "forward"),
    "a method of a module": (lambda: with_another_method(FALCON(), *HEADS), nullcontext, "the _split_heads"),
    "hook on generated tokens": (steered(lambda count: count == 1), nullcontext, "hook"),
    "hook on all tokens": (steered(lambda count: True), nullcontext, ""),
    "hook that records": (lambda: hooked(Records()), nullcontext, "keeps something"),
    "hook that prunes": (pruned, nullcontext, "hook"),
    "layers that are never called": (with_layers_that_are_never_called, nullcontext, "never called"),
    "other kernel": (LLAMA, lambda: patch.object(torch.nn.functional, SDPA.__name__, other_values(SDPA)), ""),
    "other positions": (LLAMA, lambda: patch.object(modeling_llama, ROTARY.__name__, other_positions), ""),
}  # fmt: skip
KINDS = OWN | ATTACHED


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
    if rows == "batch" and kind == "no cache":
        rows = "row"  # plain generate itself fails
    model, assistant = make(), replace(SPECS[spec](), trust=kind in ATTACHED)
    with around():
        left = why_left(model, assistant, BATCH if rows == "batch" else ROW, rows == "attached")
    if "rows at different lengths" not in left:
        assert why in left
        assert bool(left) == bool(why)
    assert assistant.stats.checked or left


@pytest.mark.parametrize("kind", ATTACHED)
def test_what_is_attached_is_left_to_plain(kind: str, no_warnings_yet: None) -> None:
    """With one warning that names it; nothing of ours runs."""
    make, around, _ = ATTACHED[kind]
    model, spec = make(), SelfSpec.lookup()
    with around(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert "may count forwards" in why_left(model, spec, BATCH)
    (message,) = (str(warning.message) for warning in told if "SelfSpec" in str(warning.message))
    named = "mode Passing|class PassesOn|forward Llama|_split_heads|hook (Records|steered|pruned)|other_|with_layers"
    assert re.search(f"({named}).* may count forwards", message)


def test_a_model_is_checked_once_and_within_sixteen_forwards() -> None:
    model, calls = of_class(UNCHANGED), list[int]()

    def hook(module: Any, args: Any, output: Any) -> None:
        calls.append(1)

    hook.__module__ = "torch"  # one that is trusted
    model.register_forward_hook(hook)
    for prompts in (ROW, BATCH):
        counts = []
        for _ in range(2):
            calls.clear()
            spec = SelfSpec.lookup()
            model.generate(**prompts, **OPTIONS, assistant=spec)
            counts.append(len(calls) - spec.stats.verify_passes - 1)
        assert 0 < counts[0] <= 16
        assert counts[1] == 0


# Where own code may count its forwards: what it has for that, and how it counts.
_COUNT, _FORWARDS, _SWITCH = list[int](), 0, False
COUNTERS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "attribute": (0, lambda own: setattr(own, "state", own.state + 1) or own.state),
    "slot": (np.zeros(0), lambda own: counted_on(own.slots)),
    "class": (None, lambda own: counted_on(Slots)),
    "global of an inner function": (
        None, lambda own: (lambda: globals().update(_FORWARDS=_FORWARDS + 1) or _FORWARDS)(),
    ),
    "list": ([], lambda own: own.state.append(1) or len(own.state)),
    "array": (np.zeros(1), lambda own: int(np.add(own.state, 1, out=own.state)[0])),
    "tensor": (torch.zeros(1), lambda own: int(own.state.add_(1))),
    "default of a function": (None, lambda own, count=_COUNT: count.append(0) or len(count)),
    "module that was seen": (None, lambda own: counted_on(own.lm_head)),
    "iterator": (itertools.count(1), lambda own: next(own.state)),
}  # fmt: skip


class Slots:
    __slots__ = ("n",)


def counted_on(owner: Any) -> int:
    owner.n = owner.n + 1 if isinstance(getattr(owner, "n", None), int) else 1
    return owner.n


@pytest.mark.parametrize("where", COUNTERS)
def test_counts_of_forwards(where: str) -> None:
    """Where own code counts its forwards, and steers after 8, plain serves; a comparison leaves no trace."""
    found = []
    for spec in (None, SelfSpec.lookup()):
        model = of_class(with_logits(lambda own, logits: logits.roll(5, -1) if own.count(own) % 12 > 8 else logits))
        (state, model.count), model.slots = COUNTERS[where], Slots()
        model.state = copy.deepcopy(state)
        found.append([model.generate(**ROW, **OPTIONS, assistant=spec).tolist() for _ in range(3)])
    assert found[0] == found[1]
    assert spec.stats.left_to_generate


class Switched(LlamaForCausalLM):
    """Changes what single steps give where it finds that it has to, in one of several places."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.switch, self.gate = SimpleNamespace(is_on=False), nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, options: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        ons = getattr(self.config, "is_on", False), self.switch.is_on, _SWITCH, bool(self.gate)
        if (any(ons) or (options or {}).get("is_on")) and output.logits.shape[1] == 1:
            output.logits = output.logits.roll(5, -1)
        return output


class SwitchedHook:
    is_on = False

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output + 4 * _DIRECTION if self.is_on and output.shape[1] == 1 else output


SWITCHES: dict[str, Callable[[Any, SwitchedHook, bool], Any]] = {
    "config": lambda model, hook, is_on: setattr(model.config, "is_on", is_on),
    "object": lambda model, hook, is_on: setattr(model.switch, "is_on", is_on),
    "global": lambda model, hook, is_on: globals().update(_SWITCH=is_on),
    "weight": lambda model, hook, is_on: model.gate.detach().fill_(float(is_on)) and None,
    "hook": lambda model, hook, is_on: setattr(hook, "is_on", is_on),
    "argument": lambda model, hook, is_on: {"options": {"is_on": is_on}},
}


@pytest.mark.parametrize("where", SWITCHES)
def test_what_is_switched_is_compared_again(where: str) -> None:
    torch.manual_seed(0)
    model, hook, spec = Switched(LLAMA().config).eval(), SwitchedHook(), replace(SelfSpec.lookup(), trust=True)
    model.model.layers[2].register_forward_hook(hook)
    left = []
    for is_on in (False, True, False, True, False):
        options = SWITCHES[where](model, hook, is_on) or {}
        left.append(bool(why_left(model, spec, **options)))
    assert left == [False, True, False, True, False]


def test_what_does_not_matter_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "number_of_weights", lambda module: 0, raising=False)
    monkeypatch.setattr(torch.Tensor, "summary", lambda tensor: "", raising=False)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor: "a tensor")
    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", GenerationMixin._get_logits_processor)
    model = LLAMA()
    model.state_dict = lambda *args, **kwargs: {}
    add_hook_to_module(model, ModelHook())
    assert not Unseen.of(ModelView(model))


def test_classes_of_a_notebook_go_with_their_models() -> None:
    def run_cell() -> list[weakref.ref[Any]]:
        model = of_class(kind := with_logits(lambda own, logits: logits))
        model.model.layers[2].register_forward_hook(hook := SwitchedHook())
        model.generate(**ROW, **OPTIONS, assistant=SelfSpec(trust=True))
        return [weakref.ref(each) for each in (kind, hook, model)]

    alive = run_cell()
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_random_numbers_are_put_back() -> None:
    """Those of Python and numpy, too."""
    model = of_class(with_logits(lambda own, logits: logits.roll(random.randrange(3) + int(np.random.randint(3)), -1)))
    texts = []
    for spec in (None, SelfSpec.lookup()):
        random.seed(1)
        np.random.seed(1)
        texts.append(model.generate(**ROW, **OPTIONS, assistant=spec))
    assert torch.equal(*texts)


def by_a_table(own: Any, logits: torch.Tensor) -> torch.Tensor:
    """Made in the first forward, as many models of the Hub do."""
    if own.table is None:
        own.table = torch.ones(97)
    return logits * own.table


def test_what_is_made_in_the_first_forward_is_no_state() -> None:
    """That call is left to plain, later ones are drafted."""
    model, spec, left = of_class(with_logits(by_a_table, table=None)), SelfSpec.lookup(), []
    for seed in range(3):
        prompt = ragged_batch((9,), seed=seed)
        model.generate(**prompt, **OPTIONS, assistant=spec)
        left.append(bool(spec.stats.left_to_generate))
    assert left == [True, False, False]


def test_what_gradients_need_stays() -> None:
    model, vector = LLAMA(), nn.Parameter(torch.ones(64))
    model.model.layers[2].register_forward_hook(lambda module, args, output: output * vector)
    loss = model(**ROW, labels=ROW["input_ids"]).loss
    model.generate(**ROW, **OPTIONS, assistant=SelfSpec(trust=True))
    loss.backward()
    assert vector.grad is not None


def test_a_hook_that_reads_the_cache_later() -> None:
    """Not in silence, since the keys of drafts are there as well."""
    model = LLAMA()

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache.get_seq_length() > 16:
            cache.layers[module.layer_idx].values.mul_(2)

    model.model.layers[1].self_attn.register_forward_hook(hook, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="reads the values in the cache"):
        model.generate(**ROW, **OPTIONS, assistant=replace(SelfSpec.lookup(), trust=True))


def test_the_language_model_inside_is_looked_at() -> None:
    settings = multimodal.MODELS["llava"][1]
    text = {name: value for name, value in settings["text_config"].items() if name != "model_type"}
    config = AutoConfig.for_model("llava", **settings | {"text_config": {"model_type": "minimax", **text}})
    assert "its decoder's class MiniMaxModel" in Unseen.of(ModelView(LlavaForConditionalGeneration(config))).own


def test_what_another_thread_has_installed_hides_nothing() -> None:
    """Ours is above a forward of others while any thread generates."""
    model = with_another_method(LLAMA(), *MLP)
    before = Unseen.of(ModelView(model))
    holders = [*before.holders, *model.modules()]
    key = Contents(holders).key
    with partial_forwards(model, Anatomy.of(model)), speculative_attention():
        assert Unseen.of(ModelView(model)) == before
        assert Contents(holders).key == key


def test_models_of_the_tests_are_not_checked() -> None:
    """The list of seen classes is that of the tests; nothing about them is new."""
    names = set()
    for _, _, model in models_table.models():
        names.add(re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", type(model).__name__))
        assert not Unseen.of(ModelView(model)), type(model)
    assert names <= SEEN
