"""Trainings with and without what the package adds."""
