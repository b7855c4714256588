"""Exit heads, as in DSSD's Figures 2 and 4 and Table 1."""

from __future__ import annotations

import argparse

from fitting import Experiment
from timing import Table

from hf_selfspec import ExitHeads, SelfSpec, fit_exit_heads

EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9)
METRICS = ("entropy", "probability", "margin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copied", action="store_true", help="heads start as copies of the model's own")
    experiment = Experiment(parser)
    copied = experiment.args.copied
    heads = experiment.fitted(fit_exit_heads, ExitHeads, f"heads{'-copied' * copied}", copied=copied)
    print()
    table = Table("ROC AUC", *(f"layer {layer}" for layer in heads.layers))
    for metric, values in heads.about["calibration"]["auc"].items():
        table.row(metric, *("-" if value is None else f"{value:.3f}" for value in values))
    drafts = {f"DSSD, ε = {epsilon}": SelfSpec.dssd(heads, epsilon) for epsilon in EPSILONS}
    experiment.table(drafts | {f"DSSD, ε = 0.9, by {metric}": SelfSpec.dssd(heads, 0.9, metric) for metric in METRICS})


if __name__ == "__main__":
    main()
