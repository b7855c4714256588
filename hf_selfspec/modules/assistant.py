"""Assistants of Gemma 4, by transformers' own modules: layers without keys, which attend to those of the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typing_extensions import Self

from ..errors import SettingError
from ..learned.files import path_of
from ..model.anatomy import Anatomy
from .draft_module import Config, DraftModule, not_finite, reading, told
from .mtp import MtpHead, check_states

# For its one token sdpa would be cuDNN's on some GPUs, which makes a plan for each number of keys.
_OPTIONS: Config = {"attn_implementation": "eager"}


class AssistantHead(MtpHead):
    """An assistant of Gemma 4, in transformers' format: it makes logits of the next token, and the state before that,
    of a token's embedding, the state before it, and the model's keys and values."""

    def __init__(self, assistant: PreTrainedModel) -> None:
        self.width, config = assistant.config.backbone_hidden_size, assistant.config.get_text_config()
        DraftModule.__init__(self, {"recipe": {"made for": f"a Gemma 4 of width {self.width}"}})
        self.assistant, self.vocabulary = assistant, config.vocab_size
        self.state_layers, self.eagle3, self.mask_token = (), {}, 0  # it is no layer of the model's form
        self.shapes = {kind: _shape(config, number) for number, kind in enumerate(config.layer_types)}

    def facts(self) -> list[str]:
        """See :meth:`DraftModule.facts`."""
        config = self.assistant.config.get_text_config()
        of_layers = told(config.num_hidden_layers, config.hidden_size, (), 0, self.vocabulary)
        return ["assistant that reads the model's keys and values", *of_layers]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Loads an assistant; raises if it is damaged."""
        name = os.fspath(pretrained_model_name_or_path)
        with reading(cls.kind, name):
            options |= {"dtype": "auto", "use_safetensors": True, "output_loading_info": True} | _OPTIONS
            folder = path_of(name)  # with a home folder in place of "~"
            assistant, info = AutoModelForCausalLM.from_pretrained(folder if folder.is_dir() else name, **options)
            if lost := [*info["missing_keys"], *info["unexpected_keys"]]:
                raise ValueError(f"{lost[0]} is missing, or not known")
            if key := not_finite(assistant.state_dict()):
                raise ValueError(f"{key} is not finite")
            head = cls(assistant).eval().requires_grad_(False)
            tokens, embedder = torch.arange(head.vocabulary, device=assistant.device), assistant.masked_embedding
            if embedder is not None and not embedder.token_ordering.sort().values.equal(tokens):
                raise ValueError("token_ordering has not each token once")
            # Settings may not fit each other.
            states = assistant.pre_projection.weight.new_zeros(1, 1, 2 * head.width)
            shared = {kind: (states.new_zeros(1, heads, 1, size),) * 2 for kind, (heads, size) in head.shapes.items()}
            assistant(inputs_embeds=states, position_ids=tokens[None, :1], shared_kv_states=shared)
        return head

    @classmethod
    def _made(cls, name: str, settings: Config) -> Self:
        with torch.device("meta"):
            return cls(AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), **_OPTIONS))

    def _save_pretrained(self, save_directory: Path) -> None:
        self.assistant.save_pretrained(save_directory)

    def read_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Returns the layers of a model whose entering states are read; raises if the head is not for this model."""
        last, config = Anatomy.of(model).num_layers, model.config.get_text_config(decoder=True)
        found = {kind: _shape(config, number) for kind, number in stored(model).items()}
        layers = check_states(self, model, (last,), self.width, self.vocabulary, last)
        if found != self.shapes:
            raise SettingError(
                f"this {self.kind} reads keys of (heads, size) {self.shapes}, and the model shares {found} between its "
                "layers: it was made for another model. Give the head of this one."
            )
        return layers


def stored(model: PreTrainedModel) -> dict[str, int]:
    """The layers of a model that share their keys and values with later ones, by their kind of attention."""
    blocks: Any = enumerate(Anatomy.of(model).attention)
    return {block.layer_type: number for number, block in blocks if getattr(block, "store_full_length_kv", False)}


def _shape(config: Any, number: int) -> tuple[int, int]:
    """Heads and size of a layer's keys."""
    return config.per_layer_config[number].num_key_value_heads, config.per_layer_config[number].head_dim
