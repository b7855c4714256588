"""Stop rules whose confidence was fitted to the states of one model."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import SettingError, warn_once
from ..model.fingerprint import Fingerprint
from ..model.plan import LayerPlan
from ..modules.probe import LinearProbe
from .adaptive import AdaptiveThreshold
from .rules import StopRule


def check_fitted_rule(
    stop: StopRule | None,
    plan: LayerPlan | None,
    source: str,
    do_sample: bool,
    fingerprint: Callable[[], Fingerprint],
) -> None:
    """Checks that the probe of a stop rule, if it has one, was fitted to the states that it will get."""
    rule = stop.rule if isinstance(stop, AdaptiveThreshold) else stop
    probe = getattr(rule, "confidence", None)
    if not isinstance(probe, LinearProbe):
        return
    probe.check(fingerprint)
    if plan is None or plan != LayerPlan.early_exit(plan.num_layers, probe.exit_layer):
        raise SettingError(
            f"the probe was fitted to the states of exit layer {probe.exit_layer}, but {source} drafts from others. "
            f"Draft with EarlyExit({probe.exit_layer}), or fit another probe."
        )
    if probe.do_sample != do_sample:
        modes = {True: "sampled tokens", False: "greedy text"}
        warn_once(
            f"the probe was fitted for {modes[probe.do_sample]} but is used for {modes[do_sample]}: it may mislead."
        )
