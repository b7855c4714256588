"""Self-speculative decoding: any causal language model of transformers generates faster, without a second model.

``model.generate(**inputs, assistant=SelfSpec())``: part of the model drafts tokens, the whole model verifies them, and
the output stays the same.
"""

from .auditing.audits import Audit, Parting, SampleTest, audit
from .auditing.differences import Difference, first_differences
from .batch import Draft, Text, Verdict
from .bench import Comparison, compare
from .draft import (
    Cascade,
    Drafter,
    DraftSource,
    DynamicExit,
    EarlyExit,
    EarlyExitAdapter,
    EarlyExitLora,
    EarlyExitOnly,
    FixedDrafter,
    Lookup,
    Session,
    SkipLayers,
)
from .errors import (
    NumericalError,
    SelfSpecError,
    SettingError,
    SettingTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from .grammar import Grammar, register_grammar
from .hooks.attached import attach, detach
from .hooks.wrapper import install, uninstall
from .learned.registry import register
from .model.anatomy import Architecture, register_architecture
from .modules import Adapter, DraftLora, ExitHeads, LinearProbe, ReducedHead
from .reports.exits import ExitReport, exit_report
from .reports.inspection import Inspection, Share, inspect_model
from .search import ClosestLayers, ExitChoice, OnTheFlySearch, SkipChoice
from .search.tuning import OfflineSearch, tune
from .selfspec import SelfSpec
from .stats import GenerationStats
from .stop import AdaptiveThreshold, CalibratedEntropy, ConfidenceThreshold, FixedLength, ProductThreshold
from .streaming import MarkedStreamer, Piece, stream
from .train import (
    EarlyExitLoss,
    Gradual,
    LayerDropout,
    Rotational,
    calibrate_exit_heads,
    fit_adapter,
    fit_draft_lora,
    fit_exit_heads,
    fit_probe,
    fit_reduced_head,
)
from .verify import CostTree, TopKTree
from .verify.stateless import register_stateless

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdaptiveThreshold",
    "Architecture",
    "Audit",
    "CalibratedEntropy",
    "Cascade",
    "ClosestLayers",
    "Comparison",
    "ConfidenceThreshold",
    "CostTree",
    "Difference",
    "Draft",
    "DraftLora",
    "DraftSource",
    "Drafter",
    "DynamicExit",
    "EarlyExit",
    "EarlyExitAdapter",
    "EarlyExitLora",
    "EarlyExitLoss",
    "EarlyExitOnly",
    "ExitChoice",
    "ExitHeads",
    "ExitReport",
    "FixedDrafter",
    "FixedLength",
    "GenerationStats",
    "Gradual",
    "Grammar",
    "Inspection",
    "LayerDropout",
    "LinearProbe",
    "Lookup",
    "MarkedStreamer",
    "NumericalError",
    "OfflineSearch",
    "OnTheFlySearch",
    "Parting",
    "Piece",
    "ProductThreshold",
    "ReducedHead",
    "Rotational",
    "SampleTest",
    "SelfSpec",
    "SelfSpecError",
    "Session",
    "SettingError",
    "SettingTypeError",
    "Share",
    "SkipChoice",
    "SkipLayers",
    "Text",
    "TopKTree",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "Verdict",
    "attach",
    "audit",
    "calibrate_exit_heads",
    "compare",
    "detach",
    "exit_report",
    "first_differences",
    "fit_adapter",
    "fit_draft_lora",
    "fit_exit_heads",
    "fit_probe",
    "fit_reduced_head",
    "inspect_model",
    "install",
    "register",
    "register_architecture",
    "register_grammar",
    "register_stateless",
    "stream",
    "tune",
    "uninstall",
]

install()
