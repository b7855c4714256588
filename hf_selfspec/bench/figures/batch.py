"""Speed by batch size, each relative to plain ``generate`` with the same batch."""

from __future__ import annotations

from .engine import figure

FIGURE = figure("speed by batch size", (1, 4, 8), (64,))
