"""Stop rules of an exit's drafts, as in AdaSPEED's Figure 1 and Table I."""

from __future__ import annotations

import argparse

from fitting import Experiment

from hf_selfspec import (
    AdaptiveThreshold,
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    LinearProbe,
    ProductThreshold,
    SelfSpec,
    fit_probe,
)

LENGTHS = (1, 2, 3, 4, 5, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.2, 0.3, 0.5, 0.8], help="thresholds")
    parser.add_argument("--product", type=float, nargs="+", default=[0.05, 0.1, 0.3, 0.5], help="thresholds")
    experiment = Experiment(parser)
    args = experiment.args
    probe = experiment.fitted(fit_probe, LinearProbe, f"probe-{args.exit_layer}", exit_layer=args.exit_layer)
    rules = {
        **{f"fixed, {length}": FixedLength(length) for length in LENGTHS},
        **{f"confidence, {threshold}": ConfidenceThreshold(threshold) for threshold in args.confidence},
        "Draft & Verify (adaptive confidence, from 0.8)": AdaptiveThreshold(ConfidenceThreshold(0.8)),
        **{f"product, {threshold}": ProductThreshold(threshold) for threshold in args.product},
        "AdaSPEED (adaptive product, from 0.8)": AdaptiveThreshold(ProductThreshold(0.8)),
        **{f"product of a probe, {threshold}": ProductThreshold(threshold, probe) for threshold in args.product},
        "AdaSPEED with the probe": AdaptiveThreshold(ProductThreshold(0.8, probe)),
    }
    experiment.table({name: SelfSpec(EarlyExit(args.exit_layer), rule, max_draft=12) for name, rule in rules.items()})


if __name__ == "__main__":
    main()
