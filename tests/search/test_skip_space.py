"""Which blocks may be skipped."""

import numpy as np
import pytest

from helpers.architectures import build
from helpers.models import tiny_llama
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.search.skip_space import SkipSpace, usual_ratio


def test_skip_space() -> None:
    space = SkipSpace.of(Anatomy.of(tiny_llama(6)))
    assert len(space.blocks) == 8
    assert space.count(0.5) == 4
    assert space.count(0.01) == 1
    rng = np.random.default_rng(0)
    drawn = [space.random(rng, 0.25) for _ in range(200)]
    assert all(space.plan(space.places(plan)) == plan for plan in drawn)
    assert {len(space.places(plan)) for plan in drawn} == {2}
    assert set().union(*map(space.places, drawn)) == set(range(8))


def test_skip_space_of_shared_keys() -> None:
    """Gemma 3n: attention whose keys later layers read always runs, so such a layer is never left out as a whole."""
    anatomy = Anatomy.of(build("gemma3n_text"))
    assert anatomy.kv_sources == {1, 2}
    assert SkipSpace.of(anatomy).blocks == ((1, "mlp"), (2, "mlp"), (3, "attention"), (3, "mlp"))


@pytest.mark.parametrize(("billions", "ratio"), [(7, 0.4), (13, 0.45), (34, 0.5), (70, 0.5)])
def test_the_papers_ratios(billions: int, ratio: float) -> None:
    assert usual_ratio(int(billions * 1e9)) == ratio
