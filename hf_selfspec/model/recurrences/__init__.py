"""Recurrent states of hybrid and state-space models: which can be rolled back, and how each is updated."""
