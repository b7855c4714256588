"""Block heads: DFlash (arXiv 2602.06036), DFlash2 (https://inco.ai/blog/dflash2) and DSpark (arXiv 2607.05147).

One forward over a block, the text's last token and mask tokens behind it, drafts a token in each of its slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from ..errors import SettingError
from ..model.anatomy import Anatomy
from ..model.attention.interface import MaskSpec, grouped_attention
from ..model.head import NOTHING
from ..model.linear import FewTokenLinear
from ..validation import MOST_DRAFT, check_count
from .draft_module import CONFIG, About, Config, DraftModule, check_served, told
from .mtp import check_states

# Settings of speculators' format with their defaults there; those from ``window_of`` on are ours.
DEFAULTS: Config = {
    "speculators_model_type": "dflash", "transformer_layer_config": {}, "draft_vocab_size": 32000, "block_size": 8,
    "aux_hidden_state_layer_ids": None, "mask_token_id": None, "target_hidden_size": None,
    "sliding_window_non_causal": False, "sample_from_anchor": False, "markov_rank": 0, "markov_head_type": "vanilla",
    "enable_confidence_head": False, "confidence_head_with_markov": True, "conv_kernel_size": 0, "conv_group_size": 16,
    "selector_rank": 0, "selector_top_k": 16, "window_of": "anchor", "embedding_scale": 1.0, "logit_scale": 1.0,
    "logit_cap": None,
}  # fmt: skip
_MARKOV = ("vanilla", "gated", "rnn")
_ROPES = ("default", "linear", "llama3", "yarn")


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


class Selector(nn.Module):
    """DFlash2's scores of a slot: ``U[c] + <A[x] * H h, B[c]>`` for the ``K`` most likely tokens ``c``, where ``x`` is
    the token before the slot, ``h`` the slot's state and ``U`` its logits; other tokens are not drafted."""

    def __init__(self, vocabulary: int, rank: int, candidates: int, width: int) -> None:
        super().__init__()
        self.candidates = min(candidates, vocabulary)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(self.hidden_projection.weight.new_empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(self.hidden_projection.weight.new_empty(vocabulary, rank))

    def forward(self, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Returns scores ``[b, v]`` of logits ``[b, v]``, states ``[b, d]`` and the tokens before the slots ``[b]``."""
        highest, candidates = logits.topk(self.candidates)
        context = self.predecessor_codebook[before] * self.hidden_projection(states)
        edges = (self.successor_codebook[candidates] @ context[..., None])[..., 0]
        return torch.full_like(logits, NOTHING).scatter(-1, candidates, highest + edges.to(highest))


class BlockConvolution(nn.Module):
    """DFlash2's mix of a slot with those before it in the block, ``Σ_t (base_t + δ_t) x_{i-t}``, of what enters
    attention or an MLP, and what leaves; ``δ`` is a projection of what enters, one number for a group of channels."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        self.base_kernel = nn.Parameter(self.kernel_projection.weight.new_empty(2, taps, width))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what enters, mixed, and the kernels ``[b, B, taps, d]`` of what leaves; states are ``[b, B, d]``."""
        kernels = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        entering, leaving = (self.base_kernel + kernels).unbind(2)
        return mixed(states, entering), leaving


def mixed(states: torch.Tensor, kernels: torch.Tensor | None) -> torch.Tensor:
    """States ``[b, B, d]`` mixed by kernels ``[b, B, taps, d]``, or as they are."""
    if kernels is None:
        return states
    shifted = [functional.pad(states, (0, 0, tap, 0))[:, : states.shape[1]] for tap in range(kernels.shape[2])]
    return (torch.stack(shifted, dim=2) * kernels).sum(2)


class BlockHead(DraftModule):
    """Decoder layers of Qwen 3's form, which attend to the verified tokens (through a projection of the model's states)
    and to the block itself. Names of settings and weights are those of speculators.

    Args:
        about: see :class:`DraftModule`.
        settings: see :data:`DEFAULTS`.

    Raises:
        SettingError: a setting is not allowed, or is that of a variant that is not served.
    """

    kind, usage, source = "block head", "SelfSpec(Cascade([Lookup(), Block({!r})]))", "Block"
    keeps_type = True
    d2t: torch.Tensor | None

    def __init__(self, about: About = None, **settings: Any) -> None:
        super().__init__(about)
        self.settings = settings = _checked(settings)
        config = AutoConfig.for_model(**{"model_type": "qwen3"} | settings["transformer_layer_config"])
        config.layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        layers = settings["aux_hidden_state_layer_ids"]
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
        taps, group = settings["conv_kernel_size"], settings["conv_group_size"]
        for layer in self.layers:
            for name in ("attention_conv", "mlp_conv"):
                setattr(layer, name, BlockConvolution(width, taps, group) if taps else None)
        self.norm, self.hidden_norm = Qwen3RMSNorm(width, eps), Qwen3RMSNorm(width, eps)
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        is_whole = size == self.vocabulary
        self.lm_head = None if is_whole else FewTokenLinear(width, size, bias=False)
        self.register_buffer("d2t", None if is_whole else torch.zeros(size, dtype=torch.long, device="cpu"))
        with torch.device("cpu"):  # checkpoints do not hold its frequencies
            self.rotary = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(self.vocabulary, size, rank, width, way) if rank else None
        of_selector = settings["selector_rank"], settings["selector_top_k"], width
        self.candidate_selector = Selector(self.vocabulary, *of_selector) if settings["selector_rank"] else None
        # The probability that a slot's token is accepted, before a sigmoid.
        inside = width + (rank if settings["confidence_head_with_markov"] else 0)
        has_confidence = settings["enable_confidence_head"]
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inside, 1)}) if has_confidence else None
        for module in self.modules():
            if type(module) is nn.Linear:  # transformers' own; 0.8 of the time for 5 tokens (float32, width 2048)
                module.__class__ = FewTokenLinear

    def facts(self) -> list[str]:
        """See :meth:`DraftModule.facts`."""
        name = "DSpark" if self.settings["speculators_model_type"] == "dspark" else "DFlash"
        name += "2" * (self.candidate_selector is not None)
        size = 0 if self.d2t is None else len(self.d2t)
        of_layers = told(len(self.layers), self.width, self.state_layers, size, self.vocabulary)
        return [f"{name} head (blocks of {self.num_tokens} tokens)", *of_layers]

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
            attention = layer.self_attn
            entered, kernels = _entering(layer.attention_conv, layer.input_layernorm(states))
            query = _turned(attention.q_norm(_heads(attention, attention.q_proj(entered))), rotation)
            keys, values = cache.update(*_keys_and_values(attention, entered, rotation), number)
            attended, _ = grouped_attention(
                spec, attention, query, keys, values, masks[window], scaling=attention.scaling, is_causal=False
            )
            states = states + mixed(attention.o_proj(attended.flatten(2)), kernels)
            entered, kernels = _entering(layer.mlp_conv, layer.post_attention_layernorm(states))
            states = states + mixed(layer.mlp(entered), kernels)
        return self.norm(states)

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

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of an output head as the head was trained with them: scaled, and softly capped."""
        scale, cap = self.settings["logit_scale"], self.settings["logit_cap"]
        logits = logits if scale == 1.0 else logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits


def _entering(convolution: BlockConvolution | None, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (states, None) if convolution is None else convolution(states)


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


def _checked(settings: Config) -> Config:
    name = "this block head"
    if unknown := sorted(settings.keys() - DEFAULTS.keys()):
        raise SettingError(f"{name} has unknown settings: {', '.join(unknown)}.")
    settings = DEFAULTS | settings
    layer = settings["transformer_layer_config"]
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    rope_type, model_type = rope.get("rope_type", rope.get("type", "default")), layer.get("model_type", "qwen3")
    is_whole, way = settings["draft_vocab_size"] == layer.get("vocab_size"), settings["markov_head_type"]
    has_markov, has_selector = bool(settings["markov_rank"]), bool(settings["selector_rank"])
    reads_markov = settings["enable_confidence_head"] and settings["confidence_head_with_markov"]
    of_several = any(isinstance(value, dict) for value in rope.values())
    partly = {name: rope.get(name, layer.get(name)) for name in ("partial_rotary_factor", "mlp_bias")}
    refused = {
        f"layers of {model_type}": model_type not in ("qwen3", "llama"),
        "target_hidden_size": settings["target_hidden_size"] not in (None, layer.get("hidden_size")),
        f"a Markov head of type {way}": has_markov and way not in _MARKOV,
        "a confidence head that reads a Markov head, without one": reads_markov and not has_markov,
        "a selector with a reduced vocabulary or a Markov head": has_selector and (has_markov or not is_whole),
        f"rotary positions of type {rope_type}, or of several types": rope_type not in _ROPES or of_several,
        **{name: value not in (None, False, 1.0) for name, value in partly.items()},
    }
    check_served(name, refused)
    check_count("block_size", settings["block_size"], least=2, most=MOST_DRAFT)
    if not isinstance(settings["mask_token_id"], int):
        raise SettingError(f"{name} has no mask_token_id, without which there is no block. Add it to its {CONFIG}.")
    return settings
