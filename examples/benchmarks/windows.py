"""Layers that see a window: the time of a token and the keys and values held, ours over plain generate's."""

from __future__ import annotations

import argparse
from statistics import median
from time import thread_time
from typing import Any

import torch
from timing import print_head, print_row, print_table_head
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_selfspec import SelfSpec
from hf_selfspec.model.cache import SpeculativeCache

FIVE_OF_SIX, EVERY_OTHER = [*["sliding_attention"] * 5, "full_attention"], ["sliding_attention", "full_attention"] * 3
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {"layer_types": FIVE_OF_SIX},
    "qwen2": {"layer_types": FIVE_OF_SIX, "use_sliding_window": True},
    "cohere2": {"layer_types": FIVE_OF_SIX},
    "gpt_oss": {"layer_types": EVERY_OTHER, "num_local_experts": 4, "num_experts_per_tok": 2},
}


class Clock(BaseStreamer):
    """When each token came, in seconds of this thread."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(thread_time())

    def end(self) -> None: ...


def build(kind: str, window: int, width: int) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 6, "head_dim": width // 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1 << 17}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}
    options = {"sliding_window": window, "initializer_range": 0.25} | shape | heads | ids | KINDS[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()


def call(
    model: PreTrainedModel, prompt: torch.Tensor, spec: SelfSpec | None, tokens: int, temperature: float = 0.0
) -> tuple[Any, float, int]:
    """The ids, seconds a token after the first, and bytes of keys and values at the end."""
    held, let_go, clock = [0], SpeculativeCache.let_go, Clock()

    def counted(cache: SpeculativeCache) -> None:
        storages = [buffer.untyped_storage() for layer in cache.layers for buffer in layer.buffers()]
        held[0] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # layers share some
        let_go(cache)

    cache = DynamicCache(config=model.config) if spec is None else None
    SpeculativeCache.let_go = counted  # type: ignore[method-assign]
    try:
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        ids = model.generate(
            prompt, max_new_tokens=tokens, streamer=clock, assistant=spec, past_key_values=cache, **drawn
        )
    finally:
        SpeculativeCache.let_go = let_go  # type: ignore[method-assign]
    if cache is not None:
        held[0] = sum(kept.untyped_storage().nbytes() for one in cache.layers for kept in (one.keys, one.values))
    first, *_, last = clock.times[1:]
    return ids, (last - first) / (tokens - 1), held[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--prompts", nargs="+", type=int, default=[4000, 16000], help="tokens of a prompt")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65, help="new tokens")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_head("cpu", f"six layers of width {args.width}, window {args.window}, {args.tokens} new tokens, float32")
    print_table_head("model", "prompt", "plain ms", "ms", "time", "MB", "memory", "greedy ids")
    for kind in args.kinds:
        model = build(kind, args.window, args.width)
        for length in args.prompts:
            prompt = torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(length))
            spec, runs = SelfSpec(), []
            for _ in range(args.repeats):  # in text without repetitions
                runs.append([call(model, prompt, one, args.tokens, 5.0) for one in (None, spec)])
            plain, ours = (1e3 * median(run[way][1] for run in runs) for way in (0, 1))
            (ids, _, theirs), (own, _, held) = (call(model, prompt, one, args.tokens) for one in (None, SelfSpec()))
            cells = f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}", f"{held / 1e6:.1f}", f"{held / theirs:.2f}"
            print_row(kind, str(length), *cells, "equal" if torch.equal(ids, own) else "others")


if __name__ == "__main__":
    main()
