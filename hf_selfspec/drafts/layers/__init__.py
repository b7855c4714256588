"""Drafts from a part of the model: early exits, skipped layers, weights in fewer bits."""
