"""Recurrent states of hybrid and state-space models: which kinds can be rolled back, and how each is updated."""
