"""What is fitted in tests: texts, arguments of fits, and what comes of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from helpers.models import VOCABULARY
from hf_selfspec import Adapter, ExitHeads
from hf_selfspec.modules.heads import confidence
from hf_selfspec.modules.linear_probe import LinearProbe
from hf_selfspec.modules.mtp import MtpHead, config_of_layer
from hf_selfspec.train.fit import USUAL_ARGUMENTS

EXIT = 2


def rows(count: int = 60, length: int = 32, seed: int = 0) -> list[dict[str, list[int]]]:
    """Texts with something to learn: each token is often followed by the next one."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(2, VOCABULARY, (count, 1), generator=generator)
    return [{"input_ids": row.tolist()} for row in (starts + torch.arange(length) - 2) % (VOCABULARY - 2) + 2]


def ids_of(text: list[dict[str, list[int]]]) -> torch.Tensor:
    return torch.tensor([row["input_ids"] for row in text])


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    of_tests = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 5, "warmup_steps": 0}
    return TrainingArguments(str(folder), **USUAL_ARGUMENTS | of_tests | changed)


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def adapter_of(model: PreTrainedModel, seed: int = 0, exit_layer: int = EXIT) -> Adapter:
    """An adapter that does something."""
    torch.manual_seed(seed)
    width = model.config.get_text_config(decoder=True).hidden_size
    adapter = Adapter(exit_layer, width, 4)
    torch.nn.init.normal_(adapter.output.weight, std=0.1)
    return adapter.eval()


class Recording:
    """A stop rule that keeps what it is shown, and ends drafts in turn or never."""

    def __init__(self, ends: bool = True) -> None:
        self.ends = ends
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        self.calls.append((input_ids.clone(), logits.clone(), hidden_states.clone()))
        return torch.full((len(logits),), self.ends and len(self.calls) % 3 == 0)


LAYERS = (2, 4, 6)


def heads_of(model: PreTrainedModel, share: float, layers: tuple[int, ...] = LAYERS) -> ExitHeads:
    """Heads that say something of each model, and believe themselves this often at each layer."""
    torch.manual_seed(0)
    config = model.config.get_text_config(decoder=True)
    heads = ExitHeads(layers, config.hidden_size, config.vocab_size)
    for module in heads.heads:
        module[1].weight.data = model.get_output_embeddings().weight.data.float().clone()
    ids = torch.randint(2, config.vocab_size, (4, 30))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        said = [heads.logits(k, states[layer]).float() for k, layer in enumerate(layers)]
    found = [[torch.quantile(confidence(logits).flatten(), 1 - share).item()] for logits in said]
    heads.about = {"calibration": calibrated(found)}
    return heads.eval()


def calibrated(thresholds: list[list[float]], rate: float = 0.9) -> dict[str, Any]:
    """As after a calibration for one accuracy, 0.9, that drafts reach, too, or something else."""
    return {"epsilons": [0.9], "thresholds": thresholds, "acceptance": [rate]}


def mtp_of(model: PreTrainedModel, layers: int = 1, seed: int = 0, state_layers: tuple[int, ...] = ()) -> MtpHead:
    """Layers that differ, and look more at the state than at the token."""
    torch.manual_seed(seed)
    one = MtpHead.of(model, state_layers=state_layers)
    weights = {
        f"layers.{layer}.{name}": value + 0.03 * torch.randn_like(value)
        for layer in range(layers)
        for name, value in one.layers[0].state_dict().items()
    }
    weights |= {f"fuse.{name}": value + 0.03 * torch.randn_like(value) for name, value in one.fuse.state_dict().items()}
    head = MtpHead(one.configs * layers, state_layers=state_layers)
    head.load_state_dict(weights, assign=True)
    return head.eval()


def peagle_of(model: PreTrainedModel, count: int = 4) -> MtpHead:
    """A head of P-EAGLE that was drawn, which drafts so many tokens in one forward."""
    settings = {"vocabulary": VOCABULARY, "norm_before_residual": False, "norm_output": False, "own_embedding": True}
    masked = {"mask_token": 7, "num_tokens": count}
    head = MtpHead([config_of_layer(model.config, 0)], size=VOCABULARY, state_layers=(1, 2), eagle3=settings | masked)
    torch.manual_seed(0)
    weights = {name: 0.2 * torch.randn(value.shape) for name, value in head.state_dict().items()}
    head.load_state_dict(weights | {"tokens": torch.arange(VOCABULARY)}, assign=True)
    return head.eval()


def probe_of(model: PreTrainedModel, exit_layer: int = 1) -> LinearProbe:
    """A probe that ends drafts now and then."""
    torch.manual_seed(0)
    probe = LinearProbe(exit_layer, model.config.get_text_config(decoder=True).hidden_size)
    torch.nn.init.normal_(probe.direction.weight, std=0.1)
    return probe
