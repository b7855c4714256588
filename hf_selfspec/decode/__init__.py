"""The decode loop, and what it has generated."""
