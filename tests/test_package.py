"""The package as a whole: its names, its low-precision promise, its statistics."""

import ast
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import pytest

import hf_selfspec
from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import FixedLength, GenerationStats, SelfSpec, TopKTree, errors
from hf_selfspec.drafts import EarlyExit
from hf_selfspec.model import internals

# Private in torch and in Python, which have no other way.
TORCHS = {
    *("_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_has_any_global_hook", "_compiled_call_impl"),
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_ConvNd", "_DropoutNd", "_linear_pointwise"),
    "_version",
    *("_convert_weight_to_int4pack", "_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm"),
    *("_weight_int4pack_mm_for_cpu", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_fused_sdp_choice"),
    *("_C", "_getframe", "_at_fork_reinit", "_cuda_clearCublasWorkspaces"),
}


def test_public_names() -> None:
    assert list(hf_selfspec.__all__) == sorted(hf_selfspec.__all__)
    for name in hf_selfspec.__all__:
        assert getattr(hf_selfspec, name).__module__.startswith("hf_selfspec."), name
    with pytest.raises(AttributeError, match="no attribute 'SelfSpecs'"):
        attrgetter("SelfSpecs")(hf_selfspec)


def test_what_is_private_in_other_libraries_is_in_one_room() -> None:
    """Of transformers, PEFT and accelerate: attributes with an underscore that nothing in this package defines."""
    trees = {path: ast.parse(path.read_text()) for path in Path(hf_selfspec.__file__).parent.rglob("*.py")}
    nodes = [(path.stem, node) for path, tree in trees.items() for node in ast.walk(tree)]
    names = {getattr(node, "name", getattr(node, "id", getattr(node, "arg", ""))) for _, node in nodes}
    names |= {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and _is_own(node.value)}
    used = {(stem, node.attr) for stem, node in nodes if isinstance(node, ast.Attribute) and node.attr not in names}
    private = {(stem, name) for stem, name in used if name.startswith("_") and not name.endswith("__")}
    assert "internals" in {stem for stem, _ in private}
    assert {name for stem, name in private if stem != "internals"} <= TORCHS


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_a_version_that_lacks_a_part_is_left_to_its_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = tiny_llama(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**ragged_batch(), **options)
    internals.why_unusable.cache_clear()
    monkeypatch.setattr(internals, "LOOP_METHODS", ("_sample", "_prefills"))
    try:
        with pytest.warns(UserWarning, match=r"transformers [\d.]+ has no GenerationMixin._prefills"):
            ids = model.generate(**ragged_batch(), **options, assistant=(spec := SelfSpec()))
    finally:
        internals.why_unusable.cache_clear()
    assert ids.equal(expected)
    assert "has no GenerationMixin._prefills" in spec.stats.left_to_generate


def forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def first_calls() -> None:
    forget("hf_selfspec")
    importlib.import_module("hf_selfspec")
    forget("hf_selfspec", "helpers", "transformers")
    hf_selfspec = importlib.import_module("hf_selfspec")
    assert "transformers" not in sys.modules
    importlib.util.find_spec("transformers.generation.utils")  # which imports nothing
    models = importlib.import_module("helpers.models")
    model, options = models.tiny_llama(2), {**models.ROW, "max_new_tokens": 4}
    first = model.generate(**options, assistant=hf_selfspec.SelfSpec())
    assert first.equal(model.generate(**options))
    assert not {"tools", "train"} & {name.split(".")[1] for name in sys.modules if name.startswith("hf_selfspec.")}
    for name in ("model.linear", "generate.seams", "generate.wrapper"):
        importlib.reload(sys.modules["hf_selfspec." + name])
        assert first.equal(model.generate(**options, assistant=hf_selfspec.SelfSpec()))
    forget("hf_selfspec")
    hf_selfspec = importlib.import_module("hf_selfspec")
    assert first.equal(model.generate(**options, assistant=hf_selfspec.SelfSpec()))
    with hf_selfspec.attach(model, hf_selfspec.SelfSpec()) as spec:
        model.generate(**options)
    assert spec.stats.tokens == 4
    assert not hasattr(model.generate.__wrapped__, "_hf_selfspec_wrapper")
    hf_selfspec.uninstall()
    assert model.generate.__module__ == "transformers.generation.utils"
    with pytest.raises(ValueError, match="assistant"):
        model.generate(**options, assistant=spec)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_first_calls_of_an_import() -> None:
    """Python looks ``generate`` up before the argument whose use imports the rest: with transformers imported after the
    package, and where the package is imported again, or one of its modules is reloaded. In a process of its own, which
    has torch already."""
    process = multiprocessing.get_context("fork").Process(target=first_calls)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.usefixtures("no_warnings_yet")
def test_muted_threads_do_not_mute_others() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        filters = warnings.filters
        with errors.muted():
            warnings.warn("here", stacklevel=1)
            errors.warn_once("once")
            thread = threading.Thread(target=warnings.warn, args=("there",))
            thread.start()
            thread.join()
            assert warnings.filters is filters
        errors.warn_once("once")
    assert [str(warning.message) for warning in said] == ["there", "once"]


def test_stats_by_hand() -> None:
    stats = GenerationStats(tokens=11, rounds=4, drafted=12, accepted=6, draft_steps=12, verify_passes=4)
    stats.from_draft = [[]]
    stats.accepted_lengths.update([0, 1, 2, 3])
    stats.draft_seconds, stats.verify_seconds, stats.prefill_seconds, stats.total_seconds = 1.2, 2.0, 0.5, 4.0
    assert stats.acceptance_rate == 0.5
    assert stats.mean_generated_length == 2.5
    assert [stats.ctar(w) for w in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    assert stats.other_seconds == pytest.approx(0.3)
    assert "acceptance rate α        0.500" in str(stats)


@pytest.mark.parametrize("tree", [None, TopKTree()])
def test_stats_of_a_generation_add_up(tree: TopKTree | None) -> None:
    spec = SelfSpec(draft=EarlyExit(3), stop=FixedLength(3), tree=tree)
    assert spec.stats is None
    batch = ragged_batch()
    tokens = tiny_llama().generate(**batch, max_new_tokens=20, do_sample=False, assistant=spec)
    stats = spec.stats
    assert stats.tokens == 3 * (tokens.shape[1] - batch["input_ids"].shape[1]) == 60
    assert stats.accepted == sum(map(sum, stats.from_draft))
    assert [len(row) for row in stats.from_draft] == [20] * 3
    assert sum(stats.accepted_lengths.values()) == stats.rounds
    assert sum(length * count for length, count in stats.accepted_lengths.items()) == stats.accepted
    assert 0 < stats.forward_seconds < stats.total_seconds
    assert stats.plan == "###..."


def test_stats_are_those_of_the_thread() -> None:
    model, spec, options = tiny_llama(), SelfSpec.lookup(), {"do_sample": False, "eos_token_id": None}

    def tokens(new: int = 0) -> int:
        if new:
            model.generate(**ragged_batch((5,)), max_new_tokens=new, assistant=spec, **options)
        return spec.stats.tokens

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert (tokens(4), one.submit(tokens, 6).result()) == (4, 6)
        assert (tokens(), other.submit(tokens).result()) == (4, 6)


def test_a_clone_in_the_current_folder_does_not_hide_the_package(tmp_path: Path) -> None:
    """As when somebody starts Python in the folder into which the repository was cloned."""
    places = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "from importlib.util import find_spec; print(getattr(find_spec('hf_selfspec'), 'origin', 'not installed'))"

    def found() -> str:
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=tmp_path, env=places, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip()).name

    if found() == "not installed":
        pytest.skip("the package is not installed in this environment")
    (tmp_path / "hf_selfspec" / "hf_selfspec").mkdir(parents=True)
    assert found() == "__init__.py"
