"""Which layers to skip, from one forward: dynamic programming over hidden states (CLaSp, arXiv 2505.24196).

``g(i, j)``, the state after ``i`` layers of which ``j`` were skipped, is the better one of ``f_i(g(i-1, j))`` and
``g(i-1, j-1)``: the one closer, by cosine, to what the whole model has there, which is ``g(i, 0)``. All ``j`` go
through a layer together, as copies of one token that do not see each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..model.partial import LayerPlan
from ..model.target import Nodes, Target
from ..types import Text


class _Table:
    """The dynamic programme while a forward fills it; see :meth:`after_layer`."""

    def __init__(self, num_layers: int, most: int) -> None:
        self.num_layers = num_layers
        self.most = most
        self.skips: list[torch.Tensor] = []

    def after_layer(self, layer: int, entered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """What goes on, for each number of skipped layers: states ``[b, most + 1, d]``."""
        if not 1 <= layer <= self.num_layers - 2:
            return left
        whole = left[:, :1].float()
        run = F.cosine_similarity(left.float(), whole, dim=-1).mean(0)
        skip = F.cosine_similarity(entered.float(), whole, dim=-1).mean(0).roll(1)
        # With j of the first i layers skipped, 0 <= j <= i; before layer 1 nothing was.
        passed = len(self.skips)
        places = torch.arange(self.most + 1, device=left.device)
        skips = ((skip > run) & (places > 0) | (places == passed + 1)) & (places <= passed + 1)
        self.skips.append(skips)
        return torch.where(skips[:, None], entered.roll(1, dims=1), left)

    def skipped(self, count: int) -> list[int]:
        """The layers of the best way to skip ``count``."""
        table = torch.stack(self.skips).tolist()
        found = []
        for layer in reversed(range(1, self.num_layers - 1)):
            if count and table[layer - 1][count]:
                found.append(layer)
                count -= 1
        return found


@torch.no_grad()
def closest_layers(target: Target, text: Text, count: int) -> LayerPlan:
    """The ``count`` layers without which the last token's states stay closest to the whole model's.

    Args:
        target: the prepared model; slots from each row's last token on are scratch.
        text: the batch.
        count: layers to skip, from 1 to ``L - 2``; in a batch they are the same for all rows.
    """
    num_layers = target.anatomy.num_layers
    table = _Table(num_layers, count)
    copies = text.last_tokens().expand(-1, count + 1)
    target.step(
        copies,
        text.roots(),
        nodes=Nodes.copies(count + 1),
        capture=num_layers,
        head=False,
        after_layer=table.after_layer,
    )
    skipped = frozenset(table.skipped(count))
    return LayerPlan(num_layers, skipped, skipped)
