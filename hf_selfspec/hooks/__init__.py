"""Where a ``SelfSpec`` enters ``generate`` and pipelines."""
