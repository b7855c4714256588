"""MTP layers: they predict further tokens from the state of the last one and the embedding of the next."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import SettingError, UnsupportedModelError, brief
from ..model.anatomy import Anatomy
from ..model.cache.speculative_cache import SpeculativeCache
from ..model.head import spread
from ..model.internals import compute_buffers
from ..model.linear import FewTokenLinear
from ..model.module_tools import forward_parameters
from ..model.patching import states_of
from ..model.prompt import cache_name
from .draft_module import About, DraftModule, told

# Entries of a config that have a value for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types")


def last_full_layer(config: PreTrainedConfig, num_layers: int) -> int:
    """Returns the last layer with full attention; the last of all where the config names none."""
    types = getattr(config, "layer_types", None) or []
    return max((index for index, kind in enumerate(types) if kind == "full_attention"), default=num_layers - 1)


def config_of_layer(config: PreTrainedConfig, index: int, count: int = 1) -> dict[str, Any]:
    """Returns the config of a model that has only this layer of another one, or as many from it on, and no
    vocabulary."""
    of_layer = copy.deepcopy(config)
    for name in PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(of_layer, name, values[index : index + count])
    if (dense := getattr(config, "first_k_dense_replace", None)) is not None:
        of_layer.first_k_dense_replace = int(index < dense)
    if hasattr(of_layer, "quantization_config"):
        del of_layer.quantization_config
    of_layer.num_hidden_layers, of_layer.vocab_size = count, 1
    of_layer.pad_token_id = of_layer.bos_token_id = of_layer.eos_token_id = None
    return of_layer.to_dict()


class _Layer(nn.Module):
    """A decoder of the model's own class, which runs by that model's code, with one layer, or several of EAGLE-3."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.width, self.depth = config.hidden_size, config.num_hidden_layers
        decoder: Any = Anatomy.of(AutoModelForCausalLM.from_config(config)).stack
        decoder.set_input_embeddings(nn.Identity())
        self.decoder = decoder

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """See :meth:`MtpHead.forward`."""
        options = {"position_ids": positions, cache_name(self.decoder): cache, "use_cache": cache is not None}
        taken = {name: value for name, value in options.items() if name in forward_parameters(self.decoder)}
        return states_of(self.decoder(inputs_embeds=self.entered(embeddings, states), **taken))

    def entered(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What enters the decoder, here ``[b, s, 2 d]``: embeddings and states side by side."""
        return torch.cat([embeddings, states], dim=-1)


class MtpLayer(_Layer):
    """``h' = norm(Block(W [norm(embedding); norm(h)]))``: an MTP layer of DeepSeek-V3 (arXiv 2412.19437, §2.2)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        children = self.decoder.children()
        norms = (child for child in children if {weight.shape for weight in child.parameters()} == {(self.width,)})
        norm: Any = next(norms, nn.RMSNorm(self.width, 1e-6))
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection = nn.Linear(2 * self.width, self.width, bias=False)

    def entered(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See :class:`MtpLayer`."""
        return self.projection(super().entered(self.embedding_norm(embeddings), self.state_norm(states)))

    def begin_like(self, model: PreTrainedModel, anatomy: Anatomy, index: int) -> None:
        """Copies a layer of a model and its final norm; the projection is the mean of embedding and state."""
        inside = next(name for name, child in anatomy.stack.named_children() if anatomy.layers[0] in child.children())
        # Adapters of PEFT wrap layers; the copy has what these were without.
        weights = {name.replace(".base_layer.", "."): value for name, value in anatomy.stack.state_dict().items()}
        copies = {
            name: weights[name.replace(f"{inside}.0.", f"{inside}.{index}.", 1)].to(torch.float32, copy=True)
            for name in self.decoder.state_dict()
        }
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
    """The layers of an EAGLE-3 head (arXiv 2503.01840): the first's attention reads ``[norm(embedding); norm(h)]``."""

    def __init__(self, config: PreTrainedConfig, settings: dict[str, Any]) -> None:
        super().__init__(config)
        self.decoder.layers[0] = _EagleBlock(self.decoder.layers[0], self.width, settings["norm_before_residual"])
        if not settings["norm_output"]:
            self.decoder.norm = nn.Identity()


class _EagleBlock(nn.Module):
    def __init__(self, layer: Any, width: int, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = layer.self_attn, layer.mlp, layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * width, narrow.out_features, narrow.bias is not None))

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        embeddings, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        entered = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        states = (normed if self.norm_before_residual else states) + self.self_attn(hidden_states=entered, **options)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


def _compute_buffers(decoder: PreTrainedModel) -> None:
    """Gives buffers on the meta device their values, by the code with which transformers does so when it loads."""
    for module in decoder.modules():
        empty = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in empty.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        if empty:
            compute_buffers(module, decoder)


def check_states(
    head: Any, model: PreTrainedModel, layers: tuple[int, ...], width: int, vocabulary: int, last: int
) -> tuple[int, ...]:
    """Returns the layers whose entering states a head reads, up to ``last``; raises if it is not for this model."""
    (model_vocabulary, model_width), anatomy = model.get_input_embeddings().weight.shape, Anatomy.of(model)
    n = anatomy.num_layers
    if anatomy.streams and layers != (n,):
        trouble = "reads states between layers, of which the model has several a token"
    elif width != model_width:
        trouble = f"takes states of width {width}, and the model has {model_width}"
    elif vocabulary != model_vocabulary:
        trouble = f"has a vocabulary of {vocabulary}, and the model of {model_vocabulary}"
    elif not 0 <= head.mask_token < vocabulary:  # on a GPU a look-up would be the end of the process
        trouble = f"has the mask token {head.mask_token}, and a vocabulary of {vocabulary}"
    elif not 0 <= layers[0] <= layers[-1] <= last or list(layers) != sorted(set(layers)):
        trouble = f"reads the states before layers {list(layers)}, and the model has {n}"
    else:
        return layers
    raise SettingError(f"this {head.kind} {trouble}: it was made for another model. Give the head of this one.")


class MtpHead(DraftModule):
    """One or more MTP layers: the first predicts the token after the next one, the second the one after that.

    A head of one layer, and the last one of several, drafts further tokens from its own states. What it returns goes
    into the model's own output head.

    Args:
        configs: for each layer the config of a model of one such layer, without vocabulary, as ``to_dict`` returns it.
        about: see :class:`DraftModule`.
        size: how many tokens it can draft, those of ``tokens`` ``[size]``; 0 for all of the vocabulary.
        state_layers: the layers of the model whose entering states are read, in increasing order, with ``L`` for what
            leaves its final norm; a projection makes one state of theirs (EAGLE-3, arXiv 2503.01840). By default what
            leaves the final norm is read as it is, by an EAGLE-3 head the layers 2, ``L // 2`` and ``L - 3``.
        eagle3: settings of an EAGLE-3 head, which :meth:`hf_selfspec.MTP.from_eagle3` makes: the model's
            ``vocabulary``, ``norm_before_residual``, ``norm_output``, and ``own_embedding``; with norms before ``fuse``
            their number, ``norms_before_fuse``; for P-EAGLE (arXiv 2602.01469), which drafts ``num_tokens`` in one
            forward, the ``mask_token`` of the places behind the first, whose state is the parameter ``mask_state``.

    Raises:
        SettingError: ``configs`` are not those of a causal LM that transformers knows.
    """

    kind, usage, source = "MTP head", "SelfSpec.mtp({!r})", "MTP"
    tokens: torch.Tensor | None
    layers: Any  # each an :class:`MtpLayer`, or one :class:`EagleLayer`

    def __init__(
        self,
        configs: list[dict[str, Any]],
        about: About = None,
        size: int = 0,
        state_layers: Sequence[int] = (),
        eagle3: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(about)
        self.configs, self.eagle3 = configs, eagle3
        # How many tokens it drafts in one forward, and the token of all but the first.
        self.num_tokens, self.mask_token = (int((eagle3 or {}).get(name, 1)) for name in ("num_tokens", "mask_token"))
        self.state_layers = tuple(map(int, state_layers))
        self.register_buffer("tokens", torch.arange(size, device="cpu") if size else None)
        try:
            # Weights come from a file or from a model.
            with torch.device("meta"):
                layers = [AutoConfig.for_model(**config) for config in configs]
                self.layers = nn.ModuleList(
                    MtpLayer(layer) if eagle3 is None else EagleLayer(layer, eagle3) for layer in layers
                )
                width, count = self.layers[0].width, len(self.state_layers) or (0 if eagle3 is None else 3)
                self.fuse = nn.Linear(count * width, width, bias=False) if count else nn.Identity()
                self.fuse_norm = nn.ModuleList()
                self.mask_state: nn.Parameter | None = None
                self.embedding: nn.Embedding | None = None
                self.output: nn.Sequential | None = None
                if eagle3 is not None:  # they are not the model's
                    norm = self.layers[0].decoder.layers[0].hidden_norm
                    for parts in [eagle3.get("norms_before_fuse", 0)] * eagle3.get("norms_before_fuse", 0):
                        self.fuse_norm.append(nn.RMSNorm(count * width // parts, layers[0].rms_norm_eps))
                    if "mask_token" in eagle3:
                        self.mask_state = nn.Parameter(norm.weight.new_empty(count * width))
                    norm = nn.Identity() if eagle3["norm_output"] else copy.deepcopy(norm)
                    self.embedding = nn.Embedding(eagle3["vocabulary"], width) if eagle3["own_embedding"] else None
                    self.output = nn.Sequential(norm, FewTokenLinear(width, size, bias=False))
            with torch.device("cpu"), torch.no_grad():
                for layer in self.layers:
                    _compute_buffers(layer.decoder)
        except Exception as error:  # of the code of any model
            raise SettingError(
                f"MtpHead(configs) are no configs of MTP layers as `to_dict` returns them: {brief(error)}. "
                "MtpHead.of(model) makes a head for a model."
            ) from error

    def facts(self) -> list[str]:
        """See :meth:`DraftModule.facts`."""
        kind, eagle3 = self.kind, self.eagle3 or {"vocabulary": 0}
        if self.eagle3 is not None:
            kind = "EAGLE-3 head" if self.mask_state is None else f"P-EAGLE head ({self.num_tokens} tokens at once)"
        count, size = sum(layer.depth for layer in self.layers), 0 if self.tokens is None else len(self.tokens)
        return [kind, *told(count, self.layers[0].width, self.state_layers, size, eagle3["vocabulary"])]

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the first layer, ``[b, s, d]``, of the model's states ``[b, s, n d]``."""
        if norms := list(self.fuse_norm):
            parts = zip(norms, states.chunk(len(norms), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return cast(torch.Tensor, self.fuse(states))

    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[..., v]`` of states ``[..., d]`` by the head's own output head."""
        output, tokens, eagle3 = cast(Any, (self.output, self.tokens, self.eagle3))
        return spread(output(states), tokens, eagle3["vocabulary"])

    def read_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Returns the layers of a model whose entering states are read; raises if the head is not for this model."""
        (vocabulary, width), eagle3 = model.get_input_embeddings().weight.shape, self.eagle3
        n = last = Anatomy.of(model).num_layers
        usual: tuple[int, ...] = (n,)
        if eagle3 is not None:
            vocabulary, usual, last = eagle3["vocabulary"], (2, n // 2, n - 3), n - 1
        wrong_widths = [layer.width for layer in self.layers if layer.width != width] or [width]
        return check_states(self, model, self.state_layers or usual, wrong_widths[-1], vocabulary, last)

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor | None = None,
        cache: Any = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Returns the states ``[b, s, d]`` that go into the model's output head, and into the next layer, from the
        tokens' embeddings and what :meth:`fused` makes of the states before them, or the last layer returned."""
        dtype, module = next(self.parameters()).dtype, self.layers[layer]
        return module(embeddings.to(dtype), states.to(dtype), positions, cache)

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokens: torch.Tensor | None = None, state_layers: Sequence[int] = ()
    ) -> MtpHead:
        """Returns a head of one layer that begins as a copy of the model's last layer with full attention, and drafts
        some tokens ``[size]`` or all. Of several ``state_layers``, see :class:`MtpHead`, it begins with the last one's.

        Raises:
            SettingError, SettingTypeError: the model has no such layers.
            UnsupportedModelError: that layer cannot stand alone, or keeps more than keys and values.
        """
        anatomy, config = Anatomy.of(model), model.config.get_text_config(decoder=True)
        index, width = last_full_layer(config, anatomy.num_layers), model.get_input_embeddings().weight.shape[1]
        if width != config.hidden_size:
            raise UnsupportedModelError(
                f"{anatomy.model_name} sends states of width {width} to its head and has {config.hidden_size} between "
                "its layers, so no MTP head can be made of one of them."
            )
        try:
            size = 0 if tokens is None else len(tokens)
            head = cls([config_of_layer(config, index)], size=size, state_layers=state_layers)
            if state_layers:
                head.read_layers(model)
                weight = torch.zeros(width, len(state_layers) * width, device="cpu", dtype=torch.float32)
                weight[:, -width:].fill_diagonal_(1)
                head.fuse.load_state_dict({"weight": weight}, assign=True)
            if tokens is not None:
                head.load_state_dict({"tokens": tokens.detach().clone()}, strict=False, assign=True)
            head.layers[0].begin_like(model, anatomy, index)
            head.eval().try_out()
        except Exception as error:  # of the code of any model
            if isinstance(error, SettingError) and error.__cause__ is None:  # about state_layers
                raise
            raise UnsupportedModelError(
                f"layer {index} of {anatomy.model_name} cannot stand alone, or keeps more than keys and values, so no "
                f"MTP head can be made of it ({brief(error.__cause__ or error)})."
            ) from error
        return head

    @torch.no_grad()
    def try_out(self) -> None:
        """Runs each layer over two tokens, with keys and values alone in its cache."""
        for layer in self.layers:
            states = next(layer.parameters()).new_zeros(1, 2, layer.width)
            layer(states, states, torch.arange(2, device=states.device)[None], SpeculativeCache(layer.depth, 1, 2))
