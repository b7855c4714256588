"""Searches for the part of a model to draft with, by measuring."""
