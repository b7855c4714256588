"""Finds layers to skip with one forward: dynamic programming over hidden states (CLaSp, arXiv 2505.24196).

``g(i, j)``, the state after ``i`` layers of which ``j`` were skipped, is the better one of ``f_i(g(i-1, j))`` and
``g(i-1, j-1)``: the one with the higher cosine similarity to the whole model's state there, ``g(i, 0)``. All ``j`` go
through a layer together, as copies of one token that do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..batch import Text
from ..model.layout import TreeLayout
from ..model.partial import ForwardPass
from ..model.plan import LayerPlan
from ..model.target import Target


class _Table:
    """The dynamic programme while a forward fills it; see :meth:`after_layer`."""

    def __init__(self, layers: Sequence[int], most: int) -> None:
        self.layers = layers
        self.most = most
        self.skips: list[torch.Tensor] = []

    def after_layer(self, layer: int, entered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Returns what enters the next layer, per number of skipped layers: states ``[..., most + 1, d]``."""
        if layer not in self.layers:
            return left
        entered = entered.to(left.device)  # a model may be spread over devices
        whole = left[..., :1, :].float()
        run = F.cosine_similarity(left.float(), whole, dim=-1).flatten(0, -2).mean(0)
        skip = F.cosine_similarity(entered.float(), whole, dim=-1).flatten(0, -2).mean(0).roll(1)
        # With j of the first i layers skipped, 0 <= j <= i; before the first layer j is 0.
        passed = len(self.skips)
        places = torch.arange(self.most + 1, device=left.device)
        skips = ((skip > run) & (places > 0) | (places == passed + 1)) & (places <= passed + 1)
        self.skips.append(skips)
        return torch.where(skips[:, None], entered.roll(1, dims=-2), left)

    def skipped(self) -> list[list[int]]:
        """For each count from 1 to ``most`` the best layers to skip."""
        table = torch.stack([skips.to(self.skips[0].device) for skips in self.skips]).tolist()
        ways = []
        for count in range(1, self.most + 1):
            found, left = [], count
            for row in reversed(range(len(self.layers))):
                if left and table[row][left]:
                    found.append(self.layers[row])
                    left -= 1
            ways.append(found)
        return ways


@torch.no_grad()
def closest_layers(target: Target, text: Text, layers: Sequence[int], most: int) -> list[LayerPlan]:
    """The plans that skip 1, 2, ... ``most`` of ``layers`` and change the last tokens' states least.

    Slots from each row's last token on are used as scratch space.
    """
    num_layers = target.anatomy.num_layers
    table = _Table(layers, most)
    copies = text.last_tokens().expand(-1, most + 1)
    run = ForwardPass(target.full_plan, stop=num_layers, after_layer=table.after_layer)
    target.step(copies, text.last_slots(), run, TreeLayout.independent(most + 1))
    return [LayerPlan(num_layers, frozenset(found), frozenset(found)) for found in table.skipped()]
