"""Layers that see a window: the time of a token and the keys and values held, ours over plain generate's."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from timing import Table, interleave, parsed, parser_with, print_head, timed_generate
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_selfspec import SelfSpec
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache

FIVE_OF_SIX, EVERY_OTHER = [*["sliding_attention"] * 5, "full_attention"], ["sliding_attention", "full_attention"] * 3
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {"layer_types": FIVE_OF_SIX},
    "qwen2": {"layer_types": FIVE_OF_SIX, "use_sliding_window": True},
    "cohere2": {"layer_types": FIVE_OF_SIX},
    "gpt_oss": {"layer_types": EVERY_OTHER, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Text without repetitions.
DRAWN = {"do_sample": True, "temperature": 5.0, "top_k": 0}


def build(name: str, window: int, width: int) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 6, "head_dim": width // 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1 << 17}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}
    options = {"sliding_window": window, "initializer_range": 0.25} | shape | heads | ids | MODELS[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).eval()


def bytes_of(buffers: list[torch.Tensor]) -> int:
    storages = [buffer.untyped_storage() for buffer in buffers]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # layers share storages


def held(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> tuple[bool, int, int]:
    """Whether greedy ids are plain's, and the bytes of keys and values at the end of a call, ours and plain's."""
    sizes, let_go = [], SpeculativeCache.free

    def counted(cache: SpeculativeCache) -> None:
        sizes.append(bytes_of([buffer for layer in cache.layers for buffer in layer.buffers()]))
        let_go(cache)

    options, cache = {"max_new_tokens": tokens, "do_sample": False}, DynamicCache(config=model.config)
    plain = model.generate(prompt, past_key_values=cache, **options)
    with patch.object(SpeculativeCache, "free", counted):
        ours = model.generate(prompt, assistant=SelfSpec(), **options)
    theirs = bytes_of([buffer for layer in cache.layers for buffer in (layer.keys, layer.values)])
    return torch.equal(plain, ours), sizes[-1], theirs


def main() -> None:
    parser = parser_with(__doc__, prompts=[4000, 16000], window=128, width=128, tokens=65, repeats=5, threads=1)
    parser.add_argument("--kinds", nargs="+", default=list(MODELS), choices=MODELS)
    args = parsed(parser)
    print_head("cpu", f"six layers of width {args.width}, window {args.window}, {args.tokens} new tokens, float32")
    table = Table("model", "prompt", "plain ms", "ms", "time", "MB", "memory", "greedy ids")
    for name in args.kinds:
        model = build(name, args.window, args.width)
        for length in args.prompts:
            prompt = torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(length))
            call = partial(timed_generate, model, {"input_ids": prompt}, max_new_tokens=args.tokens, **DRAWN)
            ways = {"plain": call, "ours": partial(call, assistant=SelfSpec())}
            plain, ours = (1e3 * way.median() for way in interleave(ways, args.repeats, warmup=0).values())
            is_equal, size, theirs = held(model, prompt, args.tokens)
            cells = f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}", f"{size / 1e6:.1f}", f"{size / theirs:.2f}"
            table.row(name, str(length), *cells, "equal" if is_equal else "others")


if __name__ == "__main__":
    main()
