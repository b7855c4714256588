"""Grammars that can be rolled back: their masks apply to drafts, too, and tokens that they force are drafted free."""

from .libraries import Grammar, LLGuidance, OutlinesCore, XGrammar, register_grammar

__all__ = ["Grammar", "LLGuidance", "OutlinesCore", "XGrammar", "register_grammar"]
