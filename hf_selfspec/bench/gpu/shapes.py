"""Random models of usual sizes, made on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ..synthetic import LlamaShape, damp_blocks, exit_blocks


@dataclass(frozen=True)
class DeviceLlama(LlamaShape):
    """A random Llama whose weights are created on the device in their dtype.

    Attributes:
        heads, key_heads: numbers of query heads and of key heads.
    """

    heads: int = 32
    key_heads: int = 32

    @property
    def exit_layer(self) -> int:
        """The exit that drafts: a quarter of the layers."""
        return self.layers // 4

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=self.positions,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()

    def damped(self, factor: float) -> LlamaForCausalLM:
        """Returns the model with the blocks after the exit layer damped."""
        model = self.model()
        damp_blocks(model, exit_blocks(self.layers, self.exit_layer), factor)
        return model

    def on(self, device: str, dtype: torch.dtype) -> DeviceLlama:
        """Returns the same shape on another device, in another dtype."""
        return replace(self, device=device, dtype=dtype)


SHAPES = {
    "tiny": DeviceLlama(64, 4, 128, 256, heads=4, key_heads=2),  # for trying the command
    "100m": DeviceLlama(768, 12, 2048, 16000, heads=12, key_heads=12),
    "1b": DeviceLlama(2048, 22, 5632, 32000, heads=32, key_heads=4),  # TinyLlama
    "7b": DeviceLlama(4096, 32, 11008, 32000, heads=32, key_heads=32),  # Llama 2
    "13b": DeviceLlama(5120, 40, 13824, 32000, heads=40, key_heads=40),
}
