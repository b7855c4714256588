"""What the full model says to a draft."""

from .tree import CostTree, TopKTree

__all__ = ["CostTree", "TopKTree"]
