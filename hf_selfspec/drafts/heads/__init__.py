"""Drafts from fitted or shipped heads."""
