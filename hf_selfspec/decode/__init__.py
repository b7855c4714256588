"""The decode loop, what it has generated, and transformers' own loop within it."""
