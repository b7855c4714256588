"""Measures how well each layer predicts the next token if its hidden state goes straight to the output head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from ..errors import SettingError, UnsupportedModelError
from ..model.anatomy import causal_lm
from ..model.encoding import checked_texts, token_ids
from ..model.patching import evaluating
from ..train.exits import LOGIT_ELEMENTS, Exits
from ..validation import check_count
from .figures import as_text

_DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class ExitReport:
    """How well the exits of one model predict the same texts; the exit after the first ``E`` layers is at ``[E - 1]``.

    ``str`` of it is a table. Training that includes the exits brings the losses of the earlier ones towards that of the
    last (LayerSkip, Figures 6 and 11, which show task scores and perplexities, ``exp(loss)``).

    Attributes:
        loss: mean cross entropy in nats per token.
        accuracy: share of tokens to which the exit gives the highest probability.
        agreement: share of tokens for which the exit and the last layer have the same first choice: how often a token
            drafted greedily at this exit would be accepted, on a text that the model did not generate itself.
        tokens: number of predicted tokens: all tokens of all texts except the first of each.
        model_name: name or path that the model was loaded from, or its class.
    """

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    agreement: tuple[float, ...]
    tokens: int
    model_name: str

    def __str__(self) -> str:
        columns = zip(self.loss, self.accuracy, self.agreement, strict=True)
        rows = [
            [str(layer), f"{loss:.3f}", f"{loss - self.loss[-1]:+.3f}", f"{accuracy:.3f}", f"{agreement:.3f}"]
            for layer, (loss, accuracy, agreement) in enumerate(columns, start=1)
        ]
        table = as_text(["exit", "loss", "above last", "accuracy", "agreement"], rows, right=True)
        return f"{self.model_name}, {self.tokens} tokens\n{table}"


def exit_report(
    model: Any, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, max_length: int | None = None
) -> ExitReport:
    """Measures how well every exit of a model predicts given texts (LayerSkip, Figures 6 and 11).

    Exit ``E`` is the state after the first ``E`` layers, put through the model's own final norm and output head. Each
    text goes through the model once, alone, without dropout; logits are computed for a chunk of tokens of one exit at a
    time. The states of all exits are kept for a whole text, ``L s d`` numbers: a smaller ``max_length`` needs less
    memory.

    Args:
        model: a causal LM of transformers, or a PEFT model around one, with its active adapters.
        tokenizer: the model's tokenizer.
        texts: what to predict, at least two tokens each. A text's first token is only context; it is the
            beginning-of-text token where the tokenizer adds one.
        max_length: a text is cut after this many tokens, at least 2, or where the model has no more positions (or
            after 2048 tokens if its config does not give their number).

    Returns:
        Losses, accuracies and agreements of all exits, over the tokens of all texts together.

    Raises:
        SettingError, SettingTypeError: there are no texts, a text is too short, or an argument is not allowed.
        UnsupportedModelError: the model's layers were not found, or its exits cannot use its head.
    """
    adapters: Any = getattr(model, "active_peft_config", None)
    if getattr(adapters, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"PEFT's {adapters.peft_type} puts virtual tokens in front of each text, which exit_report leaves out. "
            "LoRA and other adapters inside the layers work."
        )
    inner = causal_lm(model, "exit_report")
    exits = Exits(inner)
    texts, length = checked_texts("exit_report", texts, empty=True), exits.anatomy.max_positions or _DEFAULT_LENGTH
    if max_length is not None:
        check_count("exit_report(max_length)", max_length, least=2)
        length = min(length, max_length)
    # Cut here and not in the tokenizer, which would cut on its own side and add an end-of-text token.
    rows = [token_ids(tokenizer, text)[:length] for text in texts]
    for index, row in enumerate(rows):
        if len(row) < 2:
            raise SettingError(
                f"exit_report(texts): text {index} is {texts[index]!r}, of {len(row)} tokens, but it takes at least 2 "
                "to predict a next one. Leave it out or make it longer."
            )
    embeddings = inner.get_input_embeddings().weight
    # Offloaded weights are on another device; accelerate's hooks then move the inputs.
    device = torch.device("cpu") if embeddings.is_meta else embeddings.device
    chunk = max(1, LOGIT_ELEMENTS // inner.config.get_text_config(decoder=True).vocab_size)
    sums = torch.zeros(exits.anatomy.num_layers, 3, dtype=torch.float64, device="cpu")
    # Not inference_mode: tensors that a module keeps from this forward must be usable in later training.
    with torch.no_grad(), evaluating(inner):
        try:
            exits.attach()
            exits.chosen = tuple(range(1, exits.anatomy.num_layers + 1))
            for row in rows:
                ids = torch.tensor([row], device=device)
                # Without the causal LM around it, there are no logits of the whole text.
                exits.anatomy.stack(input_ids=ids, use_cache=False, return_dict=True)
                assert exits.states is not None
                # [L, 1, s, d] -> [L, s - 1, d], the states that have a next token.
                sums += _text_sums(exits.head, exits.states[:, 0, :-1], ids[0, 1:], chunk)
        finally:
            exits.detach()
    tokens = sum(len(row) - 1 for row in rows)
    loss, accuracy, agreement = (tuple(column) for column in (sums / tokens).T.tolist())
    return ExitReport(loss, accuracy, agreement, tokens, inner.config.name_or_path or type(inner).__name__)


def _text_sums(
    head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, targets: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Sums ``[L, 3]`` of loss, right choices and choices of the last layer over states ``[L, n, d]``, in chunks."""
    sums = torch.zeros(len(states), 3, dtype=torch.float64, device="cpu")
    for start in range(0, len(targets), chunk):
        piece = slice(start, start + chunk)
        last_choice = None
        for layer in (len(states) - 1, *range(len(states) - 1)):
            logits = head(states[layer, piece])
            correct, choice = targets[piece].to(logits.device), logits.argmax(-1)
            last_choice = choice if last_choice is None else last_choice
            loss = F.cross_entropy(logits.float(), correct, reduction="sum").item()
            del logits  # before the next ones
            hits, agreed = int((choice == correct).sum()), int((choice == last_choice).sum())
            sums[layer] += sums.new_tensor([loss, hits, agreed])
    return sums
