"""A Hugging Face model as this package needs to see it."""
