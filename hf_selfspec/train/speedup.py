"""How fast a model generates with a module that is fitted to it, on held-out text."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from transformers import GenerationConfig, PreTrainedModel

from ..draft.cascade import Cascade
from ..draft.lookup import Lookup
from ..model.patching import evaluating
from ..modules.draft_module import DraftModule
from ..selfspec import SelfSpec

# Rows whose first half is a prompt, the most tokens generated after it, and tokens of a call that warms up.
_ROWS, _TOKENS, _FEW = 4, 32, 8

_logger = logging.getLogger(__name__)


@contextmanager
def greedily(model: PreTrainedModel, new_tokens: int) -> Iterator[set[int]]:
    """Generates greedily and without other settings of the model's own; yields the tokens that end a text."""
    usual = model.generation_config
    ends = {usual.eos_token_id} if isinstance(usual.eos_token_id, int) else set(usual.eos_token_id or ())
    try:
        model.generation_config = GenerationConfig(
            max_new_tokens=new_tokens,
            bos_token_id=usual.bos_token_id,
            eos_token_id=usual.eos_token_id,
            pad_token_id=min(ends, default=0),
        )
        yield ends
    finally:
        model.generation_config = usual


class SpeedupEvaluator:
    """Compares generation with a module to plain ``generate``, on the first few of held-out rows ``[n, s]``.

    ``spec_of`` returns a ``SelfSpec`` that drafts with the module, ``None`` if it cannot draft greedy text.
    """

    def __init__(self, model: PreTrainedModel, rows: torch.Tensor, spec_of: Callable[[Any], SelfSpec | None]) -> None:
        self._model = model
        self._prompts = rows[:_ROWS, : rows.shape[1] // 2]
        self._new = min(_TOKENS, rows.shape[1] - self._prompts.shape[1])
        self._spec_of = spec_of

    @property
    def has_text(self) -> bool:
        """Whether there is text to continue."""
        return bool(self._prompts.numel()) and self._new > 1

    def metrics(self, module: DraftModule, in_training: bool = False) -> dict[str, float]:
        """Speeds in times of plain ``generate``'s, also of and with free drafts; none where nothing can be measured.

        In training only the ``speedup`` with the module, 0 if it cannot draft (yet).
        """
        if not self.has_text:
            return {}
        names = ["speedup"] if in_training else ["speedup", "speedup_of_free_drafts", "speedup_with_free_drafts"]
        try:
            with _ready(module):
                alone = self._spec_of(module)
                if alone is None:
                    return {"speedup": 0.0} if in_training else {}
                specs = [alone]
                if not in_training:
                    specs += [SelfSpec.lookup(), replace(alone, draft=Cascade((Lookup(), alone.draft)))]
                return dict(zip(names, self.measured(specs), strict=True))
        except Exception as error:  # whatever it is, hours of fitting are not lost to it
            if in_training:
                _logger.warning(f"{module.kind}: it cannot draft: {error}")
                return {"speedup": 0.0}
            warnings.warn(f"{module.kind}: its speed could not be measured: {error}", stacklevel=2)
            return {}

    @torch.no_grad()
    def measured(self, specs: list[SelfSpec]) -> list[float]:
        """The speed of each, in times of plain ``generate``'s."""
        methods: list[dict[str, Any]] = [{"assistant": spec} for spec in (False, *specs)]  # plain first
        with greedily(self._model, self._new):
            for method in methods:
                # A text in reverse, since free drafts would know the beginning of one that is measured.
                self._seconds(self._prompts[:1].flip(1), {"max_new_tokens": min(_FEW, self._new), **method})
            # In turn, and the median, since machines are not always equally fast.
            found = [[self._seconds(prompt, method) for method in methods] for prompt in self._prompts.split(1)]
        return [median(row[0] / row[place] for row in found) for place in range(1, len(methods))]

    def _seconds(self, prompt: torch.Tensor, options: dict[str, Any]) -> float:
        """Seconds per token."""
        prompt = prompt.to(self._model.get_input_embeddings().weight.device)
        begun = perf_counter()
        ids = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        ids.tolist()  # a GPU has them now
        return (perf_counter() - begun) / (ids.shape[1] - prompt.shape[1])


@contextmanager
def _ready(module: DraftModule) -> Iterator[None]:
    """The module in eval mode, without copies of it on other devices from before."""
    with evaluating(module):
        module.forget_copies()
        try:
            yield
        finally:
            module.forget_copies()


def speed_figures(module: DraftModule, metrics: dict[str, float]) -> dict[str, float]:
    """The figures of a module's speed, none if it was not measured; warns if the module does not pay."""
    if "speedup" not in metrics:
        return {}
    names = ("speedup", "speedup_with_free_drafts", "speedup_of_free_drafts")
    alone, both, free = (metrics[name] for name in names)
    if max(alone, both) < max(1.0, free) and PartialState().is_main_process:
        warnings.warn(
            f"this {module.kind} does not pay: on held-out text the model generates at {alone:.2f} times the speed of "
            f"plain generate with it, at {both:.2f} with it and free drafts, and at {free:.2f} with SelfSpec.lookup(), "
            "which needs no fit. Fit for longer, on more text or on text like that which will be generated, or choose "
            "another exit layer.",
            stacklevel=2,
        )
    return {
        "speed over plain generate": round(alone, 2),
        "speed with free drafts": round(both, 2),
        "speed of free drafts alone": round(free, 2),
    }
