"""Finding the tokens that drafts consist of (FR-Spec, arXiv 2502.14856 §3.2)."""

from dataclasses import dataclass
from typing import Any

import torch

from ..modules.draft_module import about
from ..modules.reduced_head import ReducedHead
from ..validation import check_count
from .fit import Fit, as_function, saved
from .texts import HELD_OUT, ends_of


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
