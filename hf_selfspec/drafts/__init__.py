"""Draft sources: what proposes tokens, from free lookups to parts of the model."""

from .cascade import Cascade as Cascade
from .free.lookup import Lookup as Lookup
from .heads.adapter import EarlyExitAdapter as EarlyExitAdapter
from .heads.block import Block as Block
from .heads.exit_heads import DynamicExit as DynamicExit
from .heads.mtp import MTP as MTP
from .layers.early_exit import EarlyExit as EarlyExit
from .layers.quantized import Quantized as Quantized
from .layers.skip_layers import SkipLayers as SkipLayers
from .source import Drafter as Drafter
from .source import DraftSource as DraftSource
from .source import Session as Session
