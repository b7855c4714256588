"""Layers that predict a token from the state of the last but one and the embedding of the last."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..model.anatomy import Anatomy
from ..model.modules import forward_parameters
from ..model.patching import states_of
from ..model.prompt import cache_name


class _Layer(nn.Module):
    """A decoder of the model's own class with one layer, which runs by that model's code."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.width = config.hidden_size
        decoder: Any = Anatomy.of(AutoModelForCausalLM.from_config(config)).stack
        decoder.set_input_embeddings(nn.Identity())
        self.decoder = decoder

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """See :meth:`MtpHead.forward`."""
        given = {"position_ids": positions, cache_name(self.decoder): cache, "use_cache": cache is not None}
        known = {name: value for name, value in given.items() if name in forward_parameters(self.decoder)}
        return states_of(self.decoder(inputs_embeds=self.entered(embeddings, states), **known))

    def entered(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What enters the decoder: both, side by side."""
        return torch.cat([embeddings, states], dim=-1)


class MtpLayer(_Layer):
    """``h' = norm(Block(W [norm(embedding); norm(h)]))``: an MTP layer of DeepSeek-V3 (arXiv 2412.19437, §2.2). Block
    and last norm are a decoder of the model's own class with one layer, which runs by that model's code."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        norms = filter(partial(_is_norm, self.width), self.decoder.children())
        norm: Any = next(norms, nn.RMSNorm(self.width, 1e-6))
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection = nn.Linear(2 * self.width, self.width, bias=False)

    def entered(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See :class:`MtpLayer`."""
        both = super().entered(self.embedding_norm(embeddings), self.state_norm(states))
        found: torch.Tensor = self.projection(both)
        return found

    def begin_like(self, model: PreTrainedModel, anatomy: Anatomy, index: int) -> None:
        """Copies a layer of a model and its final norm; the projection is the mean of embedding and state."""
        inside = next(name for name, child in anatomy.stack.named_children() if anatomy.layers[0] in child.children())
        # Adapters of PEFT wrap layers; the copy has what these were without.
        theirs = {name.replace(".base_layer.", "."): value for name, value in anatomy.stack.state_dict().items()}
        own = {name: name.replace(f"{inside}.0.", f"{inside}.{index}.", 1) for name in self.decoder.state_dict()}
        copies = {name: theirs[their].to(torch.float32, copy=True) for name, their in own.items()}
        self.decoder.load_state_dict(copies, assign=True)
        half = torch.eye(self.projection.out_features, device="cpu", dtype=torch.float32) / 2
        self.projection.load_state_dict({"weight": torch.cat([half, half], dim=1)}, assign=True)
        for norm in (self.embedding_norm, self.state_norm):
            norm.to_empty(device="cpu")
            for parameter in norm.parameters():
                nn.init.zeros_(parameter)
            # Those of some models have weights around zero.
            if not norm(torch.linspace(-1, 1, self.projection.out_features, device="cpu", dtype=torch.float32)).any():
                nn.init.ones_(norm.weight)


class EagleLayer(_Layer):
    """The layer of an EAGLE-3 head (arXiv 2503.01840): its attention reads ``[norm(embedding); norm(h)]``, and its
    residual is ``h``, before or after its norm. It goes on with its output, before or after the last norm."""

    def __init__(self, config: PreTrainedConfig, norm_before_residual: bool, norm_output: bool) -> None:
        super().__init__(config)
        self.decoder.layers[0] = _EagleBlock(self.decoder.layers[0], self.width, norm_before_residual)
        if not norm_output:
            self.decoder.norm = nn.Identity()


class _EagleBlock(nn.Module):
    def __init__(self, layer: Any, width: int, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = layer.self_attn, layer.mlp, layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            known = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * width, known.out_features, known.bias is not None))

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        embeddings, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        states = (normed if self.norm_before_residual else states) + self.self_attn(hidden_states=both, **given)[0]
        found: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


def _is_norm(width: int, module: nn.Module) -> bool:
    shapes = [parameter.shape for parameter in module.parameters()]
    return bool(shapes) and all(shape == (width,) for shape in shapes)
