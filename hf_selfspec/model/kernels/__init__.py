"""Faster ways to do what a module does, each with the same result."""
