"""This package's view of a Hugging Face model: its parts, cache, masks and forwards."""
