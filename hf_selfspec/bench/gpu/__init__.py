"""Correctness and speed on one accelerator: one command, one file that it can go on from, one table."""
