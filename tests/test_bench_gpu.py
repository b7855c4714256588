"""The run on an accelerator: whole on a CPU, stopped and gone on with, with failures, and on the pretended GPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_selfspec.bench import training
from hf_selfspec.bench.gpu import checks, command, speed
from hf_selfspec.bench.gpu.command import main
from hf_selfspec.bench.gpu.record import LIMITS, Piece, Record
from hf_selfspec.bench.gpu.shapes import SHAPES
from hf_selfspec.bench.synthetic import Damping

TESTS = Path(__file__).parent
TINY = ("--device", "cpu", "--shapes", "tiny", "--check-shape", "tiny", "--dtype", "float32", "--repeats", "1")
HEADER = {"machine": "a GPU, torch 2", "package": "hf_selfspec 1"}


def run(out: Path, *further: str) -> int:
    return main([*TINY, "--rows", "1", "--tokens", "6", "--out", str(out), *further])


def written(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text())


@pytest.fixture(autouse=True)
def _short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_TRAINING_TOKENS", 16)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "gpu.json"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the pieces that ran, none of which does anything."""
    names: list[str] = []
    given = {"ways": {}, "errors": {}, "bytes": 1}

    def quick(of: Callable[[Any], list[Piece]]) -> Callable[[Any], list[Piece]]:
        def pieces(options: Any) -> list[Piece]:
            return [replaced(piece) for piece in of(options)]

        return pieces

    def replaced(piece: Piece) -> Piece:
        def work(_: Any) -> Any:
            names.append(f"{piece.group}: {piece.name}")
            found = {"bandwidth": {"bytes_per_second": 1e9}, "generate": given, "damping": {"factor": 0.1}}
            return found.get(piece.group, {})

        return Piece(piece.group, piece.name, piece.settings, work, piece.needs, piece.is_check, piece.unfit)

    monkeypatch.setattr(command, "check_pieces", quick(checks.check_pieces))
    monkeypatch.setattr(command, "speed_pieces", quick(speed.speed_pieces))
    return names


def models() -> set[int]:
    """The models that there are, other tests' among them."""
    gc.collect()
    return {id(found) for found in gc.get_objects() if type(found).__name__ == "LlamaForCausalLM"}


# The whole run -------------------------------------------------------------------------------------------------------


def test_whole_run_on_a_cpu(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "exit_damping", lambda *_: Damping(0.3, 0.8))
    before = models()
    assert main([*TINY, "--rows", "1", "2", "--tokens", "6", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    content = written(out)
    assert {piece["status"] for piece in content["pieces"].values()} == {"ok"}
    assert len(content["pieces"]) == 5 + 1 + 1 + 1 + 2 * 2 + 1
    for shown in (
        "| ids: early exit, tree | right",
        "| loss: training, callbacks at zero | right",
        "| waits: skip set, drawn | not run |",
        "left out: torch reports what waits only on CUDA",
        "GB/s",
        "| tiny, batch 2 | plain, static and compiled (not compiled here) |",
        "| tiny, batch 2 | ours |",
        "| tiny, batch 1 | draft step |",
        "| tiny, batch 1 | verification |",
        "| tiny | exits, R = 8 |",
    ):
        assert shown in printed
    rates = [piece["result"]["acceptance_rates"] for key, piece in content["pieces"].items() if key.startswith("ids")]
    assert any(rate and 0 < rate < 1 for pair in rates for rate in pair), "drafts must be right now and then"
    assert models() <= before, "models must be freed"


def test_command_line(out: Path) -> None:
    arguments = [*TINY, "--rows", "1", "--tokens", "6", "--out", str(out), "--seconds", "0"]
    called = [sys.executable, "-m", "hf_selfspec.bench", "gpu", *arguments]
    printed = subprocess.run(called, check=True, capture_output=True, text=True).stdout
    assert "left out: 0 s are left" in printed


def test_bytes_of_a_forward() -> None:
    """All weights but the embedding's, and the keys and values, of as many layers as run."""
    model = SHAPES["tiny"].model()
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel() + 64
    assert speed._bytes_read(model, 4, 2, 10) == 4 * (4 * layer + head + 4 * 2 * (2 * 10 * 2 * 16))
    assert speed._bytes_read(model, 1, 1, 0) == 4 * (layer + head)


def test_models_are_made_on_the_device_in_their_dtype() -> None:
    model = SHAPES["13b"].on("meta", torch.bfloat16).model()
    assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {("meta", torch.bfloat16)}
    assert 12.9e9 < model.num_parameters() < 13.1e9


# Stopped and gone on with --------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_behind_what_is_finished(
    out: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Record.begin

    def begin(record: Record, piece: Piece) -> bool:
        if len(begun) == 4:
            raise KeyboardInterrupt
        return original(record, piece)

    monkeypatch.setattr(Record, "begin", begin)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert len(written(out)["pieces"]) == 4
    monkeypatch.setattr(Record, "begin", original)
    assert run(out) == 0
    assert len(begun) == len(set(begun)) == len(written(out)["pieces"])
    assert run(out) == 0
    assert len(begun) == len(set(begun))


def test_a_piece_that_the_user_stops_is_run_again(out: Path, monkeypatch: pytest.MonkeyPatch, begun: list[str]) -> None:
    def stopped(options: Any) -> list[Piece]:
        def work(_: Any) -> Any:
            raise KeyboardInterrupt

        return [Piece("bandwidth", "a large copy", {}, work)]

    monkeypatch.setattr(command, "speed_pieces", stopped)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(out)
    assert not [key for key in written(out)["pieces"] if key.startswith("bandwidth")]


def test_a_piece_that_ends_the_process_is_given_up(out: Path) -> None:
    piece = Piece("bandwidth", "a large copy", {}, lambda _: {})
    for _ in range(2):
        assert Record.opened(out, HEADER).begin(piece)
    record = Record.opened(out, HEADER)
    assert not record.begin(piece)
    assert "ended 2 times" in record.pieces[piece.key]["error"]
    record.forget_failures()
    assert record.begin(piece)


def test_other_settings_are_other_pieces(out: Path, begun: list[str]) -> None:
    run(out)
    before = list(begun)
    begun.clear()
    run(out, "--tokens", "7")
    assert begun == [name for name in before if name.startswith(("generate", "forwards"))]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (json.dumps({"header": HEADER | {"machine": "another"}, "pieces": {}}), "of another machine or other versions"),
        (json.dumps({"header": HEADER | {"package": "hf_selfspec 0"}, "pieces": {}}), "Give another name, or move"),
        ("[]", "not a file of results"),
        ("{", "Move it away"),
    ],
)
def test_files_of_others(out: Path, content: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    out.write_text(content)
    assert run(out) == 2
    assert told in capsys.readouterr().err
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--tokens", "1"), "--tokens must be at least 2"),
        (("--rows", "0"), "--rows"),
        (("--device", "nowhere"), "--device nowhere"),
        (("--device", "cuda:77"), "--device cpu --shapes tiny"),
        (("--device", "cpu:3"), "CUDA_VISIBLE_DEVICES=3 and --device cpu"),
    ],
)
def test_wrong_options(out: Path, given: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(out, *given) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


# Failures and time ---------------------------------------------------------------------------------------------------


def _fails(message: str) -> Callable[..., Any]:
    def work(*_: Any) -> Any:
        raise torch.OutOfMemoryError(message)

    return work


def test_a_failing_piece_leaves_the_others(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "_damping", _fails("no room"))
    monkeypatch.setattr(speed, "_training", _fails("no | room"))
    assert run(out) == 0, "no check failed"
    printed = capsys.readouterr().out
    assert "| damping: tiny | failed: no room |" in printed
    assert "| training: tiny | failed: no / room |" in printed
    assert "| generate: tiny, batch 1 | left out: it needs the result of damping: tiny |" in printed
    failed = [piece for piece in written(out)["pieces"].values() if piece["status"] == "failed"]
    assert all("OutOfMemoryError" in piece["where"] for piece in failed)
    monkeypatch.undo()
    monkeypatch.setattr(speed, "exit_damping", lambda *_: Damping(0.3, 0.8))
    run(out)
    assert "failed: no room" in capsys.readouterr().out, "failures stay until they are to be tried again"
    assert run(out, "--retry") == 0
    assert "| no result | why |\n|---|---|\n| waits" in capsys.readouterr().out


def test_a_failing_way_leaves_the_others(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.setattr(command, "check_pieces", lambda _: [])
    monkeypatch.setitem(speed.WAYS, "wrong", speed.WAYS["plain"].__class__(lambda _: {"cache_implementation": "no"}))
    monkeypatch.setattr(speed, "exit_damping", lambda *_: Damping(0.3, 0.8))
    run(out)
    (found,) = (piece for key, piece in written(out)["pieces"].items() if key.startswith("generate"))
    assert list(found["result"]["ways"]) == ["plain", "plain, static and compiled", "ours", "ours, compiled"]
    assert "cache_implementation" in found["result"]["errors"]["wrong"]


def test_wrong_ids_fail_the_run(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = checks._written

    def wrong(model: PreTrainedModel, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        ids = original(model, batch, **options)
        if options:
            ids[-1, -5] = (ids[-1, -5] + 1) % 256
        return ids

    monkeypatch.setattr(checks, "_written", wrong)
    monkeypatch.setattr(command, "speed_pieces", lambda options: speed.speed_pieces(options)[:1])
    assert run(out) == 1
    printed = capsys.readouterr().out
    assert "| ids: lookup | FAILED |" in printed
    assert "ids are not plain generate's" in printed
    assert run(out) == 1, "a file with a failed check stays one"


def test_a_wrong_loss_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*given: Any) -> training.Trained:
        found = training.train(*given)
        return replace(found, loss=1.01 * found.loss) if given[2]() else found

    monkeypatch.setattr(checks, "train", train)
    with pytest.raises(checks.CheckError, match="the loss with callbacks at zero"):
        checks._loss(SHAPES["tiny"])


def test_what_no_longer_fits_is_listed(out: Path, begun: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(out, "--seconds", "0") == 0
    assert not begun
    assert capsys.readouterr().out.count("left out: 0 s are left") >= 6
    run(out)
    content = written(out)
    for key, piece in content["pieces"].items():
        piece["seconds"] = 50.0 if key.startswith("generate") else 1.0
    out.write_text(json.dumps(content))
    begun.clear()
    run(out, "--tokens", "7", "--seconds", "40")
    assert begun == ["forwards: tiny, batch 1"]
    assert "such a piece took 50 s" in next(iter(written(out)["left_out"].values())) + capsys.readouterr().out


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch, begun: list[str]) -> list[str]:
    """Names of what ran, after a check that never ends."""

    def work(_: Any) -> Any:
        begun.append("ids: endless")
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(command, "check_pieces", lambda _: [Piece("ids", "endless", {}, work, is_check=True)])
    return begun


def test_a_piece_is_cut_at_its_limit(
    out: Path, endless: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LIMITS, "ids", 0.05)
    assert run(out) == 0, "what is not finished has not failed"
    assert len(endless) > 4, "the others run"
    for _ in range(2):
        printed = capsys.readouterr().out
        assert "| ids: endless | not finished |" in printed
        assert "| ids: endless | cut: it is not done after 0 s, the limit of ids |" in printed
        run(out)
    run(out, "--retry")
    assert endless.count("ids: endless") == 2


def test_a_piece_is_cut_when_the_time_is_over(
    out: Path, endless: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (1, 2):
        assert run(out, "--seconds", "0.5") == 0
        assert endless == ["ids: endless"] * count, "another run starts it again"
        printed = capsys.readouterr().out
        assert "| ids: endless | left out: it was not done when the time was over" in printed
        assert "| bandwidth: a large copy | left out: 0 s are left" in printed


def test_training_uses_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class SeesTwo(TrainingArguments):
        @cached_property
        def _setup_devices(self) -> torch.device:
            device = super()._setup_devices
            self._n_gpu = 2
            return device

    monkeypatch.setattr(training, "TrainingArguments", SeesTwo)
    assert checks._loss(SHAPES["tiny"])["ours"] > 0


def test_a_broken_device_is_left_to_a_new_process(out: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        pass

    def replace(_: str, called: list[str]) -> None:
        raise Replaced(called)

    monkeypatch.setattr(command, "_is_usable", lambda _: len(begun) < 2)
    monkeypatch.setattr(os, "execv", replace)
    with pytest.raises(Replaced) as raised:
        run(out, "--retry", "--seconds", "100")
    called = raised.value.args[0]
    assert len(begun) == 2
    assert "--retry" not in called
    assert called[1:4] == ["-m", "hf_selfspec.bench", "gpu"]
    assert called[-2] == "--seconds"
    assert 50 < int(called[-1]) <= 100, "the seconds that are left"


def test_a_way_without_graphs_fails() -> None:
    with pytest.raises(checks.CheckError, match="0 graphs were compiled"):
        checks._graphs(SHAPES["tiny"], speed.WAYS["plain, static and compiled"])


def test_marked_tests_that_fail_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_TESTS", tmp_path / "tests")
    checks._TESTS.mkdir()
    marked = "import pytest\n@pytest.mark.cuda\ndef test_one():\n    assert {}\ndef test_other():\n    assert 0\n"
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["cuda: a GPU"]\n')
    file = checks._TESTS / "test_file.py"
    file.write_text(marked.format("2 == 3"))
    with pytest.raises(checks.CheckError, match="assert 2 == 3"):
        checks._marked_tests()
    file.write_text(marked.format(1))
    assert "1 passed" in checks._marked_tests()["told"][0]
    file.unlink()
    with pytest.raises(checks.CheckError, match="pytest returned 5"):
        checks._marked_tests()


# On the pretended GPU ------------------------------------------------------------------------------------------------


def test_run_on_the_pretended_gpu(out: Path) -> None:
    """All that is not CUDA's own runs on another device, where tensors of two devices do not mix."""
    script = str(TESTS / "bench_on_pretended_gpu.py")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, script, str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pieces = written(out)["pieces"]
    assert {key.partition(":")[0] for key in pieces} == {"ids", "bandwidth", "damping", "generate", "forwards"}
    assert {piece["status"] for piece in pieces.values()} == {"ok"}
    assert not next(piece for key, piece in pieces.items() if key.startswith("generate"))["result"]["errors"]
    assert len(written(out)["left_out"]) == 9 + 2 + 1 + 2, "CUDA's waits, graphs and tests, and two trainings"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == 0
    rounds = told["rounds"]
    assert not any(rounds[name] for name in ("early exit, stop rule", "skip set", "lookup"))
    assert "synchronizing operation: _local_scalar_dense" in rounds["early exit, tree"], (
        "drawn siblings are tried in turn"
    )
    assert "synchronizing operation: tolist" in rounds["waiting"]
    assert told["left in"] == "default"
    assert told["strict rounds"] > 10
