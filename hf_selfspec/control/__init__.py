"""Chooses what drafts in each round, by measured costs and running rates."""
