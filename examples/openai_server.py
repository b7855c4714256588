"""``transformers serve``, the OpenAI-compatible server of transformers, with self-speculative decoding.

    pip install "transformers[serving]"
    python examples/openai_server.py HuggingFaceTB/SmolLM2-135M-Instruct --port 8000

Takes the arguments of ``transformers serve``; its models are loaded with a ``SelfSpec`` attached. (With
``--continuous-batching`` another decode loop answers, which does not use it.)

All clients share that one ``SelfSpec``, which drafts from the texts of all: answers are the same, but how fast one
comes shows whether a similar text was there before. Clients who must not learn that of each other need a server each,
or a service with a ``SelfSpec`` for each, like ``service.py``.
"""

from __future__ import annotations

import functools
import sys

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import main

import hf_selfspec

SPEC = hf_selfspec.SelfSpec()


def with_drafts(load):
    @functools.wraps(load)
    def load_and_attach(*args, **kwargs):
        model, processor = load(*args, **kwargs)
        hf_selfspec.attach(model, SPEC)
        return model, processor

    return load_and_attach


ModelManager.load_model_and_processor = with_drafts(ModelManager.load_model_and_processor)

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
