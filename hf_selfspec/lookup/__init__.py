"""Drafts that cost nothing: what followed in the text, in earlier texts, and in the model's own logits."""

from .evidence import Evidence
from .row import LookupKnowledge, LookupRow
from .successors import Successors
from .suffix import SuffixIndex
from .tree import TokenTree, VerifyCosts

__all__ = ["Evidence", "LookupKnowledge", "LookupRow", "Successors", "SuffixIndex", "TokenTree", "VerifyCosts"]
