"""Whether self-speculation pays with a model and its prompts: all methods on one stream, and a report."""
