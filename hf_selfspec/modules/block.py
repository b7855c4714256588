"""Block heads as others publish them: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

One forward over a block, the text's last token and mask tokens behind it, drafts a token in each of its slots.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)
from typing_extensions import Self

from ..errors import SettingError
from ..model.anatomy import Anatomy
from ..model.attention.interface import MaskSpec, grouped_attention
from ..model.linear import FewTokenLinear
from ..validation import MOST_DRAFT, check_count
from .draft_module import (
    CONFIG,
    DIGEST,
    WEIGHTS,
    About,
    DraftModule,
    check_save,
    file_of,
    published_weights,
    read_config,
    read_tensors,
    reading,
    register_format,
)
from .eagle import tokens_of
from .mtp import check_states

# Settings of speculators' format with their defaults; ``window_of`` is ours.
_USUAL: dict[str, Any] = {
    "speculators_model_type": "dflash", "transformer_layer_config": {}, "draft_vocab_size": 32000, "block_size": 8,
    "aux_hidden_state_layer_ids": None, "mask_token_id": None, "target_hidden_size": None,
    "sliding_window_non_causal": False, "sample_from_anchor": False, "window_of": "anchor",
    "markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False,
    "confidence_head_with_markov": True,
}  # fmt: skip
_USUAL_DSPARK = {"sample_from_anchor": True, "markov_rank": 256, "enable_confidence_head": True}
_SERVED = ("dflash", "dspark")
_MARKOV = ("vanilla", "gated", "rnn")
_ROPES = ("default", "linear", "llama3", "yarn")
# Parts of checkpoints that drafts do not need: `t2d` says the same as `d2t`, and the others are the model's own.
_UNUSED = ("t2d", "embed_tokens.", "verifier_")


class MarkovHead(nn.Module):
    """What the token ``x`` before a slot adds to the slot's logits: ``W2 E1[x]``, as it is (``vanilla``), gated by the
    slot's state, or after a recurrent cell that runs over the slots."""

    def __init__(self, vocabulary: int, size: int, rank: int, width: int, way: str) -> None:
        super().__init__()
        self.way, self.rank = way, rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = FewTokenLinear(rank, size, bias=False)
        if way == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif way == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what is added to the logits of a slot, ``[b, r]``, and the cell's memory ``[b, rank]`` for the next
        slot, from the embedding ``[b, rank]`` of the token before the slot and the slot's state ``[b, d]``."""
        if self.way == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat([states, embedded], dim=-1))) * embedded
        elif self.way == "rnn":
            joint = self.joint_proj(torch.cat([memory, embedded, states], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory, embedded = gate * memory + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
        return self.markov_w2(embedded), memory


class BlockHead(DraftModule):
    """Decoder layers of Qwen 3's form, which attend to the verified tokens (through a projection of the model's states)
    and to the block itself. Names of settings and weights are those of speculators.

    Args:
        about: see :class:`DraftModule`.
        settings: see :data:`_USUAL`.

    Raises:
        SettingError: a setting is not allowed, or is that of a variant that is not served.
    """

    kind, usage, source = "block head", "SelfSpec(Cascade([Lookup(), Block({!r})]))", "Block"
    d2t: torch.Tensor | None

    def __init__(self, about: About = None, **settings: Any) -> None:
        super().__init__(about)
        self.settings = settings = _checked(settings)
        config, layers = _layers(settings), settings["aux_hidden_state_layer_ids"]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.state_layers, self.width, self.vocabulary = tuple(map(int, layers)), width, config.vocab_size
        self.block_size, self.mask_token = settings["block_size"], settings["mask_token_id"]
        self.first_slot = 0 if settings["sample_from_anchor"] else 1
        size, rank, way = settings["draft_vocab_size"], settings["markov_rank"], settings["markov_head_type"]
        self.layers: Any = nn.ModuleList(
            Qwen3DecoderLayer(config, number) for number in range(config.num_hidden_layers)
        )
        window = getattr(config, "sliding_window", None)
        self.windows = [window if attention == "sliding_attention" else None for attention in config.layer_types]
        self.norm, self.hidden_norm = Qwen3RMSNorm(width, eps), Qwen3RMSNorm(width, eps)
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        is_whole = size == self.vocabulary
        self.lm_head = None if is_whole else FewTokenLinear(width, size, bias=False)
        self.register_buffer("d2t", None if is_whole else torch.zeros(size, dtype=torch.long, device="cpu"))
        with torch.device("cpu"):  # checkpoints do not hold its frequencies
            self.rotary = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(self.vocabulary, size, rank, width, way) if rank else None
        self.confidence_head: nn.ModuleDict | None = None
        if settings["enable_confidence_head"]:  # the probability that a slot's token is accepted, before a sigmoid
            inside = width + (rank if settings["confidence_head_with_markov"] else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inside, 1)})
        for module in self.modules():
            if type(module) is nn.Linear:  # transformers' own; 0.8 of the time for 5 tokens (float32, width 2048)
                module.__class__ = FewTokenLinear

    @property
    def num_tokens(self) -> int:
        """How many tokens a block drafts."""
        return int(self.block_size - self.first_slot)

    @property
    def tokens(self) -> torch.Tensor | None:
        """The tokens ``[r]`` that it can draft, ``None`` for all."""
        offsets = self.d2t
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def read_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Returns the layers of a model whose entering states are read; raises if the head is not for this model."""
        # Heads in transformers' format may read what leaves the final norm, layer L.
        last = Anatomy.of(model).num_layers - (self.settings["window_of"] == "anchor")
        vocabulary = self.vocabulary or len(model.get_input_embeddings().weight)
        if not 0 <= self.mask_token < vocabulary:
            raise SettingError(
                f"this {self.kind} has the mask_token_id {self.mask_token}, and a vocabulary of {vocabulary}: its "
                f"{CONFIG} was changed. Load the checkpoint again."
            )
        return check_states(self, model, self.state_layers, self.width, vocabulary, last)

    def take_in(self, states: torch.Tensor, positions: torch.Tensor, cache: Any) -> None:
        """Writes the keys and values of verified tokens, from the model's states of these ``[b, s, n d]``."""
        entered = self.hidden_norm(self.fc(states))
        rotation = self.rotary(entered, positions)
        for number, layer in enumerate(self.layers):
            cache.update(*_keys_and_values(layer.self_attn, entered, rotation), number)

    def forward(
        self,
        embeddings: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        is_even: bool,
        cache: Any,
    ) -> torch.Tensor:
        """Returns the states ``[b, B, d]`` of a block.

        Args:
            embeddings: ``[b, B, d]`` of the text's last token and of mask tokens.
            slots: ``[b, B]`` where the cache takes the block's keys and values: after those of the verified tokens. The
                next block overwrites them.
            positions: ``[b, B]`` for the rotary embedding.
            length: the longest row ends before this slot.
            is_even: whether all rows do.
            cache: the keys and values of the head's layers.
        """
        states, spec = embeddings, MaskSpec(slots, length, is_even=is_even)
        rotation = self.rotary(states, positions)
        masks = {window: self._mask(slots, length, is_even, window) for window in set(self.windows)}
        for number, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            attention, entered = layer.self_attn, layer.input_layernorm(states)
            query = _turned(attention.q_norm(_heads(attention, attention.q_proj(entered))), rotation)
            keys, values = cache.update(*_keys_and_values(attention, entered, rotation), number)
            attended, _ = grouped_attention(
                spec, attention, query, keys, values, masks[window], scaling=attention.scaling, is_causal=False
            )
            states = states + attention.o_proj(attended.flatten(2))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        output: torch.Tensor = self.norm(states)
        return output

    def _mask(self, slots: torch.Tensor, length: int, is_even: bool, window: int | None) -> torch.Tensor | None:
        """What each slot attends to, ``[b, 1, B, length]``, ``None`` for everything: the block, and the text before it.

        In a window: so many tokens before the block, or (heads of transformers) around each slot; and the block only up
        to the slot itself, unless the head's windows are not causal.
        """
        if is_even and window is None:
            return None
        keys, begin, slot = torch.arange(length, device=slots.device), slots[:, :1, None], slots[:, :, None]
        if window is None:
            visible = keys < begin + self.block_size
        else:
            visible = keys < begin + self.block_size if self.settings["sliding_window_non_causal"] else keys <= slot
            if self.settings["window_of"] == "slot":
                visible = visible & (keys >= slot - window) & (keys <= slot + window)
            else:
                visible = visible & (keys >= begin - window)
        return visible.expand(len(slots), self.block_size, length)[:, None]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Reads a checkpoint; see :class:`hf_selfspec.Block`."""
        name = os.fspath(pretrained_model_name_or_path)
        config, weights_file = read_config(cls.kind, name, **options), file_of(cls.kind, name, WEIGHTS, **options)
        with reading(cls.kind, name):
            settings = _settings_of(name, config)
            tensors = {_renamed(key): value for key, value in read_tensors(weights_file).items()}
            with torch.device("meta"):  # no memory is allocated for what the settings want, but the weights do not have
                head = cls(**settings)
            if head.lm_head is not None:
                tokens_of(tensors.get("d2t"), head.settings["draft_vocab_size"], head.vocabulary)
            unused = _UNUSED if head.lm_head is not None else (*_UNUSED, "lm_head.", "d2t")
            head.load_state_dict(published_weights(tensors, unused), assign=True)
            if DIGEST in config:  # of ours, not published
                check_save(config[DIGEST], weights_file)
        return head.eval().requires_grad_(False)


def _heads(attention: Any, values: torch.Tensor) -> torch.Tensor:
    """Values ``[b, s, k h]`` as ``[b, k, s, h]``."""
    return values.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def _turned(values: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = (part[:, None] for part in rotation)
    return values * cosine + rotate_half(values) * sine


def _keys_and_values(
    attention: Any, entered: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = attention.k_norm(_heads(attention, attention.k_proj(entered)))
    return _turned(keys, rotation), _heads(attention, attention.v_proj(entered))


def is_block_head(config: dict[str, Any]) -> bool:
    """Whether a configuration is that of a block head, in any of the formats, served or not."""
    named = str(config.get("speculators_model_type", ""))
    return named.startswith(("dflash", "dspark")) or "dflash_config" in config or "target_layer_ids" in config


register_format(is_block_head, BlockHead.from_pretrained)


def _settings_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a head from a configuration in one of the formats."""
    if "speculators_model_type" in config:
        usual = _USUAL | (_USUAL_DSPARK if config["speculators_model_type"] == "dspark" else {})
        return {key: config.get(key, value) for key, value in (usual | {"about": None}).items()}
    if "dflash_config" in config:
        raise _not_served(name, "the format of DFlash's authors, of which `speculators convert` makes speculators'")
    if config.get("model_type") != "muse_glimmer_assistant":
        raise SettingError(
            f"{name} holds no block head: its {CONFIG} is neither that of a DFlash or DSpark head of speculators, "
            "nor of a DFlash head of transformers. Give the folder or the Hub repository of one."
        )
    # Its decoder layers have Qwen 3's form; its vocabulary is the model's.
    layer = AutoConfig.for_model(**config).to_dict() | {"model_type": "qwen3", "use_sliding_window": True}
    return _USUAL | {
        "transformer_layer_config": layer | {"vocab_size": 0},
        "draft_vocab_size": 0,
        "block_size": layer["block_size"],
        "mask_token_id": layer["mask_token_id"],
        "aux_hidden_state_layer_ids": [number + 1 for number in layer["target_layer_ids"]],
        "sliding_window_non_causal": True,
        "window_of": "slot",
    }


def _renamed(key: str) -> str:
    """The name in speculators' format of a weight of transformers'."""
    return key.replace("encoder.fc.", "fc.").replace("encoder.output_norm_enc.", "hidden_norm.")


def _not_served(name: str, *variants: str) -> SettingError:
    return SettingError(
        f"{name} is a variant that is not served: {', '.join(variants)}. Take a DFlash or DSpark head with layers of "
        "Qwen 3's form, in full attention or in windows; an EAGLE-3 head loads with MTP.from_eagle3."
    )


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    name = "this block head"
    if unknown := sorted(settings.keys() - _USUAL.keys()):
        raise SettingError(f"{name} has unknown settings: {', '.join(unknown)}.")
    settings = _USUAL | settings
    if variants := list(_variants(settings, settings["transformer_layer_config"])):
        model_type = settings["speculators_model_type"]
        raise _not_served(name if model_type in _SERVED else f"{name} ({model_type})", *variants)
    check_count("block_size", settings["block_size"], least=2, most=MOST_DRAFT)
    if not isinstance(settings["mask_token_id"], int):
        raise SettingError(f"{name} has no mask_token_id, without which there is no block. Add it to its {CONFIG}.")
    return settings


def _variants(settings: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    """What a head has that is not served."""
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if (model_type := settings["speculators_model_type"]) not in _SERVED:
        yield str(model_type)
    if layer.get("model_type", "qwen3") not in ("qwen3", "llama"):
        yield f"layers of {layer['model_type']}"
    if settings["target_hidden_size"] not in (None, layer.get("hidden_size")):
        yield "target_hidden_size"
    if settings["markov_rank"] and settings["markov_head_type"] not in _MARKOV:
        yield f"a Markov head of type {settings['markov_head_type']}"
    if settings["enable_confidence_head"] and settings["confidence_head_with_markov"] and not settings["markov_rank"]:
        yield "a confidence head that reads a Markov head, without one"
    if rope_type not in _ROPES or any(isinstance(value, dict) for value in rope.values()):
        yield f"rotary positions of type {rope_type}, or of several types"
    for setting in ("partial_rotary_factor", "mlp_bias"):
        if rope.get(setting, layer.get(setting)) not in (None, False, 1.0):
            yield setting


def _layers(settings: dict[str, Any]) -> PreTrainedConfig:
    config = AutoConfig.for_model(**{"model_type": "qwen3"} | settings["transformer_layer_config"])
    if getattr(config, "layer_types", None) is None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config
