"""What is added to the outputs of some modules of a model while a part of it drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn as nn

Addition = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Additions:
    """Additions to outputs, for forwards whose plan has them.

    Attributes:
        of: for each changed module, what maps its input to what is added to its output.
        first_layer: the first layer that has one of these modules.
    """

    of: Mapping[nn.Module, Addition]
    first_layer: int
