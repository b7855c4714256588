"""Grammars that can be rolled back: their masks apply to drafts, too, and tokens that they force are drafted free."""

from .libraries import Grammar, LLGuidance, OutlinesCore, XGrammar, register_grammar
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
