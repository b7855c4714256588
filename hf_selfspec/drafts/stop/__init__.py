"""When a draft ends."""
