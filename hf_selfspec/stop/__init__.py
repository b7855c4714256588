"""Rules for when drafting stops."""
