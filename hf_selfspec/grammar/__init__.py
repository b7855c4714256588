"""Grammars that can be rolled back: their masks apply to drafts, too, and tokens that they force are drafted free."""

from .libraries import LLGuidance, OutlinesCore, XGrammar
from .protocol import Grammar, register_grammar
from .rows import Constraint, GrammarMask

__all__ = [
    "Constraint",
    "Grammar",
    "GrammarMask",
    "LLGuidance",
    "OutlinesCore",
    "XGrammar",
    "register_grammar",
]
