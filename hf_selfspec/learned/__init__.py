"""What is learned about a model, in memory and on disk."""
