"""Speed by batch size, each against plain ``generate`` at the same batch."""

from __future__ import annotations

from .engine import figure

FIGURE = figure("speed by batch size", (1, 4, 8), (64,))
