"""Searches on costs and sets that tests give."""
