"""Cost per token by the length of the context."""

from __future__ import annotations

from .engine import figure

FIGURE = figure("cost per token by context", (1,), (512, 8192))
