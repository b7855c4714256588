"""Whether a model's text with a ``SelfSpec`` is plain's."""
