"""Kangaroo's adapter: attention between a shallow exit and the model's own head (arXiv 2404.18911 §3.1)."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..errors import SettingError
from ..model.attention.interface import MaskSpec, grouped_attention
from .draft_module import About, DraftModule


class Adapter(DraftModule):
    """Kangaroo's adapter: input norm, attention with rotary positions, residual, final norm; then the model's own head.

    Args:
        exit_layer: the exit layer ``E`` whose states the adapter reads.
        hidden_size: their width ``d``.
        num_heads: attention heads, a divisor of ``d``.
        blocks: ``("attention",)`` as in the paper; with ``"mlp"`` a whole transformer layer, or ``("mlp",)`` alone
            (its Table 2, where both are slower).
        rope_theta: base of the rotary positions, above 0.
        norm_eps: epsilon of the norms, between 0 and 1.
        about: see :class:`DraftModule`.

    Raises:
        SettingError: the heads do not divide the width.
    """

    kind, usage, source = "adapter", "SelfSpec.kangaroo({!r})", "EarlyExitAdapter"

    def __init__(
        self,
        exit_layer: int,
        hidden_size: int,
        num_heads: int,
        blocks: list[str] | tuple[str, ...] = ("attention",),
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        about: About = None,
    ) -> None:
        super().__init__(about)
        if hidden_size % (2 * num_heads):
            raise SettingError(
                f"Adapter(hidden_size={hidden_size}, num_heads={num_heads}): hidden_size must be a multiple of "
                f"2 * num_heads, {2 * num_heads}."
            )
        self.exit_layer, self.rope_theta = int(exit_layer), float(rope_theta)
        self.num_heads, self.head_width = num_heads, hidden_size // num_heads
        self.norm = nn.RMSNorm(hidden_size, norm_eps)
        self.attention = "attention" in blocks
        if self.attention:
            self.input_norm = nn.RMSNorm(hidden_size, norm_eps)
            self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
            self.output = nn.Linear(hidden_size, hidden_size, bias=False)
            nn.init.normal_(self.qkv.weight, std=hidden_size**-0.5)
            nn.init.zeros_(self.output.weight)  # it starts as the plain early exit
        self.mlp: nn.Module | None = None
        if "mlp" in blocks:
            up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
            down = nn.Linear(4 * hidden_size, hidden_size, bias=False)
            nn.init.zeros_(down.weight)
            self.mlp = nn.Sequential(nn.RMSNorm(hidden_size, norm_eps), up, nn.SiLU(), down)

    def forward(
        self,
        states: torch.Tensor,
        positions: torch.Tensor | None = None,
        cache: Any = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the states ``[b, s, d]`` that go into the head, from those that left layer ``E - 1``.

        ``positions`` ``[b, s]`` count from 0 by default; ``cache``, a ``Cache`` of transformers, has keys and values of
        earlier tokens; by the ``mask`` ``[b, 1, s, n]``, or by default, each token attends to itself and all before it.
        """
        hidden = states.to(self.norm.weight.dtype)
        if self.attention:
            (b, s, d), half = hidden.shape, self.head_width // 2
            if positions is None:
                positions = torch.arange(s, device=hidden.device)[None]
            projected = self.qkv(self.input_norm(hidden)).view(b, s, 3, self.num_heads, self.head_width)
            query, key, value = projected.permute(2, 0, 3, 1, 4)
            speeds = self.rope_theta ** (-torch.arange(half, device=hidden.device, dtype=torch.float32) / half)
            angles = (positions[..., None].float() * speeds).repeat(1, 1, 2)
            cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            if cache is not None:
                key, value = cache.update(key, value, 0)
            if mask is None and s > 1:
                attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
            else:
                attended, _ = grouped_attention(MaskSpec(positions, key.shape[2]), self, query, key, value, mask)
            hidden = hidden + self.output(attended.reshape(b, s, d))
        if self.mlp is not None:
            hidden = hidden + self.mlp(hidden)
        return self.norm(hidden)
