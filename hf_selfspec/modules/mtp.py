"""MTP layers: they predict further tokens from the state of the last one and the embedding of the next."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import SettingError, UnsupportedModelError, brief
from ..model.anatomy import Anatomy
from ..model.cache import SpeculativeCache
from ..model.head import spread
from ..model.linear import FewTokenLinear
from ..model.modules import forward_parameters
from ..model.patching import states_of
from ..model.prompt import cache_name
from ..validation import MOST_LAYERS, check_count
from .draft_module import DraftModule

# Entries of a config that have a value for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types")


def layer_of_kind(config: PreTrainedConfig, num_layers: int, kind: str = "full_attention") -> int:
    """Returns the last layer with this kind of attention; the last of all where the config names none."""
    kinds = getattr(config, "layer_types", None) or [kind] * num_layers
    return max((index for index, found in enumerate(kinds) if found == kind), default=num_layers - 1)


def config_of_layer(config: PreTrainedConfig, index: int) -> dict[str, Any]:
    """Returns the config of a model that has only this layer of another one, and no vocabulary."""
    found = copy.deepcopy(config)
    for name in _PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(found, name, [values[index]])
    if (dense := getattr(config, "first_k_dense_replace", None)) is not None:
        found.first_k_dense_replace = int(index < dense)
    found.num_hidden_layers = found.vocab_size = 1
    found.pad_token_id = found.bos_token_id = found.eos_token_id = None
    return found.to_dict()


class MtpLayer(nn.Module):
    """``h' = norm(Block(W [norm(embedding); norm(h)]))``: an MTP layer of DeepSeek-V3 (arXiv 2412.19437, §2.2). Block
    and last norm are a decoder of the model's own class with one layer, which runs by that model's code."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.width = width = config.hidden_size
        decoder = _decoder(config)
        norm: Any = next(filter(partial(_is_norm, width), decoder.children()), nn.RMSNorm(width, 1e-6))
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection, self.decoder = nn.Linear(2 * width, width, bias=False), decoder

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """See :meth:`MtpHead.forward`."""
        both = torch.cat([self.embedding_norm(embeddings), self.state_norm(states)], dim=-1)
        return _through(self.decoder, self.projection(both), positions, cache)

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


class EagleLayer(nn.Module):
    """The layer of an EAGLE-3 head (arXiv 2503.01840): a decoder layer whose attention reads ``[norm(embedding);
    norm(h)]``, and whose residual is ``h``, before or after its norm."""

    def __init__(self, config: PreTrainedConfig, norm_before_residual: bool, norm_output: bool) -> None:
        super().__init__()
        self.width, self.decoder = config.hidden_size, _decoder(config)
        self.decoder.layers[0] = _EagleBlock(self.decoder.layers[0], self.width, norm_before_residual)
        if not norm_output:
            self.decoder.norm = nn.Identity()

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """See :meth:`MtpHead.forward`."""
        return _through(self.decoder, torch.cat([embeddings, states], dim=-1), positions, cache)


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


class EagleOutput(nn.Module):
    """The norm and output head of an EAGLE-3 head, which has some tokens ``[r]`` of the vocabulary."""

    def __init__(self, norm: nn.Module, width: int, size: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.vocabulary = norm, vocabulary
        self.head = FewTokenLinear(width, size, bias=False)
        self.tokens = nn.Parameter(torch.arange(size), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[..., v]`` of states ``[..., d]``."""
        return spread(self.head(self.norm(states)), self.tokens, self.vocabulary)


def _decoder(config: PreTrainedConfig) -> Any:
    """A decoder of the model's own class, which takes embeddings."""
    decoder: Any = Anatomy.of(AutoModelForCausalLM.from_config(config)).stack
    decoder.set_input_embeddings(nn.Identity())
    return decoder


def _through(decoder: Any, entered: torch.Tensor, positions: torch.Tensor | None, cache: Any) -> torch.Tensor:
    given = {"position_ids": positions, cache_name(decoder): cache, "use_cache": cache is not None}
    known = {name: value for name, value in given.items() if name in forward_parameters(decoder)}
    return states_of(decoder(inputs_embeds=entered, **known))


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
        state_layers: the layers of the model whose entering states are read, in increasing order, with ``L`` for what
            leaves its final norm; a projection makes one state of theirs (EAGLE-3, arXiv 2503.01840). By default what
            leaves the final norm is read as it is, by an EAGLE-3 head the layers 2, ``L // 2`` and ``L - 3``.
        eagle3: settings of an EAGLE-3 head, which :meth:`hf_selfspec.MTP.from_eagle3` makes: ``vocabulary`` and
            ``draft_vocabulary``, ``target_width`` of the model, ``norm_before_residual``, ``norm_output``, and
            ``own_embedding``.

    Raises:
        SettingError: these are no configs of a causal LM that transformers knows.
    """

    kind = "MTP head"

    def __init__(
        self,
        configs: list[dict[str, Any]],
        about: dict[str, Any] | None = None,
        state_layers: Sequence[int] = (),
        eagle3: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.eagle3 = eagle3
        self.output: EagleOutput | None = None
        self.embedding: nn.Embedding | None = None
        self.about, self.configs, self.state_layers = about, configs, tuple(state_layers)
        for layer in self.state_layers:
            check_count("MtpHead(state_layers): a layer", layer, least=0, most=MOST_LAYERS)
        if sorted(set(self.state_layers)) != list(self.state_layers):
            raise SettingError(f"MtpHead(state_layers) must be in increasing order, got {state_layers!r}.")
        try:
            # Weights come from a file or from a model.
            with torch.device("meta"):
                layer_configs = [AutoConfig.for_model(**config) for config in configs]
                if eagle3 is None:
                    self.layers = nn.ModuleList(map(MtpLayer, layer_configs))
                    self.state_width = self.parts[0].width * max(len(self.state_layers), 1)
                else:
                    self._be_eagle(layer_configs[0], eagle3)
                is_fused = self.state_layers or eagle3 is not None
                width = self.parts[0].width
                self.fuse = nn.Linear(self.state_width, width, bias=False) if is_fused else nn.Identity()
            with torch.device("cpu"), torch.no_grad():
                for layer in self.parts:
                    _compute_buffers(layer.decoder)
        except Exception as error:  # of the code of any model
            raise SettingError(f"MtpHead(configs) are no configs of MTP layers: {brief(error)}.") from error

    @property
    def parts(self) -> list[Any]:
        """The layers, each an :class:`MtpLayer`."""
        return list(self.layers)

    def _be_eagle(self, config: PreTrainedConfig, known: dict[str, Any]) -> None:
        layer = EagleLayer(config, known["norm_before_residual"], known["norm_output"])
        norm = nn.Identity() if known["norm_output"] else copy.deepcopy(layer.decoder.layers[0].hidden_norm)
        self.layers, self.state_width = nn.ModuleList([layer]), known["target_width"] * (len(self.state_layers) or 3)
        self.output = EagleOutput(norm, layer.width, known["draft_vocabulary"], known["vocabulary"])
        if known["own_embedding"]:
            self.embedding = nn.Embedding(known["vocabulary"], layer.width)

    def read_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The layers of a model whose entering states are read, ``L`` for what leaves its final norm.

        Raises:
            SettingError: the head belongs to a model of another width, vocabulary or number of layers.
        """
        config, n = model.config.get_text_config(decoder=True), Anatomy.of(model).num_layers
        layers, last, trouble = self.state_layers or (n,), n, ""
        if self.eagle3 is not None:
            layers, last = self.state_layers or (2, n // 2, n - 3), n - 1
            if self.eagle3["vocabulary"] != config.vocab_size:
                trouble = f"has a vocabulary of {self.eagle3['vocabulary']} tokens, the model of {config.vocab_size}"
        if self.state_width != len(layers) * config.hidden_size:
            trouble = f"reads states of width {self.state_width}, the model's have {len(layers)} x {config.hidden_size}"
        elif layers[-1] > last or list(layers) != sorted(set(layers)):
            trouble = f"reads the states that enter the layers {list(layers)}, the model has {n} layers"
        if trouble:
            raise SettingError(
                f"this {self.kind} was not made for {type(model).__name__}: it {trouble}. Use one that was."
            )
        return layers

    def __repr__(self) -> str:
        return f"MtpHead({self.digest})"

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
            states: ``[b, s, d]`` what ``fuse`` makes of the model's states at the tokens before these, or what the
                layer before this one returned.
            positions: ``[b, s]`` of the tokens in the text; from 0 on by default.
            cache: keys and values of this layer, a ``Cache`` of transformers; ``None`` if there are none.
            layer: which layer runs.

        Returns:
            ``[b, s, d]``.
        """
        dtype, module = next(self.parameters()).dtype, self.parts[layer]
        return module(embeddings.to(dtype), states.to(dtype), positions, cache)

    @classmethod
    def of(cls, model: PreTrainedModel, state_layers: Sequence[int] = ()) -> MtpHead:
        """Returns a head of one layer that begins as a copy of the model's last layer with full attention.

        Args:
            model: a causal LM of transformers.
            state_layers: see :class:`MtpHead`; the head begins with the state of the last of them.

        Raises:
            SettingError, SettingTypeError: the model has no such layers.
            UnsupportedModelError: that layer cannot stand alone, or keeps more than keys and values.
        """
        anatomy, config = Anatomy.of(model), model.config.get_text_config(decoder=True)
        index = layer_of_kind(config, anatomy.num_layers)
        try:
            head = cls([config_of_layer(config, index)], state_layers=state_layers)
            head.read_layers(model)
            head.parts[0].begin_like(model, anatomy, index)
            if state_layers:
                none, one = torch.zeros(2, config.hidden_size, config.hidden_size, device="cpu", dtype=torch.float32)
                weight = torch.cat([*[none] * (len(state_layers) - 1), one.fill_diagonal_(1)], dim=1)
                head.fuse.load_state_dict({"weight": weight}, assign=True)
            head.eval().try_out()
        except SettingError:
            raise
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
            states = next(layer.parameters()).new_zeros(1, 2, layer.width)
            layer(states, states, torch.arange(2, device=states.device)[None], SpeculativeCache(1, 1, 2))
