"""Forwards that a GPU replays as captured graphs."""
