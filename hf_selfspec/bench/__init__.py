"""Whether self-speculation pays with a model and its prompts: all methods on one stream, and a report."""

from .compare import Comparison, compare

__all__ = ["Comparison", "compare"]
