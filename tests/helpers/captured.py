"""Settings and comparisons of forwards that are graphs, and what captures them on a CPU."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaForCausalLM, PreTrainedModel

from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import ConfidenceThreshold, EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.model.transfer import Pending

THREE = FixedLength(3)


class Traced:
    """In the place of ``Captured``: the operations of a forward, with the numbers that the host had then, and keys and
    values in the memory that they had then. Values cannot be read in a trace, as in a capture."""

    made: ClassVar[list["Traced"]] = []

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor], pool: Any) -> None:
        def opened(*inputs: torch.Tensor) -> list[Any]:
            return [[*result.tensors] if isinstance(result, Pending) else result for result in function(*inputs)]

        self.graph = make_fx(opened, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        self.inputs, self.runs = inputs, 0
        self.made.append(self)

    def __call__(self, *inputs: torch.Tensor, needed: Sequence[bool] | None = None) -> Any:
        self.runs += 1
        results = [Pending(*result) if isinstance(result, list) else result for result in self.graph(*inputs)]
        kept = zip(results, needed or [True] * len(results), strict=True)
        return [result if is_kept else None for result, is_kept in kept]


def few_layers(layers: int = 2) -> LlamaForCausalLM:
    """Graphs take as long to make as there are layers; drafts of the first one are partly right."""
    return tiny_llama(layers, factor=0.7)


def same_ids(
    model: PreTrainedModel,
    spec: SelfSpec,
    rows: int = 1,
    new: int = 12,
    is_mixed: bool = True,
    plain: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """With these options, and those of ``plain`` for plain generate (default: the same)."""
    inputs = ragged_batch((9,)) if rows == 1 else ragged_batch((9, 5, 7))

    def ids(assistant: SelfSpec | None, options: dict[str, Any]) -> torch.Tensor:
        output = model.generate(
            **inputs, max_new_tokens=new, do_sample=False, pad_token_id=0, **options, assistant=assistant
        )
        found: torch.Tensor = getattr(output, "sequences", output)
        return found

    assert torch.equal(ids(spec, options), ids(None, options if plain is None else plain))
    assert spec.stats is not None
    assert not is_mixed or 0 < spec.stats.accepted < spec.stats.drafted


def specs() -> dict[str, SelfSpec]:
    return {
        "exit": SelfSpec(EarlyExit(1), THREE),
        "rule": SelfSpec(EarlyExit(1), ConfidenceThreshold(0.1), max_draft=5),
        "tree": SelfSpec(EarlyExit(1), THREE, TopKTree(((0.9999, 3), (1.0, 1)))),
        "skips": SelfSpec(SkipLayers([1], [1]), THREE),
    }


def attention_with_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output ``[b, k, m, h]``, and the logarithm ``[b, k, m]`` of each sum of exponentiated scores."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale) + mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)
