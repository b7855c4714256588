"""Small modules that are fitted to a frozen model."""
