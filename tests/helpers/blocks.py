"""Block heads as others publish them: random ones, what they predict by the papers' definitions, without caches; and
random assistants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from helpers.models import VOCABULARY
from hf_selfspec.model.head import NOTHING
from hf_selfspec.modules.block import BlockHead
from hf_selfspec.modules.draft_module import DraftModule

THETA, HEADS, KV_HEADS, SIZE, INNER, RANK, MASK = 5000.0, 4, 2, 8, 48, 6, 3
# Of norms: one that changes logits.
EPSILON = 0.02
_TWO = {"draft_vocab_size": 0, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
# Configurations of each kind of head: vocabularies, windows, anchors, Markov and confidence heads, convolutions and
# selectors; and in z-lab's own format, also with scales, and with windows of blocks that are causal or not.
CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash window": {"window": 6, "sample_from_anchor": True, "draft_vocab_size": 0},
    "dflash wide window": {"window": 5, "sliding_window_non_causal": True, "block_size": 3},
    "dspark": {"speculators_model_type": "dspark", "draft_vocab_size": 0},
    "dspark gated": {"speculators_model_type": "dspark", "markov_head_type": "gated", "window": 7},
    "dspark rnn": {
        "speculators_model_type": "dspark", "markov_head_type": "rnn", "sample_from_anchor": False,
        "confidence_head_with_markov": False,
    },
    "dflash2": {"speculators_model_type": "dflash2", **_TWO},
    "dflash2 window": {"speculators_model_type": "dflash2", "window": 5, "sliding_window_non_causal": False, **_TWO},
    "z-lab": {"draft_vocab_size": 0, "of_zlab": {}},
    "z-lab window": {"draft_vocab_size": 0, "window": 6, "of_zlab": {"is_causal": None}},
    "z-lab dflash2": {
        "window": 5, **_TWO,
        "of_zlab": {
            "is_causal": False, "input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 2.0,
        },
    },
}  # fmt: skip


def published(
    folder: Path, model: PreTrainedModel, layers: tuple[int, ...] = (1, 2, 4), scale: float = 0.15, **changed: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Writes a random head for a model in speculators' format; returns its settings and tensors."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, width = model.get_input_embeddings().weight.shape
    window, of_zlab, size = (
        changed.pop("window", None),
        changed.pop("of_zlab", None),
        changed.pop("draft_vocab_size", vocabulary - 1) or vocabulary,
    )
    is_dspark = changed.get("speculators_model_type") == "dspark"
    layer = {
        "model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": INNER,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE,
        "rms_norm_eps": EPSILON, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }  # fmt: skip
    if window:
        kinds = ["sliding_attention", "full_attention"]
        layer |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    settings = {
        "speculators_model_type": "dflash", "transformer_layer_config": layer, "draft_vocab_size": size,
        "block_size": 5, "aux_hidden_state_layer_ids": list(layers), "mask_token_id": MASK,
    } | changed  # fmt: skip
    if is_dspark:
        settings["markov_rank"] = RANK
    written = settings if of_zlab is None else zlab_config(settings, of_zlab)
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    if of_zlab is not None:
        settings |= {"of_zlab": True, **of_zlab}
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, len(layers) * width), "norm": (width,), "hidden_norm": (width,)}
    for number in range(layer["num_hidden_layers"]):
        at, of = f"layers.{number}.", f"layers.{number}.self_attn."
        shapes |= {f"{of}q_proj": (HEADS * SIZE, width), f"{of}o_proj": (width, HEADS * SIZE)}
        shapes |= {f"{of}{name}_proj": (KV_HEADS * SIZE, width) for name in "kv"}
        shapes |= {f"{of}{name}_norm": (SIZE,) for name in "qk"}
        shapes |= {f"{at}mlp.{name}_proj": (INNER, width) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (width, INNER)}
        shapes |= {f"{at}{name}_layernorm": (width,) for name in ("input", "post_attention")}
        for part in ("attention_conv", "mlp_conv") if "conv_kernel_size" in settings else ():
            taps, groups = settings["conv_kernel_size"], width // settings["conv_group_size"]
            shapes |= {f"{at}{part}.base_kernel": (2, taps, width)}
            shapes |= {f"{at}{part}.kernel_projection": (2 * taps * groups, width)}
    if "selector_rank" in settings:
        books = dict.fromkeys(("predecessor_codebook", "successor_codebook"), (vocabulary, settings["selector_rank"]))
        books |= {"hidden_projection": (settings["selector_rank"], width)}
        shapes |= {f"candidate_selector.{name}": shape for name, shape in books.items()}
    way = settings.get("markov_head_type")
    if is_dspark:
        inside = width + (RANK if settings.get("confidence_head_with_markov", True) else 0)
        shapes |= {"markov_head.markov_w1": (vocabulary, RANK), "markov_head.markov_w2": (size, RANK)}
        shapes |= {"confidence_head.proj": (1, inside)}
    if way == "gated":
        shapes["markov_head.gate_proj"] = (RANK, width + RANK)
    if way == "rnn":
        shapes["markov_head.joint_proj"] = (3 * RANK, 2 * RANK + width)
    if size < vocabulary:
        shapes["lm_head"] = (size, width)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) * scale

    no_module = ("codebook", "base_kernel")
    tensors = {
        name if name.endswith(no_module) else f"{name}.weight": drawn(name, shape) for name, shape in shapes.items()
    }
    for name in ("markov_head.gate_proj", "markov_head.joint_proj", "confidence_head.proj"):
        if name in shapes:
            tensors[f"{name}.bias"] = torch.randn(shapes[name][0], generator=generator)
    if size < vocabulary:
        tokens = torch.randperm(vocabulary, generator=generator)[:size].sort().values
        tensors["d2t"] = tokens - torch.arange(size)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    save_file(tensors, folder / "model.safetensors")
    return settings, tensors


def zlab_config(settings: dict[str, Any], of_zlab: dict[str, Any]) -> dict[str, Any]:
    """The config in z-lab's format, which counts layers from 0 behind the first."""
    own = {name: value for name, value in of_zlab.items() if value is not None}
    own |= {
        name: settings[name] for name in (*_TWO, "mask_token_id") if name in settings and name != "draft_vocab_size"
    }
    own |= {"target_layer_ids": [layer - 1 for layer in settings["aux_hidden_state_layer_ids"]]}
    causal = {} if "is_causal" in of_zlab else {"is_causal": False}
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": own, "block_size": settings["block_size"]}
    return settings["transformer_layer_config"] | config | causal


def context_of(model: PreTrainedModel, text: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """The states ``[s - 1, n d]`` that a head reads of a text ``[s]``."""
    known = model(text[None, :-1], output_hidden_states=True).hidden_states
    return torch.cat([known[layer][0] for layer in layers], dim=-1)


def normed(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return weight * values * (values.square().mean(-1, keepdim=True) + EPSILON).rsqrt()


def turned(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Values ``[k, s, h]`` at rotary positions ``[s]``."""
    angles = positions[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    moved = torch.complex(*values.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([moved.real, moved.imag], dim=-1)


@torch.no_grad()
def logits_by_hand(
    model: PreTrainedModel, settings: dict[str, Any], tensors: dict[str, torch.Tensor], text: torch.Tensor, drafted: Any
) -> torch.Tensor:
    """The logits ``[n, r]`` of a block's slots after a text ``[s]``, given the tokens ``[n]`` drafted there."""
    layer, size, n = settings["transformer_layer_config"], settings["block_size"], len(text) - 1
    is_dspark = settings["speculators_model_type"] == "dspark"
    first = 0 if settings.get("sample_from_anchor", is_dspark) else 1
    context = normed(
        tensors["hidden_norm.weight"],
        context_of(model, text, settings["aux_hidden_state_layer_ids"]) @ tensors["fc.weight"].T,
    )
    table = model.get_input_embeddings().weight
    states = table[torch.tensor([int(text[-1]), *[settings["mask_token_id"]] * (size - 1)])]
    states = states * settings.get("input_embedding_scale", 1.0)
    places, slots = torch.arange(n + size), torch.arange(n, n + size)[:, None]
    for number in range(layer["num_hidden_layers"]):
        weights = {
            name.removeprefix(f"layers.{number}.").removeprefix("self_attn.").removesuffix(".weight"): value
            for name, value in tensors.items()
        }
        entered, leaving = convolved(weights, "attention_conv", normed(weights["input_layernorm"], states))
        both = torch.cat([context, entered])
        q, k, v = (
            (given @ weights[f"{name}_proj"].T).view(len(given), -1, SIZE).transpose(0, 1)
            for name, given in (("q", entered), ("k", both), ("v", both))
        )
        q, k = turned(normed(weights["q_norm"], q), places[n:]), turned(normed(weights["k_norm"], k), places)
        k, v = (values.repeat_interleave(HEADS // KV_HEADS, 0) for values in (k, v))
        seen = torch.ones(size, n + size, dtype=torch.bool)
        if layer.get("layer_types", ["full_attention"] * 2)[number] == "sliding_attention":
            seen = places[None] >= n - layer["sliding_window"]
            is_causal = not settings.get("sliding_window_non_causal", settings["speculators_model_type"] == "dflash2")
            if "of_zlab" in settings:
                seen, is_causal = slots - places[None] < layer["sliding_window"], settings.get("is_causal", 0) is None
            if is_causal:
                seen = seen & (places[None] <= slots)
        scores = (q @ k.mT / SIZE**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        states = states + leaving((scores @ v).transpose(0, 1).reshape(size, -1) @ weights["o_proj"].T)
        inner, leaving = convolved(weights, "mlp_conv", normed(weights["post_attention_layernorm"], states))
        gate = silu(inner @ weights["mlp.gate_proj"].T) * (inner @ weights["mlp.up_proj"].T)
        states = states + leaving(gate @ weights["mlp.down_proj"].T)
    states = normed(tensors["norm.weight"], states)
    logits = states @ tensors.get("lm_head.weight", model.get_output_embeddings().weight).T
    logits = logits * settings.get("output_multiplier", 1.0)
    if cap := settings.get("final_logit_softcapping"):
        logits = cap * (logits / cap).tanh()
    given = [int(text[-1]), *[int(token) for token in drafted]]
    if "selector_rank" in settings:
        before, codes = (
            given[: len(drafted)],
            {name.split(".")[1]: value for name, value in tensors.items() if "selec" in name},
        )
        for slot, token in enumerate(before, first):
            highest = logits[slot].topk(settings["selector_top_k"]).indices
            context = codes["predecessor_codebook"][token] * (codes["hidden_projection"] @ states[slot])
            scores = logits[slot, highest] + codes["successor_codebook"][highest] @ context
            logits[slot] = torch.full_like(logits[slot], NOTHING).index_copy(0, highest, scores)
    if is_dspark:
        before = torch.tensor(([given[0]] * first + given)[:size])  # the token before the one that a slot predicts
        before = torch.cat([before, before.new_zeros(size - len(before))])
        logits = logits + markov_by_hand(settings.get("markov_head_type", "vanilla"), tensors, before, states)
    return logits[first : first + len(drafted)]


def convolved(
    weights: dict[str, torch.Tensor], name: str, states: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """What enters attention or an MLP ``[B, d]``, mixed, and the function that mixes what leaves."""
    if f"{name}.base_kernel" not in weights:
        return states, lambda states: states
    base = weights[f"{name}.base_kernel"]
    sides, taps, width = base.shape
    deltas = (states @ weights[f"{name}.kernel_projection"].T).view(len(states), sides, taps, -1)

    def mix(side: int, states: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(states)
        for slot in range(len(states)):
            for tap in range(min(taps, slot + 1)):
                delta = deltas[slot, side, tap].repeat_interleave(width // deltas.shape[-1])
                mixed[slot] += (base[side, tap] + delta) * states[slot - tap]
        return mixed

    return mix(0, states), lambda states: mix(1, states)


def markov_by_hand(
    way: str, tensors: dict[str, torch.Tensor], before: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return values @ tensors[f"markov_head.{name}.weight"].T + tensors[f"markov_head.{name}.bias"]

    embedded, found = tensors["markov_head.markov_w1.weight"][before], []
    memory = torch.zeros(RANK)
    for one, state in zip(embedded, states, strict=True):
        if way == "gated":
            found.append(linear("gate_proj", torch.cat([state, one])).sigmoid() * one)
        elif way == "rnn":
            gate, new, output = linear("joint_proj", torch.cat([memory, one, state])).chunk(3)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
            found.append(output.tanh())
        else:
            found.append(one)
    return torch.stack(found) @ tensors["markov_head.markov_w2.weight"].T


def block_of(model: PreTrainedModel, **settings: Any) -> BlockHead:
    """A random head; the settings are those of :func:`published`."""
    with TemporaryDirectory() as folder:
        published(Path(folder), model, **settings)
        return DraftModule.from_pretrained(folder)


@torch.no_grad()
def right_block_of(model: PreTrainedModel, answers: torch.Tensor) -> BlockHead:
    """A head that is right by construction: its Markov head knows which token follows which in some answers ``[b, s]``,
    and its block adds nothing."""
    vocabulary = len(model.get_input_embeddings().weight)
    head = block_of(model, layers=(1, 2), speculators_model_type="dspark", draft_vocab_size=vocabulary - 1)
    head = BlockHead(**head.settings | {"markov_rank": vocabulary, "enable_confidence_head": False})
    follows = torch.zeros(vocabulary, vocabulary)
    for row in answers:
        follows[row[:-1], row[1:]] += 1
    for parameter in head.parameters():
        parameter.zero_() if parameter.dim() > 1 else parameter.fill_(1.0)
    assert head.markov_head is not None
    assert head.d2t is not None
    head.d2t.add_(1)  # all tokens but the first, which pads
    head.markov_head.markov_w1.weight.fill_diagonal_(1.0)
    head.markov_head.markov_w2.weight.copy_(follows.T[1:] * 8.0)
    return head.eval()


def published_assistant(folder: Path, model: PreTrainedModel, **changed: Any) -> PreTrainedModel:
    """Writes a random assistant of two layers for a model; returns it."""
    torch.manual_seed(2)
    config = model.config.to_dict()
    of_layers = {key: value for key, value in config["per_layer_config"].items() if int(key) < 2}
    small = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": config["layer_types"][:2]}
    own = {"hidden_size": 24, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    settings = {"text_config": config | small | own | {"per_layer_config": of_layers}, "backbone_hidden_size": 32}
    kind = config["model_type"].removesuffix("_text")
    assistant = AutoModelForCausalLM.from_config(AutoConfig.for_model(f"{kind}_assistant", **settings | changed)).eval()
    for parameter in assistant.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(config["vocab_size"]))
    assistant.save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # which drafts do not read
    return assistant


# What may be wrong with the weights of a head that others publish, and what is told of it.
DAMAGED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a tensor is missing": (lambda tensors: tensors.pop("fc.weight"), "fc.weight"),
    "a tensor is of another format": (lambda tensors: tensors.update(extra=torch.ones(1)), "extra"),
    "no d2t": (lambda tensors: tensors.pop("d2t"), "no d2t"),
    "tokens outside": (lambda tensors: tensors["d2t"].add_(VOCABULARY), "distinct tokens"),
    "not finite": (lambda tensors: tensors["norm.weight"].mul_(float("nan")), "not finite"),
}
