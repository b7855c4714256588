"""Draft sources: what proposes tokens, from free lookups to parts of the model."""

from .adapter import EarlyExitAdapter as EarlyExitAdapter
from .block import Block as Block
from .cascade import Cascade as Cascade
from .early_exit import EarlyExit as EarlyExit
from .early_exit import EarlyExitLora as EarlyExitLora
from .early_exit import EarlyExitOnly as EarlyExitOnly
from .exit_heads import DynamicExit as DynamicExit
from .lookup import Lookup as Lookup
from .mtp import MTP as MTP
from .quantized import Quantized as Quantized
from .skip_layers import SkipLayers as SkipLayers
from .source import BaseDrafter as BaseDrafter
from .source import Drafter as Drafter
from .source import DraftSource as DraftSource
from .source import Session as Session

FixedDrafter = BaseDrafter  # its former name
