"""Drafts that cost no forward: from earlier text and the model's own logits."""
