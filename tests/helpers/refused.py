"""Options of ``generate`` that are refused."""

from __future__ import annotations

from typing import Any

# Name, value, and words of the message beside the name and the value: what to do.
OPTIONS: list[tuple[str, Any, str]] = [
    ("num_beams", 2, "use num_beams=1"),
    ("num_beam_groups", 2, "leave it out"),
    ("penalty_alpha", 0.6, "leave it out"),
    ("constraints", ["x"], "use prefix_allowed_tokens_fn"),
    ("force_words_ids", [[5]], "use prefix_allowed_tokens_fn"),
    ("dola_layers", "high", "leave it out"),
    ("prompt_lookup_num_tokens", 3, "choose one of the two"),
    ("assistant_early_exit", 2, "SelfSpec(draft=EarlyExit(layer))"),
    ("cache_implementation", "quantized", "leave it out"),
    ("cache_implementation", "offloaded", "leave it out"),
    ("output_attentions", True, "leave it out"),
    ("output_hidden_states", True, "leave it out"),
]
