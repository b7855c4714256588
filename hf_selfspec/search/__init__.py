"""Which part of a model to draft with, found by measuring."""

from .exit_choice import ExitChoice

__all__ = ["ExitChoice"]
