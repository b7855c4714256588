"""Measurements: ``python -m hf_selfspec.bench --help``."""
