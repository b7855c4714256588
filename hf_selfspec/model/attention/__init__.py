"""Attention as our forwards call it: over trees, ragged rows and long prompts, exactly."""
