"""Drafts that cost nothing: what followed in the text, in earlier texts, and in the model's own logits."""
