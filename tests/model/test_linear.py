"""Linear layers over few tokens: every way multiplies alike, and the fastest is chosen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import linear as plain_linear

from helpers.calls import check_lossless
from helpers.machine import Machine
from helpers.models import ragged_batch, tiny_gpt2, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec
from hf_selfspec.model import linear
from hf_selfspec.model.linear import WAYS, FewTokenLinear, LinearAutotuner, Way, few_token_linears, is_served
from hf_selfspec.model.module_tools import ModelView


class FakeMachine:
    """Ways that take a given time on a clock of their own."""

    def __init__(self, **seconds: Callable[[int], float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.ways = [self._multiply(name) for name in seconds]
        self.fastest = LinearAutotuner(self.ways, lambda: self.now)

    def _multiply(self, name: str) -> Callable[..., torch.Tensor]:
        def multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.now += self.seconds[name](len(input))
            return plain_linear(input, weight, bias)

        multiply.__name__ = name
        return multiply

    def choices(self, weight: torch.Tensor, *counts: int) -> list[str]:
        return [self.fastest.way(count, weight, [weight])[0].__name__ for count in counts]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300, 257), (301, 64), (1, 7)])
@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_every_way_equals_linear(way: Way, shape: tuple[int, int], tokens: int, bias: bool) -> None:
    weight, wide = torch.randn(shape), torch.randn(tokens, 2 * shape[1])
    offset = torch.randn(shape[0]) if bias else None
    kept = None if offset is None else offset.clone()
    for input in (wide[:, : shape[1]].clone(), wide[:, : shape[1]], wide[:, ::2]):
        with torch.no_grad():
            found = way(input, weight, offset)
        torch.testing.assert_close(found, plain_linear(input, weight, offset), atol=1e-4, rtol=1e-4)
        assert found.is_contiguous()
        assert bias is False or torch.equal(offset, kept)


def test_the_fastest_way_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a number of tokens, all weights of a shape, and a number of threads."""
    machine, weight = FakeMachine(one=lambda n: n, many=lambda n: 5.0), torch.randn(6, 4)
    assert machine.choices(weight, 1, 2, 4, 5, 8, 9, 17, 32) == ["one"] * 3 + ["many"] * 5
    machine.seconds["one"] = lambda n: 100.0
    assert machine.choices(weight, 1) == machine.choices(torch.randn(6, 4), 1) == ["one"]
    assert machine.choices(torch.randn(4, 6), 1) == ["many"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert machine.choices(weight, 1) == ["many"]


def test_what_more_tokens_add_is_timed_once_for_a_shape(machine: Machine) -> None:
    """All layers and the head, on lines between 1, 4 and 16 tokens; weights of other modules tell nothing."""
    ways, model = FakeMachine(one=lambda n: float(n), many=lambda n: 2.5), tiny_llama(layers=3)
    machine.linears_choose_by(ways.fastest)
    for _ in range(2):
        added = linear.added_seconds(ModelView(model))
        assert [added(tokens) / (3 * 7 + 1) for tokens in (1, 2, 4, 10, 16, 64)] == [0, 0.5, 1.5, 1.5, 1.5, 1.5]
    timed = ways.now
    machine.linears_choose_by(FakeMachine(one=lambda n: float(n)).fastest)
    added = linear.added_seconds(ModelView(model.bfloat16()))
    assert [added(tokens) / (3 * 7 + 1) for tokens in (2, 10, 64)] == [1, 9, 63]
    assert ways.now == timed
    assert linear.added_seconds(ModelView(tiny_gpt2())) is None


def plain(layer: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return plain_linear(input, layer.weight, layer.bias)


@pytest.mark.parametrize("is_blas", [True, False])
def test_a_layer_does_what_it_would_do(is_blas: bool, machine: Machine) -> None:
    """Whatever the input's dtype and the modes, also with gradients; weights are those of the moment."""
    layer, x, is_active, served = torch.nn.Linear(800, 700), torch.randn(1, 3, 800), False, list[int]()

    def other(*args: Any) -> torch.Tensor:
        served.append(1)
        return linear.blas(*args)

    machine.linears_choose_by(LinearAutotuner([linear.blas if is_blas else other]))
    with few_token_linears(layer, lambda: is_active):
        with torch.no_grad():
            assert torch.equal(layer(x), plain(layer, x))
            assert not served
            is_active = True
            layer(x)  # chooses
            assert torch.equal(layer(x), plain(layer, x))
            assert bool(served) != is_blas
            served.clear()
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(layer(x), plain(layer, x))
            assert not served
        is_active = False
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        layer.weight = torch.nn.Parameter(torch.ones(700, 800))
        assert torch.equal(layer(x), plain(layer, x))
        layer.to(torch.bfloat16)
        assert torch.equal(layer(x.bfloat16()), plain(layer, x.bfloat16()))


def wrapped(model: torch.nn.Module) -> list[torch.Size]:
    """The shapes of the linear layers that do not run by their own forward in a call."""
    with few_token_linears(model, lambda: True):
        layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        return [layer.weight.shape for layer in layers if "forward" in vars(layer)]


LARGE: dict[str, Any] = {"in_features": 800, "out_features": 700}


def changed(name: str, value: Callable[[torch.nn.Linear], Any]) -> torch.nn.Linear:
    layer = torch.nn.Linear(**LARGE)
    setattr(layer, name, value(layer))
    return layer


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (torch.nn.Linear(**LARGE), True),
        (torch.nn.Linear(40, 24), False),
        (torch.nn.Linear(**LARGE, dtype=torch.bfloat16), False),
        (torch.nn.Linear(**LARGE, device="meta"), False),
        (FewTokenLinear(**LARGE), False),
        (changed("forward", lambda layer: layer.forward), False),
        (changed("weight", lambda layer: type("Packed", (torch.nn.Parameter,), {})(layer.weight.data)), False),
        (changed("weight", lambda _: torch.nn.Parameter(torch.randn(800, 700).t())), False),
    ],
)
def test_large_plain_float32_linears_are_served(layer: torch.nn.Linear, expected: bool) -> None:
    assert is_served(layer) is expected


def test_weights_that_caches_hold_are_not_timed(machine: Machine) -> None:
    """Where all weights of a shape are few, a way that is fast when it is timed need not be in a forward."""
    ways = FakeMachine(one=lambda n: 2.0, many=lambda n: 1.0)
    machine.linears_choose_by(ways.fastest, fewest=2 * 800 * 700)
    assert wrapped(torch.nn.Linear(**LARGE)) == []
    assert len(wrapped(torch.nn.Sequential(*(torch.nn.Linear(**LARGE) for _ in range(2))))) == 2


@pytest.mark.machine("small_linears_have_ways")
@pytest.mark.parametrize("shape", [(800,), (3, 800), (2, 4, 800), (1, 0, 800), (2, 40, 800)])
def test_layers_over_few_tokens(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's and our own are linear layers; the other ways serve few tokens without gradients alone."""
    usual, own = torch.nn.Linear(800, 700), FewTokenLinear(800, 700)
    own.load_state_dict(usual.state_dict())
    input, way = torch.randn(shape), Mock(side_effect=LinearAutotuner.way)
    monkeypatch.setattr(LinearAutotuner, "way", lambda *args: way(*args))
    with few_token_linears(torch.nn.Sequential(usual, torch.nn.ReLU()), lambda: True):
        for layer in (usual, own):
            way.reset_mock()
            with torch.no_grad():
                torch.testing.assert_close(layer(input), plain(usual, input), atol=1e-5, rtol=1e-5)
            assert way.called == (0 < input.numel() <= 32 * 800)
    way.reset_mock()
    for layer in (own, usual):
        layer(input).sum().backward()
    torch.testing.assert_close(own.weight.grad, usual.weight.grad)
    assert not way.called


def test_compiled_layers_of_our_own_are_one_graph() -> None:
    layer, x = FewTokenLinear(800, 700), torch.randn(3, 800)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), plain_linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("slower", ["blas", "other"])
def test_layers_that_blas_serves_best_are_left_alone(
    slower: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second call on, but for one of each shape, which chooses for further numbers of tokens."""
    fake = FakeMachine(blas=lambda n: 2.0, other=lambda n: 1.0 if n > 4 or slower == "blas" else 3.0)
    machine.small_linears_have_ways()
    machine.linears_choose_by(fake.fastest)
    monkeypatch.setattr(linear, "blas", fake.ways[0])
    model, prompt = tiny_llama(layers=3, factor=0.5), ragged_batch((40,))  # more tokens than have ways
    all_layers = wrapped(model)
    assert len(all_layers) == 3 * 7 + 1
    for drafted in (1, 3):
        check_lossless(model, SelfSpec(EarlyExit(2), FixedLength(drafted)), 12, [prompt])
    assert max(fake.fastest.chosen(model.lm_head.weight)) == 4
    assert sorted(wrapped(model)) == sorted(all_layers if slower == "blas" else set(all_layers))
    check_lossless(model, SelfSpec(EarlyExit(2), FixedLength(6)), 20, [prompt])  # verifications of 7 tokens
    assert wrapped(model) == all_layers
