"""One call of ``generate``: from the wrapper to the ids."""
