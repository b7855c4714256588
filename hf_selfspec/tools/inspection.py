"""The structure of a model and what it supports, found from its config alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from ..drafts.layers.quantized import Quantized
from ..errors import SelfSpecError, SettingTypeError, UnsupportedModelError, brief
from ..generate.probation import outcomes_of
from ..generate.unseen import Unseen, why_plain
from ..model.anatomy import Anatomy
from ..model.cache.speculative_cache import window_of
from ..model.cache.window import Window
from ..model.graphs.graph_runner import why_no_graphs
from ..model.kernels.packing import has_widths, packed_bytes, why_not
from ..model.view import ModelView
from ..search.skip_space import SkipSpace
from .tables import as_text

_MIB = 2**20


@dataclass(frozen=True)
class Share:
    """One part of a model.

    Attributes:
        name: what the part is.
        parameters: number of its parameters; those that two parts share count in the first one.
        bytes: memory that they take.
    """

    name: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The structure of a model and what it supports; ``str`` of it is a table.

    Attributes:
        model_name, model_type: class and type of the model.
        refused: why it cannot be used with a ``SelfSpec``, empty where it can be. Then only the shares are known.
        num_layers: decoder layers.
        attention, mlp: number of layers in which an attention block (or another token mixer) and an MLP block was
            found.
        skippable: for each layer the blocks that a search may leave out: ``attention``, ``mlp``, ``layer``.
        no_skips: why no search for blocks to skip is possible, empty where it is.
        tree: drafts can be trees, otherwise lines.
        ragged: the rows of a batch advance at their own pace, otherwise by the shortest acceptance.
        unseen: what of the model the tests of this package have not seen, and what comparing it with its own one-token
            steps has shown in this process (see ``GenerationStats.checked``); empty where there is nothing.
        replay: verification can start from the hidden states that a draft has computed.
        exits: the states of several exits can go through the head together (``exit_report``, training of exits).
        no_graphs: why forwards cannot be captured on a GPU, empty where they can be.
        is_recurrent: it has recurrent states besides keys and values, which are restored when a draft is rejected.
        max_positions: number of tokens that the model was made for, ``None`` if its config does not give it.
        position_limit: whether the model cannot go beyond ``max_positions``.
        shares: parameters by part: embeddings, layers, output head and the rest.
        cache_bytes: bytes of one token's keys and values in all layers, ``None`` if the config does not give it.
        held_bytes: bytes of keys and values of a text of ``max_positions`` tokens, and those with plain ``generate``,
            if some layers have a window: room for a draft that is longer than an eighth of it comes on top.
        packed_bytes: bytes that drafts in four bits take besides a model in bfloat16 (:class:`Quantized`), ``None``
            where most weights are not in layers that can be packed.
    """

    model_name: str
    model_type: str
    refused: str
    shares: tuple[Share, ...]
    num_layers: int = 0
    attention: int = 0
    mlp: int = 0
    skippable: tuple[tuple[str, ...], ...] = ()
    no_skips: str = ""
    tree: bool = False
    ragged: bool = False
    replay: bool = False
    exits: bool = False
    no_graphs: str = ""
    is_recurrent: bool = False
    max_positions: int | None = None
    position_limit: bool = False
    cache_bytes: int | None = None
    held_bytes: tuple[int, int] | None = None
    packed_bytes: int | None = None
    unseen: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(share.parameters for share in self.shares)

    def __str__(self) -> str:
        abilities = as_text(["model", f"{self.model_name} ({self.model_type})"], self._abilities())
        rows = []
        for share in (*self.shares, Share("all", self.parameters, sum(share.bytes for share in self.shares))):
            part = share.parameters / max(self.parameters, 1)
            rows.append([share.name, f"{share.parameters:,}", f"{part:.1%}", f"{share.bytes / _MIB:,.1f}"])
        return f"{abilities}\n\n{as_text(['part', 'parameters', 'share', 'MiB'], rows, right=True)}"

    def _abilities(self) -> list[tuple[str, str]]:
        if self.refused:
            return [("SelfSpec", f"not possible: {self.refused}")]
        pace = "each row advances at its own pace" if self.ragged else "all rows advance by the shortest acceptance"
        held = ""
        if self.held_bytes is not None:
            ours, plain = (f"{size / _MIB:,.1f}" for size in self.held_bytes)
            held = f"{ours} MiB, with plain generate {plain}, since some layers see a window"
        lines = [
            ("not seen before", self.unseen),
            ("layers", f"{self.num_layers}, {self.attention} with attention or similar, {self.mlp} with an MLP"),
            ("early exits", f"after layers 1 to {self.num_layers - 1}" if self.num_layers > 1 else "none"),
            ("blocks to skip", self.no_skips or self._skips()),
            ("drafts", "trees or lines" if self.tree else "lines: it cannot take a tree mask"),
            ("batches", pace),
            ("sampling", "exact, with trees as well" if self.tree else "exact"),
            ("captured on a GPU", f"no: {self.no_graphs}" if self.no_graphs else "forwards over a few tokens"),
            ("recurrent states", "rolled back when a draft is rejected" if self.is_recurrent else "none"),
            ("exit_report, training", "possible" if self.exits else "not possible: exits cannot share the head"),
            ("drafts in four bits", self._in_four_bits()),
            ("positions", self._positions()),
            ("cache of a token", "unknown" if self.cache_bytes is None else f"{self.cache_bytes / 1024:,.1f} KiB"),
            ("cache of such a text", held),
        ]
        return [(name, ability) for name, ability in lines if ability]

    def _skips(self) -> str:
        blocks = sum(map(len, self.skippable))
        layers = [index for index, names in enumerate(self.skippable) if names]
        return f"{blocks} in layers {_ranges(layers)} (counted from 0)" if layers else "none"

    def _in_four_bits(self) -> str:
        if self.packed_bytes is None:
            return "no: most weights are quantised already, not in linear layers, or of widths that no kernel takes"
        share = self.packed_bytes / (2 * max(self.parameters, 1))
        return f"{self.packed_bytes / _MIB:,.1f} MiB more, {share:.0%} of the model in bfloat16, which a step reads"

    def _positions(self) -> str:
        if self.max_positions is None:
            return "no limit given in the config"
        return f"{self.max_positions:,}" + (", and no more" if self.position_limit else ", less accurate beyond")


def inspect_model(model: Any) -> Inspection:
    """Inspects the structure of a model and what it supports.

    Args:
        model: a causal LM of transformers, a PEFT model around one, or a config, from which a model without weights is
            built.

    Raises:
        SettingTypeError: ``model`` is none of these.
        UnsupportedModelError: transformers has no causal LM for the config.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(inner, PreTrainedConfig):
        dtype = getattr(inner, "dtype", None) or torch.float32
        try:
            with torch.device("meta"):
                inner = AutoModelForCausalLM.from_config(inner, dtype=dtype, trust_remote_code=False)
        except ValueError as error:
            raise UnsupportedModelError(
                f"transformers has no causal LM for a {type(inner).__name__} ({brief(error)})."
            ) from error
    if not isinstance(inner, PreTrainedModel):
        raise SettingTypeError(
            f"inspect_model takes a causal LM of transformers, a PEFT model around one or a config, got "
            f"{type(inner).__name__}."
        )
    config = inner.config
    names: dict[str, Any] = {"model_name": type(inner).__name__, "model_type": str(config.model_type)}
    try:
        anatomy = Anatomy.of(inner)
    except SelfSpecError as error:
        return Inspection(**names, refused=str(error), shares=_shares(inner, ()))
    skippable, no_skips = _skippable(anatomy)
    copied = ("num_layers", "tree", "ragged", "replay", "exits", "is_recurrent", "max_positions")
    return Inspection(
        **names,
        **{name: getattr(anatomy, name) for name in copied},
        refused="",
        shares=_shares(inner, anatomy.layers),
        attention=sum(block is not None for block in anatomy.attention),
        mlp=sum(bool(block) for block in anatomy.mlp),
        skippable=skippable,
        no_skips=no_skips,
        no_graphs=why_no_graphs(inner, anatomy),
        unseen=_unseen(inner),
        position_limit=anatomy.position_limit is not None,
        cache_bytes=_cache_bytes(config.get_text_config(decoder=True), inner.dtype),
        held_bytes=_held_bytes(config.get_text_config(decoder=True), anatomy.max_positions, inner.dtype),
        packed_bytes=_packed_bytes(inner, anatomy),
    )


def _unseen(model: PreTrainedModel) -> str:
    """What of a model the tests have not seen, and what comparing it has shown."""
    if why := why_plain(model):
        return f"left to plain generate: {why}"
    if not (unseen := Unseen.of(ModelView(model))):
        return ""
    if unseen.attached:
        return f"left to plain generate: {unseen.why_plain}"
    outcomes = [
        f"left to plain generate: {outcome.why_plain}"
        if outcome.why_plain
        else "drafted, with lines alone and rows in step"
        if outcome.lines_in_step
        else "drafted"
        for outcome in outcomes_of(model)
    ]
    return f"{unseen}; {'; '.join(dict.fromkeys(outcomes)) or 'compared with plain generate in the first call'}"


def _skippable(anatomy: Anatomy) -> tuple[tuple[tuple[str, ...], ...], str]:
    """For each layer the blocks that a search may leave out, and the reason if there are none."""
    try:
        space = SkipSpace.of(anatomy)
    except SelfSpecError as error:
        return ((),) * anatomy.num_layers, str(error)
    layers = range(anatomy.num_layers)
    return tuple(tuple(name for layer, name in space.blocks if layer == index) for index in layers), ""


def _shares(model: PreTrainedModel, layers: Iterable[nn.Module]) -> tuple[Share, ...]:
    """The parts of a model; a parameter belongs to the first part that has it."""
    counted: set[int] = set()
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and embeddings is not None and getattr(head, "weight", 0) is embeddings.weight
    parts = (
        ("embeddings, head" if tied else "embeddings", [embeddings]),
        ("layers", list(layers)),
        ("output head", [head]),
        ("the rest", [model]),
    )
    shares = []
    for name, modules in parts:
        weights = {id(weight): weight for module in modules if module is not None for weight in module.parameters()}
        new = [weight for key, weight in weights.items() if key not in counted]
        counted |= weights.keys()
        shares.append(Share(name, sum(weight.numel() for weight in new), sum(weight.nbytes for weight in new)))
    return tuple(share for share in shares if share.parameters)


def _cache_bytes(config: Any, dtype: torch.dtype) -> int | None:
    """Bytes of a token's keys and values, for models that have them by head in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None)
    if width is None and heads and getattr(config, "hidden_size", None):
        width = config.hidden_size // config.num_attention_heads
    types = [str(layer_type) for layer_type in getattr(config, "layer_types", None) or []]
    by_head = all(name.endswith("attention") and not name.startswith("linear") for name in types)
    if not (isinstance(heads, int) and isinstance(width, int) and by_head) or hasattr(config, "kv_lora_rank"):
        return None
    size = torch.empty((), dtype=dtype, device="meta").element_size()
    return 2 * int(config.num_hidden_layers) * heads * width * size


def _held_bytes(config: Any, tokens: int | None, dtype: torch.dtype) -> tuple[int, int] | None:
    """Bytes of a long text's keys and values in our buffers and in plain's, if a window makes these differ."""
    token, layers = _cache_bytes(config, dtype), DynamicCache(config=config).layers
    sizes = [size for layer in layers if (size := window_of(layer)) and tokens is not None and size < tokens]
    if token is None or tokens is None or not sizes:
        return None
    window, others = Window(max(sizes), 1), tokens * (len(layers) - len(sizes))
    window.reserve(tokens)
    of_layer = token // int(config.num_hidden_layers)
    return (of_layer * (others + len(sizes) * window.capacity), of_layer * (others + sum(sizes) - len(sizes)))


def _packed_bytes(model: PreTrainedModel, anatomy: Anatomy) -> int | None:
    if why_not(anatomy, dict(enumerate(anatomy.layers)), has_widths):
        return None
    return sum(map(packed_bytes, Quantized().wanted(anatomy, model, has_widths).values()))


def _ranges(numbers: list[int]) -> str:
    """Numbers as ranges: ``1-3, 5`` for 1, 2, 3, 5."""
    groups = (list(group) for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    ends = ((group[0][1], group[-1][1]) for group in groups)
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
