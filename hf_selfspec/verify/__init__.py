"""What the full model says to a draft."""

from .tree import TopKTree

__all__ = ["TopKTree"]
