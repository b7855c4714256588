"""Shows texts to free drafts before the first call."""

from itertools import pairwise

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from ...errors import UnsupportedModelError
from ...model.logits import Logits, Tops
from ...model.patching import evaluating
from ...model.prompt import cache_name
from .kept_texts import LookupFindings

# Tokens of a text whose logits are in memory at a time.
_CHUNK = 256


@torch.no_grad()
def observe(model: PreTrainedModel, findings: LookupFindings, rows: list[list[int]]) -> None:
    """Runs the model once over each text, and keeps the texts and the most likely tokens after each token."""
    with evaluating(model):
        for ids in filter(None, rows):  # a text may have no tokens
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            tops = []
            for start in range(0, len(ids), _CHUNK):
                chunk = torch.tensor([ids[start : start + _CHUNK]], device=model.device)
                output = model(input_ids=chunk, use_cache=True, **{cache_name(model): cache})
                if cache.get_seq_length() < start + chunk.shape[1] and start + _CHUNK < len(ids):
                    raise UnsupportedModelError(
                        f"{type(model).__name__} keeps no key-value cache, so SelfSpec.observe cannot read a text of "
                        f"{len(ids)} tokens in chunks. Give texts of at most {_CHUNK} tokens."
                    )
                tops.append(Tops(Logits(output.logits.float())))
            tokens, shares = (np.concatenate(chunks)[1:] for chunks in zip(*(top.of(0) for top in tops), strict=True))
            with findings.lock:
                findings.successors.see(list(pairwise(ids)), tokens, shares, findings.next_text())
            findings.end([ids])
