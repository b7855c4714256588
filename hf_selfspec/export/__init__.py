"""Drafts for other engines."""
