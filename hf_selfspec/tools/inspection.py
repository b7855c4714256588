"""The structure of a model and what it supports, found from its config alone."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import SelfSpecError, SettingTypeError, UnsupportedModelError, brief
from ..generate.unseen import Unseen, why_plain
from ..model.anatomy import Anatomy
from ..model.graphs.graph_runner import why_no_graphs
from ..model.kernels.packing import has_widths, why_not
from ..model.module_tools import ModelView
from ..search.skip_search import SkipSpace
from .figures import as_text

_NOT_PACKED = "most weights are quantised already, not in linear layers, or of widths that no kernel takes"


@dataclass(frozen=True)
class Inspection:
    """The structure of a model and what it supports; ``str`` of it is a table.

    Attributes:
        model_name, model_type: class and type of the model.
        parameters: number of its parameters.
        refused: why it cannot be used with a ``SelfSpec``, empty where it can be. Then nothing below is known.
        num_layers: decoder layers.
        attention, mlp: number of layers in which an attention block (or another token mixer) and an MLP block was
            found.
        skippable: number of blocks that a search may leave out.
        no_skips: why no search for blocks to skip is possible, empty where it is.
        tree: drafts can be trees, otherwise lines.
        ragged: the rows of a batch advance at their own pace, otherwise plain ``generate`` serves batches.
        unseen: the parts of the model that this package's tests do not cover, and what comparing them with the model's
            one-token steps has shown in this process (see ``GenerationStats.checked``); empty where there are none.
        exits: the states of several exits can go through the head together (``exit_report``, training of exits).
        no_graphs: why forwards cannot be captured on a GPU, empty where they can be.
        packed: drafts in four bits (:class:`Quantized`) are possible, where the machine has kernels for them.
        is_recurrent: it has recurrent states besides keys and values, which are restored when a draft is rejected.
        max_positions: number of tokens that the model was made for, ``None`` if its config does not give it.
        position_limit: whether the model cannot go beyond ``max_positions``.
    """

    model_name: str
    model_type: str
    parameters: int
    refused: str = ""
    num_layers: int = 0
    attention: int = 0
    mlp: int = 0
    skippable: int = 0
    no_skips: str = ""
    tree: bool = False
    ragged: bool = False
    exits: bool = False
    no_graphs: str = ""
    packed: bool = False
    is_recurrent: bool = False
    max_positions: int | None = None
    position_limit: bool = False
    unseen: str = ""

    def __str__(self) -> str:
        abilities = [("parameters", f"{self.parameters:,}"), *self._abilities()]
        return as_text(["model", f"{self.model_name} ({self.model_type})"], abilities)

    def _abilities(self) -> list[tuple[str, str]]:
        if self.refused:
            return [("SelfSpec", f"not possible: {self.refused}")]
        pace = "each row advances at its own pace" if self.ragged else "batches are left to plain generate"
        lines = [
            ("not seen before", self.unseen),
            ("layers", f"{self.num_layers}, {self.attention} with attention or similar, {self.mlp} with an MLP"),
            ("early exits", f"after layers 1 to {self.num_layers - 1}" if self.num_layers > 1 else "none"),
            ("blocks to skip", self.no_skips or str(self.skippable)),
            ("drafts", "trees or lines" if self.tree else "lines: it cannot take a tree mask"),
            ("batches", pace),
            ("sampling", "exact, with trees as well" if self.tree else "exact"),
            ("captured on a GPU", f"no: {self.no_graphs}" if self.no_graphs else "forwards over a few tokens"),
            ("recurrent states", "rolled back when a draft is rejected" if self.is_recurrent else "none"),
            ("exit_report, training", "possible" if self.exits else "not possible: exits cannot share the head"),
            (
                "drafts in four bits",
                "possible in bfloat16, on CPUs with AVX-512" if self.packed else f"no: {_NOT_PACKED}",
            ),
            ("positions", self._positions()),
        ]
        return [(name, ability) for name, ability in lines if ability]

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
    about: dict[str, Any] = {"model_name": type(inner).__name__, "model_type": str(inner.config.model_type)}
    about["parameters"] = sum(weight.numel() for weight in inner.parameters())
    try:
        anatomy = Anatomy.of(inner)
    except SelfSpecError as error:
        return Inspection(**about, refused=str(error))
    skippable, no_skips = 0, ""
    try:
        skippable = len(SkipSpace.of(anatomy).blocks)
    except SelfSpecError as error:
        no_skips = str(error)
    copied = ("num_layers", "tree", "ragged", "exits", "is_recurrent", "max_positions")
    return Inspection(
        **about,
        **{name: getattr(anatomy, name) for name in copied},
        attention=sum(block is not None for block in anatomy.attention),
        mlp=sum(bool(block) for block in anatomy.mlp),
        skippable=skippable,
        no_skips=no_skips,
        no_graphs=why_no_graphs(inner, anatomy),
        packed=not why_not(anatomy, has_widths),
        unseen=_unseen(inner),
        position_limit=anatomy.position_limit is not None,
    )


def _unseen(model: PreTrainedModel) -> str:
    """What of a model the tests have not seen, and what follows from that."""
    if why := why_plain(model):
        return f"left to plain generate: {why}"
    if not (unseen := Unseen.of(ModelView(model))):
        return ""
    if unseen.attached:
        return f"left to plain generate: {unseen.why_plain}"
    return f"{unseen}; compared with plain generate in the first call"
