"""MTP layers: they predict further tokens from the state of the last one and the embedding of the next."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import SettingError, UnsupportedModelError, brief
from ..model.anatomy import Anatomy
from ..model.cache import SpeculativeCache
from ..model.modules import forward_parameters
from ..model.patching import states_of
from ..model.prompt import cache_name
from .draft_module import DraftModule

# Entries of a config that have a value for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types")


def layer_of_kind(config: PreTrainedConfig, num_layers: int, kind: str = "full_attention") -> int:
    """Returns the last layer with this kind of attention; the last of all where the config names none."""
    kinds = getattr(config, "layer_types", None) or [kind] * num_layers
    return max((index for index, found in enumerate(kinds) if found == kind), default=num_layers - 1)


def config_of_layer(config: PreTrainedConfig, index: int) -> dict[str, Any]:
    """Returns the config of a model that has only this layer of another one, and no vocabulary."""
    found = copy.deepcopy(config)
    for name in PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(found, name, [values[index]])
    if (dense := getattr(config, "first_k_dense_replace", None)) is not None:
        found.first_k_dense_replace = int(index < dense)
    if hasattr(found, "quantization_config"):
        del found.quantization_config
    found.num_hidden_layers = found.vocab_size = 1
    found.pad_token_id = found.bos_token_id = found.eos_token_id = None
    return found.to_dict()


class MtpLayer(nn.Module):
    """``h' = norm(Block(W [norm(embedding); norm(h)]))``: an MTP layer of DeepSeek-V3 (arXiv 2412.19437, §2.2). Block
    and last norm are a decoder of the model's own class with one layer, which runs by that model's code."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width = config.hidden_size
        decoder: Any = Anatomy.of(AutoModelForCausalLM.from_config(config)).stack
        decoder.set_input_embeddings(nn.Identity())
        norm: Any = next(filter(partial(_is_norm, width), decoder.children()), nn.RMSNorm(width, 1e-6))
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection, self.decoder = nn.Linear(2 * width, width, bias=False), decoder

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """See :meth:`MtpHead.forward`."""
        both = torch.cat([self.embedding_norm(embeddings), self.state_norm(states)], dim=-1)
        given = {"position_ids": positions, cache_name(self.decoder): cache, "use_cache": cache is not None}
        known = {name: value for name, value in given.items() if name in forward_parameters(self.decoder)}
        return states_of(self.decoder(inputs_embeds=self.projection(both), **known))

    def begin_like(self, model: PreTrainedModel, anatomy: Anatomy, index: int) -> None:
        """Copies a layer of a model and its final norm; the projection is the mean of embedding and state."""
        inside = next(name for name, child in anatomy.stack.named_children() if anatomy.layers[0] in child.children())
        theirs = anatomy.stack.state_dict()
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


def _compute_buffers(decoder: PreTrainedModel) -> None:
    """Gives buffers on the meta device their values, by the code with which transformers does so when it loads."""
    for module in decoder.modules():
        empty = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in empty.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        if empty:
            decoder._init_weights(module)


def _is_norm(width: int, module: nn.Module) -> bool:
    shapes = [parameter.shape for parameter in module.parameters()]
    return bool(shapes) and all(shape == (width,) for shape in shapes)


class MtpHead(DraftModule):
    """One or more MTP layers: of these the first predicts the token after the next one, the second the one after that.

    A head of one layer, and the last one of several, drafts further tokens from its own states. What it returns goes
    into the model's own output head.

    Args:
        configs: for each layer the config of a model of one such layer, without vocabulary, as ``to_dict`` returns it.
        about: see :class:`DraftModule`.
        size: how many tokens it can draft, those of ``tokens`` ``[size]``; 0 for all of the vocabulary.

    Raises:
        SettingError: these are no configs of a causal LM that transformers knows.
    """

    kind = "MTP head"
    tokens: torch.Tensor | None

    def __init__(self, configs: list[dict[str, Any]], about: dict[str, Any] | None = None, size: int = 0) -> None:
        super().__init__()
        self.about, self.configs = about, configs
        are_configs = isinstance(configs, list) and all(isinstance(c, dict) and "model_type" in c for c in configs)
        if not configs or not are_configs:
            raise SettingError(
                "MtpHead(configs) must be a list with the config of each layer as `to_dict` returns it, its model_type "
                f"included, got {brief(repr(configs))}. MtpHead.of(model) makes a head for a model."
            )
        self.register_buffer("tokens", torch.arange(size, device="cpu") if size else None)
        try:
            # Weights come from a file or from a model.
            with torch.device("meta"):
                self.layers = nn.ModuleList(MtpLayer(AutoConfig.for_model(**config)) for config in configs)
            with torch.device("cpu"), torch.no_grad():
                for layer in self.parts:
                    _compute_buffers(layer.decoder)
        except Exception as error:  # of the code of any model
            raise SettingError(f"MtpHead(configs) are no configs of MTP layers: {brief(error)}.") from error

    @property
    def parts(self) -> list[Any]:
        """The layers, each an :class:`MtpLayer`."""
        return list(self.layers)

    def __repr__(self) -> str:
        return f"MtpHead({self.digest})"

    def check_parts(self, width: int) -> None:
        """Raises if a layer takes states of another width."""
        for number, part in enumerate(self.parts):
            if (own := part.projection.out_features) != width:
                raise SettingError(
                    f"layer {number} of this MTP head takes states of width {own}, and the model has {width}: it was "
                    "made for another model. Give the head of this one, or make one by MtpHead.of(model)."
                )

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor | None = None,
        cache: Any = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Returns the states that go into the model's output head, and into the next layer.

        Args:
            embeddings: ``[b, s, d]`` of the tokens, by the model's own embedding.
            states: ``[b, s, d]`` what left the model's last layer and its final norm at the tokens before these, or
                what the layer before this one returned.
            positions: ``[b, s]`` of the tokens in the text; from 0 on by default.
            cache: keys and values of this layer, a ``Cache`` of transformers; ``None`` if there are none.
            layer: which layer runs.

        Returns:
            ``[b, s, d]``.
        """
        dtype, module = next(self.parameters()).dtype, self.parts[layer]
        return module(embeddings.to(dtype), states.to(dtype), positions, cache)

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: torch.Tensor | None = None) -> MtpHead:
        """Returns a head of one layer that begins as a copy of the model's last layer with full attention, and drafts
        some tokens ``[size]`` or all.

        Raises:
            UnsupportedModelError: that layer cannot stand alone, or keeps more than keys and values.
        """
        anatomy, config = Anatomy.of(model), model.config.get_text_config(decoder=True)
        index = layer_of_kind(config, anatomy.num_layers)
        try:
            head = cls([config_of_layer(config, index)], size=0 if tokens is None else len(tokens))
            if tokens is not None:
                head.load_state_dict({"tokens": tokens.detach().clone()}, strict=False, assign=True)
            head.parts[0].begin_like(model, anatomy, index)
            head.eval().try_out()
        except Exception as error:  # of the code of any model
            raise UnsupportedModelError(
                f"layer {index} of {anatomy.model_name} cannot stand alone, or keeps more than keys and values, so no "
                f"MTP head can be made of it ({brief(error)})."
            ) from error
        return head

    @torch.no_grad()
    def try_out(self) -> None:
        """Runs each layer over two tokens, with keys and values alone in its cache."""
        for layer in self.parts:
            states = layer.projection.weight.new_zeros(1, 2, layer.projection.out_features)
            layer(states, states, torch.arange(2, device=states.device)[None], SpeculativeCache(1, 1, 2))
