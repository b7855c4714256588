"""Verification: which tokens of a draft the full model accepts."""
