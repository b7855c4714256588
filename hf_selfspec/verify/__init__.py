"""What the full model accepts of a draft."""

from .tree import CostTree, TopKTree

__all__ = ["CostTree", "TopKTree"]
