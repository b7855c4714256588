"""Drafts for other engines."""

from .exporting import export_draft

__all__ = ["export_draft"]
