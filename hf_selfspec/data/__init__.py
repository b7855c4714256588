"""Models, prompts and texts that a user names."""
