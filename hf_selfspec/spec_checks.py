"""Checks of a ``SelfSpec``'s settings."""

from __future__ import annotations

import os
import re
from typing import Any

from transformers.generation.candidate_generator import CandidateGenerator

from .draft.source import DraftSource
from .errors import SettingError, SettingTypeError
from .stop.rules import RememberingRule
from .verify.tree import Tree

# Characters in the name of a task: at four bytes each, the name of its file stays within the limit of file systems.
_LONGEST_TASK = 50


def check_parts(draft: Any, stop: Any, tree: Any) -> None:
    """Checks the types of a draft, a stop rule and a tree.

    Raises:
        SettingTypeError: one has another type.
    """
    if not isinstance(draft, (DraftSource, CandidateGenerator)):
        raise SettingTypeError(
            "SelfSpec(draft) must be EarlyExit(layer), SkipLayers(...), EarlyExitAdapter(...), EarlyExitLora(...), "
            f"DynamicExit(...), another DraftSource or a CandidateGenerator, got {draft!r}."
        )
    is_rule = callable(stop) or isinstance(stop, RememberingRule)
    if stop is not None and (not is_rule or isinstance(stop, type)):
        raise SettingTypeError(
            "SelfSpec(stop) must be FixedLength(n), ConfidenceThreshold(p), ProductThreshold(p), "
            "AdaptiveThreshold(rule) or a function of (input_ids, logits, hidden_states), or None to have it "
            f"chosen, got {stop!r}."
        )
    if tree is not None and not isinstance(tree, Tree):
        raise SettingTypeError(f"SelfSpec(tree) must be a TopKTree, a CostTree or None, got {tree!r}.")


def check_whole_drafts(source: DraftSource, stop: Any, tree: Any) -> None:
    """Checks that drafts whose tokens come all at once have no stop rule and no tree, which would have no effect.

    Raises:
        SettingError: a setting would have no effect.
    """
    why = source.fixed_because
    for name, value in (("stop", stop), ("tree", tree)):
        if why and value is not None:
            raise SettingError(f"SelfSpec({name}={value!r}) has no effect here: {why}. Leave {name} out.")


def check_folder_and_task(folder: Any, task: Any) -> None:
    """Checks where findings are kept, and under which name.

    Raises:
        SettingError, SettingTypeError: the folder is not a path, or the task cannot be a file name.
    """
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise SettingTypeError(f"SelfSpec(cache_dir) must be a path or None, got {folder!r}.")
    if not isinstance(task, str) or not re.fullmatch(r"[\w.-]+", task) or len(task) > _LONGEST_TASK:
        raise SettingError(
            "SelfSpec(task) names a file: give letters, digits, dots, dashes and underscores, at most "
            f"{_LONGEST_TASK} of them, got {task!r}."
        )
