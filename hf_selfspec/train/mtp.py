"""Fitting an MTP layer to a model that has none (DeepSeek-V3, arXiv 2412.19437, §2.2; EAGLE-3, arXiv 2503.01840), and
finding the tokens that drafts consist of (FR-Spec, arXiv 2502.14856 §3.2)."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import SettingError, SettingTypeError
from ..model.forward_pass import ForwardPass, obeying, partial_forwards
from ..model.head import HeadRows
from ..model.plan import LayerPlan
from ..modules.draft_module import about
from ..modules.mtp import MtpHead
from ..modules.reduced_head import ReducedHead
from ..modules.shipped import shipped_mtp
from ..validation import check_count
from .exits import FrozenModel, Head, HiddenStates, agreement, cross_entropy
from .fit import Fit, TrainedFit, as_function, saved
from .texts import HELD_OUT, ends_of

# The weight of a step's loss, as a share of that of the step before.
_DECAY = 0.8
_MOST_STEPS = 8
_STARTS = ("copy", "shipped")


@dataclass(frozen=True, kw_only=True)
class MtpFit(TrainedFit[MtpHead], command="mtp", function="fit_mtp"):
    """Fits an MTP layer: one decoder layer of the model's own class, which begins as a copy of its last one.

    It reads the model's last states, and learns the model's distribution over frequent tokens (cross entropy, no labels
    needed), some steps one after another on its own states, as it will draft.

    Args:
        model, tokenizer, args, callbacks, output_dir: see :func:`fit_adapter`.
        dataset: see :func:`fit_adapter`; best is what the model itself writes, see
            :func:`hf_selfspec.train.write_answers`.
        steps: how many tokens are drafted one after another in the fit.
        head_rows: how many tokens the head can draft, the most frequent ones of the text; or those of a reduced head.
        state_layers: the layers whose states the head reads, see :class:`hf_selfspec.MtpHead`.
        start: ``"copy"`` of the model's last layer, or the MTP layers that are ``"shipped"`` with it (see
            :func:`hf_selfspec.load_mtp`), which then learn what the model itself answers. The attached ones stay as
            they are.
        block_size: tokens of a row.

    Returns:
        The head, for ``SelfSpec(MTP(head))``, or with free drafts ``SelfSpec.mtp(head)``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model's last layer cannot stand alone, or its head cannot be cut.
    """

    steps: int = 3
    head_rows: int | ReducedHead = 8192
    state_layers: Sequence[int] = ()
    start: str = "copy"
    block_size: int = 512

    def check(self) -> None:
        super().check()
        check_count("fit_mtp(steps)", self.steps, most=_MOST_STEPS)
        if self.start not in _STARTS or (self.start == "shipped" and len(self.state_layers)):
            raise SettingError(
                f"fit_mtp(start) must be one of {_STARTS}, the second without state_layers, which shipped layers do "
                f"not have, got {self.start!r}."
            )
        if not isinstance(self.head_rows, ReducedHead):
            check_count("fit_mtp(head_rows)", self.head_rows)
        if self.block_size <= self.steps + 1:
            raise SettingError(f"fit_mtp(block_size={self.block_size}) must be more than steps + 1.")

    def exit_layers(self, config: Any) -> Sequence[int]:
        count = config.num_hidden_layers
        if not isinstance(self.state_layers, Sequence):
            raise SettingTypeError(f"fit_mtp(state_layers) must be a list of layers, got {self.state_layers!r}.")
        for layer in self.state_layers:
            check_count("fit_mtp(state_layers)", layer, most=count)
        return [layer for layer in self.state_layers if layer < count]

    def fit(self, model: Any, text: torch.Tensor) -> MtpHead:
        if isinstance(self.head_rows, ReducedHead):
            return super().fit(model, text)
        return replace(self, head_rows=ReducedHeadFit(size=self.head_rows).fit(model, text)).fit(model, text)

    def module(self, frozen: FrozenModel) -> MtpHead:
        model = frozen.model
        if self.start == "shipped":
            head = shipped_mtp(model)
            if head.eagle3 is not None or head.state_layers:
                raise SettingError(
                    f'fit_mtp(start="shipped"): the head that is attached to {type(model).__name__} did not ship with '
                    "it. Load its own layers with load_mtp(model, checkpoint) first."
                )
            return copy.deepcopy(head).requires_grad_(True)
        return MtpHead.of(model, self._tokens, self.state_layers)

    def loss(self, module: MtpHead, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        rows = HeadRows(frozen.model, self._tokens)
        head, size = _as_head(frozen, rows.of_tokens), len(rows.tokens)
        losses = [
            _DECAY**step * frozen.per_token(cross_entropy, head, drafted, final, head, size).mean()
            for step, (drafted, final) in enumerate(self._steps(module, frozen, states))
        ]
        return torch.stack(losses).sum()

    def metrics(self, module: MtpHead, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        head, metrics = _as_head(frozen, HeadRows(frozen.model, self._tokens)), {}
        for step, (drafted, final) in enumerate(self._steps(module, frozen, states), start=1):
            agreeing = frozen.per_token(agreement, head, drafted, final).view(len(final), -1)
            # The last tokens of a row have nothing to be compared with.
            metrics[f"agreement_at_step_{step}"] = F.pad(agreeing, (0, step), value=torch.nan)
        return metrics

    def recipe(self, module: MtpHead) -> dict[str, Any]:
        tokens = {"copy": "tokens that can be drafted", "shipped": "tokens whose probabilities a shipped layer learns"}
        return {"steps one after another": self.steps, tokens[self.start]: len(self._tokens)}

    @property
    def _tokens(self) -> torch.Tensor:
        assert isinstance(self.head_rows, ReducedHead)
        return self.head_rows.tokens

    def _steps(
        self, module: MtpHead, frozen: FrozenModel, states: HiddenStates
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each step, what goes into the model's head ``[b, n, d]``, and what the model's own layers send there."""
        (b, s), final, dtype = states["ids"].shape, states["final"], frozen.model.dtype
        embeddings, device = frozen.model.get_input_embeddings()(states["ids"]), final.device
        hidden = torch.cat([states.get(f"states_{layer}", final) for layer in module.state_layers] or [final], dim=-1)
        for step in range(1, self.steps + 1):
            positions = torch.arange(step, s, device=device).expand(b, -1)
            with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
                hidden = module.fuse(hidden) if step == 1 else hidden
                layer = min(step, len(module.layers)) - 1
                hidden = module(embeddings[:, step:], hidden[:, : s - step], positions, layer=layer)
            yield hidden.to(final.dtype), final[:, step:]


def _as_head(frozen: FrozenModel, rows: Any) -> Head:
    """The model's output head with some of its rows, and all that the model does after it."""
    with_rows = ForwardPass(LayerPlan(frozen.anatomy.num_layers), head_rows=rows)

    def run(states: torch.Tensor) -> torch.Tensor:
        with partial_forwards(frozen.model, frozen.anatomy), obeying(with_rows):
            return frozen.own_head(states)

    return run


fit_mtp = as_function(MtpFit)


@dataclass(frozen=True, kw_only=True)
class ReducedHeadFit(Fit[ReducedHead], command="head", function="fit_reduced_head"):
    """Finds the most frequent tokens of some text, and adds the end-of-text tokens. Nothing is trained.

    Args:
        model, tokenizer: see :func:`fit_adapter`.
        dataset: see :func:`fit_adapter`, best such as the model writes; the share of what is held out that the head
            covers is its figure.
        size: number of tokens, or the whole vocabulary if that has fewer.
        output_dir: folder in which the head is saved, with a model card.

    Returns:
        The head, for ``EarlyExit(layer, head=head)``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
    """

    size: int = 8192

    def check(self) -> None:
        check_count("fit_reduced_head(size)", self.size)

    def fit(self, model: Any, text: torch.Tensor) -> ReducedHead:
        vocabulary, tokens = model.config.get_text_config(decoder=True).vocab_size, text.flatten()
        held = len(tokens) // HELD_OUT
        counted, held_out = tokens[: len(tokens) - held], tokens[len(tokens) - held :]
        counts = torch.bincount(counted, minlength=vocabulary)
        counts[[end for end in ends_of(model) if 0 <= end < vocabulary]] = len(tokens)
        # Of equally frequent tokens, those with lower ids: tokenizers give these to the tokens they met most often.
        chosen = counts.sort(descending=True, stable=True).indices[: min(self.size, vocabulary)].sort().values
        head = ReducedHead.of(chosen.tolist(), vocabulary)
        covered = torch.isin(held_out, chosen).float().mean().item()
        figures = {"share of held-out tokens": round(covered, 4)} if held else {}
        recipe = {"tokens": len(chosen), "tokens of text": len(counted)}
        return saved(head, about(model, recipe, figures), self.output_dir)


fit_reduced_head = as_function(ReducedHeadFit)
