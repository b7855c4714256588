"""Adapters behind an exit, as in Kangaroo's Table 2, compared with the exit alone."""

from __future__ import annotations

import argparse

from fitting import Experiment

from hf_selfspec import Adapter, ConfidenceThreshold, SelfSpec, fit_adapter

# Blocks of the adapter, and whether it has a head of its own.
VARIANTS = {
    "attention": (("attention",), False),
    "attention and a head": (("attention",), True),
    "attention and MLP": (("attention", "mlp"), False),
    "MLP and a head": (("mlp",), True),
}


def main() -> None:
    experiment = Experiment(argparse.ArgumentParser(description=__doc__))
    layer, specs = experiment.args.exit_layer, {}
    for name, (blocks, own_head) in VARIANTS.items():
        folder = f"adapter-{layer}-{'-'.join(blocks)}{'-head' * own_head}"
        options = {"exit_layer": layer, "blocks": blocks, "own_head": own_head}
        part = experiment.fitted(fit_adapter, Adapter, folder, **options)
        specs[f"{name}, {part.num_parameters:,} parameters"] = SelfSpec.kangaroo(part)
    specs["exit alone (LayerSkip)"] = SelfSpec.layerskip(layer, stop=ConfidenceThreshold(0.6), max_draft=6)
    experiment.table(specs)


if __name__ == "__main__":
    main()
