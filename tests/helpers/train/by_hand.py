"""LayerSkip's training written out: gradient descent on its formula, and what trainings are compared by."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import TrainerCallback

from helpers.calls import attributes_of
from helpers.distributed import Row, exits, rows, rows_put_back, tiny, trainer, weights
from hf_selfspec import LayerDropout

SEED = 42  # The Trainer's default, from which LayerDropout draws.


Weights = dict[str, torch.Tensor]


def assert_close(found: Weights, expected: Weights, rtol: float = 1e-4, atol: float = 3e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def history(ran: Any, key: str = "loss") -> list[float]:
    """The logged values of ``key``, step by step."""
    return [entry[key] for entry in ran.state.log_history if key in entry]


def exit_loss(model: Any, batch: Row, exit_layer: int) -> torch.Tensor:
    """Summed loss behind the first ``exit_layer`` layers, from the hidden states that the model gives out."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    output = inner.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True, use_cache=False
    )
    logits = inner.lm_head(output.last_hidden_state)
    if exit_layer < inner.config.num_hidden_layers:
        logits = inner.lm_head(inner.model.norm(output.hidden_states[exit_layer]))
    if inner.config.model_type == "gemma2":
        logits = 2.0 * torch.tanh(logits / 2.0)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def stacked(samples: Sequence[Row]) -> Row:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def targets(batch: Row) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def stays(step: int, rows_in_step: int, p_max: float, layers: int = 4, seed: int = SEED) -> np.ndarray:
    """``[b, L]`` which rows run through which layers: drawn from the seed and the step, row by row."""
    rates = p_max * (2 ** (np.arange(layers) / (layers - 1)) - 1)
    return np.random.default_rng([seed, step]).random((rows_in_step, layers)) >= rates


class ByHand:
    """Gradient descent written out, on four rows in a step.

    Args:
        shares: weight of the exit after each number of layers, for each step.
        copies: processes among which the rows are divided, which drop the same of their rows.

    Attributes:
        losses: ``J`` of each step.
        exits: for each step the mean cross entropy of each exit that counts.
    """

    def __init__(
        self,
        model: Any,
        shares: Callable[[int], dict[int, float]],
        steps: int = 3,
        p_max: float = 0.0,
        copies: int = 1,
    ) -> None:
        self.losses: list[float] = []
        self.exits: list[dict[int, float]] = []
        self.targets: list[int] = []
        model.train()
        data = rows(16)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(steps):
            samples = stacked([data[index % 16] for index in range(step * 4, step * 4 + 4)])
            kept = np.concatenate([stays(step, 4 // copies, p_max)] * copies)
            count = targets(samples)
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            with rows_put_back(inner.model.layers, kept):
                losses = {layer: exit_loss(model, samples, layer) / count for layer in shares(step)}
            loss = torch.stack([share * losses[layer] for layer, share in shares(step).items()]).sum()
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        parameter -= 0.05 * gradient
            self.losses.append(loss.item())
            self.exits.append({layer: value.item() for layer, value in losses.items()})
            self.targets.append(count)
        self.weights = weights(model)


# Exit layers E of 4 layers with e(l) = 0, 1, 3 and 3 + 3 (e_scale=1).
ALL = {2: 0.1, 3: 0.3, 4: 0.6}


def rotational_shares(step: int) -> dict[int, float]:
    """``Rotational(2)``: the layers 0, 2 and the last one, then 1 and 3; layer 0 weighs nothing."""
    return {3: 3 / 9, 4: 6 / 9} if step % 2 == 0 else {2: 1 / 7, 4: 6 / 7}


def both() -> list[TrainerCallback]:
    return [exits(), LayerDropout(0.6)]


def train(folder: Path, callbacks: Sequence[TrainerCallback], model: Any = None, **options: Any) -> Any:
    run = trainer(tiny() if model is None else model, callbacks, folder, **options)
    run.train()
    return run


@contextmanager
def left_as_it_was(run: Any) -> Iterator[None]:
    """Asserts that the model and the Trainer have afterwards what they had, object by object."""
    before, keys = attributes_of(run.model), set(run.__dict__)
    yield
    after = attributes_of(run.model)
    assert after.keys() == before.keys()
    assert [key for key, value in before.items() if after[key] is not value and after[key] != value] == []
    assert "log" in keys or "log" not in run.__dict__
