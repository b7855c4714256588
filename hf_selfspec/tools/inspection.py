"""The structure of a model and what it supports, found from its config alone."""

from collections.abc import Mapping
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

_PACKED = "possible in bfloat16, on CPUs with AVX-512"
_NOT_PACKED = "most weights are quantised already, not in linear layers, or of widths that no kernel takes"


@dataclass(frozen=True)
class Inspection:
    """The structure of a model and what it supports; ``str`` of it is a table.

    Attributes:
        model_name, model_type: class and type of the model.
        parameters: number of its parameters.
        abilities: the rows of the table, by their names; those of a model that cannot be used with a ``SelfSpec`` have
            nothing but why.
    """

    model_name: str
    model_type: str
    parameters: int
    abilities: Mapping[str, str]

    def __str__(self) -> str:
        rows = {"parameters": f"{self.parameters:,}", **self.abilities}
        return as_text(["model", f"{self.model_name} ({self.model_type})"], list(rows.items()))


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
    parameters = sum(weight.numel() for weight in inner.parameters())
    return Inspection(type(inner).__name__, str(inner.config.model_type), parameters, _abilities(inner))


def _abilities(model: PreTrainedModel) -> dict[str, str]:
    try:
        anatomy = Anatomy.of(model)
    except SelfSpecError as error:
        return {"SelfSpec": f"not possible: {error}"}
    try:
        skippable = str(len(SkipSpace.of(anatomy).blocks))
    except SelfSpecError as error:
        skippable = str(error)
    count, no_graphs, most = anatomy.num_layers, why_no_graphs(model, anatomy), anatomy.max_positions
    mixing, mlp = sum(block is not None for block in anatomy.attention), sum(map(bool, anatomy.mlp))
    beyond = "less accurate beyond" if anatomy.position_limit is None else "and no more"
    abilities = {
        "not seen before": _unseen(model),
        "layers": f"{count}, {mixing} with attention or similar, {mlp} with an MLP",
        "early exits": f"after layers 1 to {count - 1}" if count > 1 else "none",
        "blocks to skip": skippable,
        "drafts": "trees or lines" if anatomy.tree else "lines: it cannot take a tree mask",
        "batches": "each row advances at its own pace" if anatomy.ragged else "batches are left to plain generate",
        "captured on a GPU": f"no: {no_graphs}" if no_graphs else "forwards over a few tokens",
        "recurrent states": "rolled back when a draft is rejected" if anatomy.is_recurrent else "none",
        "exit_report, training": "possible" if anatomy.exits else "not possible: exits cannot share the head",
        "drafts in four bits": f"no: {_NOT_PACKED}" if why_not(anatomy, has_widths) else _PACKED,
        "positions": "no limit given in the config" if most is None else f"{most:,}, {beyond}",
    }
    return {name: ability for name, ability in abilities.items() if ability}


def _unseen(model: PreTrainedModel) -> str:
    """What of a model the tests have not seen, and what follows from that."""
    if why := why_plain(model):
        return f"left to plain generate: {why}"
    if not (unseen := Unseen.of(ModelView(model))):
        return ""
    if unseen.attached:
        return f"left to plain generate: {unseen.why_plain}"
    return f"{unseen}; compared with plain generate in the first call"
