"""Rounds of a tiny model: eager, and compiled, where a draft becomes one graph. CPU time, one thread.

    python examples/measure_whole_drafts.py --tokens 200 --repeats 7

Ways take turns in one process, and medians count. What is compiled was compiled before.
"""

import argparse
import time
from statistics import median

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from hf_selfspec import ConfidenceThreshold, EarlyExit, FixedLength, SelfSpec, SkipLayers

# Late layers that hardly matter, so that drafts are usually right.
DAMPED = 0.1


def tiny_llama() -> LlamaForCausalLM:
    """Returns a Llama of 4 layers and width 64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=None, pad_token_id=0)).eval()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(DAMPED)
    return model


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, ids = tiny_llama(), torch.arange(2, 34)[None]
    kinds = {
        "early exit 2 of 4, line of 4": (EarlyExit(2), FixedLength(4)),
        "early exit 2 of 4, up to 5 by confidence": (EarlyExit(2), ConfidenceThreshold(1e-3)),
        "skip set, line of 4": (SkipLayers([1], [2]), FixedLength(4)),
    }
    settings = {"max_new_tokens": options.tokens, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **settings)
    config = CompileConfig(backend=options.backend, mode="default")
    print("| ms a token | plain | eager | compiled | compiled / eager | ids of plain |\n|" + "---|" * 6)
    for name, (draft, stop) in kinds.items():
        eager, compiled = (SelfSpec(draft, stop, max_draft=5, compile=how) for how in (False, config))
        ways = {"plain": {}, "eager": {"assistant": eager}, "compiled": {"assistant": compiled}}
        seconds = {way: [] for way in ways}
        equal = True
        for counts in (*[False] * 4, *[True] * options.repeats):
            for way, arguments in ways.items():
                begun = time.process_time()
                found = model.generate(ids, **settings, **arguments)
                if counts:
                    seconds[way].append(1e3 * (time.process_time() - begun) / options.tokens)
                equal = equal and torch.equal(found, plain)
        times = [median(values) for values in seconds.values()]
        shown = " | ".join(f"{value:.3f}" for value in times)
        print(f"| {name} | {shown} | {times[2] / times[1]:.2f} | {'yes' if equal else 'no'} |", flush=True)


if __name__ == "__main__":
    main()
