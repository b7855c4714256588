"""Verification: which tokens of a draft the full model accepts."""

from .tree import CostTree, TopKTree

__all__ = ["CostTree", "TopKTree"]
