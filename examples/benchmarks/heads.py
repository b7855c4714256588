"""Exit heads, as in DSSD's Figure 4 and Table 1."""

from __future__ import annotations

import argparse

from fitting import Experiment

from hf_selfspec import ExitHeads, SelfSpec, fit_exit_heads

EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copied", action="store_true", help="heads start as copies of the model's own")
    experiment = Experiment(parser)
    copied = experiment.args.copied
    heads = experiment.fitted(fit_exit_heads, ExitHeads, f"heads{'-copied' * copied}", copied=copied)
    experiment.table({f"DSSD, ε = {epsilon}": SelfSpec.dssd(heads, epsilon) for epsilon in EPSILONS})


if __name__ == "__main__":
    main()
