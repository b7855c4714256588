"""Drafts that cost nothing: what followed in the text, in earlier texts, and in the model's own logits."""

from .findings import LookupFindings
from .rates import Rates
from .row import LookupRow
from .successors import Successors
from .suffix import SuffixIndex
from .tree import TokenTree

__all__ = ["LookupFindings", "LookupRow", "Rates", "Successors", "SuffixIndex", "TokenTree"]
