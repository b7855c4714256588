"""``hf-selfspec inspect``: what a model is made of, from its config alone."""

from __future__ import annotations

from .options import ModelOption


def inspect(model: ModelOption) -> None:
    """Show what a model is made of and what is supported with it; no weights are loaded."""
    from .. import inspect_model
    from ..data.loading import NamedModel

    print(inspect_model(NamedModel.find(model).config()))
