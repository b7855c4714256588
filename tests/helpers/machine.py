"""The machine as tests see it: what is measured on it, or follows from that, is given here and nowhere else."""

from unittest.mock import Mock

import pytest
import torch

from helpers.captured import Traced
from hf_selfspec import SelfSpec
from hf_selfspec.drafts import controller, states
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.generate import unseen, walk
from hf_selfspec.learned.knowledge import Knowledge
from hf_selfspec.model import anatomy, forks, linear, module_tools, patching, target
from hf_selfspec.model.cache import speculative_cache
from hf_selfspec.model.graphs import graph_runner, model_graphs
from hf_selfspec.model.kernels import packing
from hf_selfspec.model.kernels.packing import Kernel, one_a_byte
from hf_selfspec.model.linear import LinearAutotuner


class Machine:
    """Gives tests the costs that decide what drafts; users have no setting for what their machine is measured for.

    The fixture ``machine`` calls the first two methods for every test, and those that ``pytest.mark.machine`` names.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._set = patch.setattr

    def code_of_tests_is_seen(self, library: str) -> None:
        """Hooks, methods and functions with which tests look into calls are not taken for a user's, and layers of
        theirs are a model's own; tests marked ``attached`` are about those."""
        ours = {library, "helpers", "conftest", "unittest"}
        for name in ("_HOOKS_OF", "_METHODS_OF", "_PARTS"):
            self._set(unseen, name, getattr(unseen, name) | ours)
        self._set(module_tools, "_TRUSTED", module_tools._TRUSTED | ours)

    def rounds_are_not_timed(self) -> None:
        """They cost what is guessed before the first one, so that promises count and nothing ever rests."""
        self._set(controller, "CostCurve", lambda on_cpu, rows=1, **_: CostCurve(on_cpu, rows, True))

    def verification_is_free(self) -> None:
        """Rounds of any batch cost nearly the same with any draft, as where memory bounds them; see above."""
        self._set(controller, "CostCurve", lambda *_, **given: CostCurve(on_cpu=False, is_frozen=True))

    def any_draft_pays(self) -> None:
        """Sets of any size draft, whatever they bring."""
        self._set(controller, "LEAST_SPEEDUP", 0.0)

    def nodes_are_scored_at_once(self) -> None:
        """As on a GPU, where each node of a draft would be a wait."""
        self._set(walk, "_ONE_BY_ONE", "none")

    def graphs_are_taken(self) -> None:
        """A CPU has graphs (see :class:`Traced`)."""
        self._set(graph_runner, "DEVICES", {"cpu"})
        self._set(model_graphs, "Captured", Traced)
        self._set(Traced, "made", [])
        self._set(model_graphs, "CapturePool", Mock())
        self._set(torch.cuda, "mem_get_info", lambda device=None: (1 << 36, 1 << 36))
        self._set(torch.cuda, "current_stream", Mock())
        self._set(torch.Tensor, "record_stream", lambda tensor, stream: None)

    def graphs_are_few(self, most: int) -> None:
        """A model has so many at most."""
        self._set(model_graphs, "_MOST", most)

    def no_architectures_are_registered(self) -> None:
        """But those of the package, until the test ends."""
        self._set(anatomy, "_ARCHITECTURES", dict(anatomy._ARCHITECTURES))

    def small_linears_have_ways(self) -> None:
        """Linear layers of any size have several ways to multiply."""
        self._set(linear, "_SMALLEST", 1)
        self._set(linear, "_FEWEST", 1)

    def linears_choose_by(self, fastest: LinearAutotuner, fewest: int = 1) -> None:
        """In place of what has chosen for this process so far, where layers of a shape have so many weights in all."""
        self._set(linear, "_FEWEST", fewest)
        for name in ("_fastest", "_usual"):
            self._set(linear, name, fastest)

    def forks_wait_briefly(self) -> None:
        """For locks that threads of the parent hold."""
        self._set(forks, "_PATIENCE", 0.05)

    def forwards_obey(self) -> list[object]:
        """What the forwards of this thread obey now."""
        return [values.now for values in patching._per_thread if values.now is not None]

    def states_wait(self, most: int) -> None:
        """So many states of a model, while others draft, until a head takes them in."""
        self._set(states, "_WAITING", most)

    def masks_have_rows(self, rows: int) -> None:
        """The mask of a text that continues has so many rows at most."""
        self._set(target, "_MASK", 1)
        self._set(target, "_LEAST", rows)

    def windows_of_graphs_move(self) -> None:
        """They have little room, so that short texts run out of it."""
        self._set(speculative_cache, "_GRAPH_GRAIN", 8)

    def packed_float32_is_fast(self) -> None:
        """Layers in float32 have a kernel for weights in four bits, as those in bfloat16 have."""
        kernel = Kernel(one_a_byte, _in_four_bits, most=8)
        self._set(packing, "kernel_for", lambda device, dtype: kernel)


def knowledge_of(spec: SelfSpec) -> Knowledge:
    """What a ``SelfSpec`` learns from call to call."""
    return spec._knowledge


def bytes_that_wait(drafter: states.StatesDraft) -> int:
    """The memory of the states that wait until a head takes them in."""
    return sum(piece.untyped_storage().nbytes() for piece in drafter._waiting)


def _in_four_bits(input: torch.Tensor, numbers: torch.Tensor, group_size: int, scales: torch.Tensor) -> torch.Tensor:
    scale, middle = scales.repeat_interleave(group_size, dim=0).unbind(-1)  # [k, n]
    return input @ ((numbers.t() - 8.0) * scale + middle)
