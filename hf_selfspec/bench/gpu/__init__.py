"""Correctness and speed on one accelerator: one command, one file from which it can resume, one report."""
