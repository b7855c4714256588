"""The results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .record import Piece, Record
from .ways import WAYS

_GENERATION = (
    "generation", "way", "ms/token", "spread", "tokens/s", "speed-up", "floor / time", "α", "M", "peak MiB", "first s",
)  # fmt: skip
_FORWARD = ("forward", "kind", "ms", "of plain's", "floor ms", "floor / time")
_TRAINING = ("training step", "callbacks", "s", "ratio", "peak MiB")


def report(record: Record, pieces: Sequence[Piece]) -> str:
    """Returns the results, failures and pieces that were left out, as Markdown."""
    bandwidth = next((result["bytes_per_second"] for _, result in _found(record, pieces, "bandwidth")), None)
    checks = [_check(record, piece) for piece in pieces if piece.is_check]
    runs = _found(record, pieces, "generate")
    forwards = _found(record, pieces, "forwards")
    trainings = _found(record, pieces, "training")
    parts = [
        ", ".join(record.header.values()),
        _table(("check", "result"), checks),
        f"Bandwidth of a large copy: {_number(bandwidth, 1e-9, '.1f')} GB/s.",
        _table(_GENERATION, [row for piece, result in runs for row in _generation(piece, result, bandwidth)]),
        _table(_FORWARD, [row for piece, result in forwards for row in _forward(piece, result, bandwidth)]),
        _table(_TRAINING, [row for piece, result in trainings for row in _training(piece, result)]),
        _table(("no result", "why"), [*_failures(record, pieces), *_left_out(record, pieces)]),
    ]
    return "\n\n".join(part for part in parts if part)


def _found(record: Record, pieces: Sequence[Piece], group: str) -> Iterator[tuple[Piece, dict[str, Any]]]:
    for piece in pieces:
        result = record.result(piece)
        if piece.group == group and result is not None:
            yield piece, result


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value * unit, form)


def _check(record: Record, piece: Piece) -> tuple[str, str]:
    status = {"ok": "right", "failed": "FAILED", "cut": "not finished"}.get(record.status(piece), "not run")
    near_ties = (record.result(piece) or {}).get("near_ties")
    return f"{piece.group}: {piece.name}", f"{status}, but for {len(near_ties)} near ties" if near_ties else status


def _generation(piece: Piece, result: dict[str, Any], bandwidth: float | None) -> Iterator[tuple[str, ...]]:
    ways = result["ways"]
    plain = ways.get("plain", {}).get("ms")
    floor = None if bandwidth is None else 1e3 * result["bytes"] / bandwidth
    for name, way in ways.items():
        yield (
            piece.name,
            f"{name}{_graphs(name, way)}",
            f"{way['ms']:.3f}",
            f"±{way['spread']:.0%}",
            f"{piece.settings['rows'] * 1e3 / way['ms']:.1f}",
            _number(plain, 1 / way["ms"], ".2f"),
            _number(floor, 1 / way["ms"], ".2f"),
            _number(way.get("alpha"), 1, ".2f"),
            _number(way.get("m"), 1, ".2f"),
            _number(way["peak_mib"], 1, ".0f"),
            f"{way['first_seconds']:.1f}",
        )


def _graphs(name: str, way: dict[str, Any]) -> str:
    """A note on missing or skipped graphs of a compiled way."""
    if not WAYS[name].is_compiled:
        return ""
    if not way["graphs"]:
        return " (not compiled here)"
    return f" (CUDA graphs skipped {way['skips']} times)" if way["skips"] else ""


def _forward(piece: Piece, result: dict[str, Any], bandwidth: float | None) -> Iterator[tuple[str, ...]]:
    for name, timed in result.items():
        floor = None if bandwidth is None else 1e3 * timed["bytes"] / bandwidth
        yield (
            piece.name,
            name,
            f"{timed['ms']:.3f}",
            f"{timed['ms'] / result['plain step']['ms']:.2f}",
            _number(floor, 1, ".3f"),
            _number(floor, 1 / timed["ms"], ".2f"),
        )


def _training(piece: Piece, result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, timed in result.items():
        ratio = timed["seconds"] / result["plain"]["seconds"]
        yield piece.name, name, f"{timed['seconds']:.3f}", f"{ratio:.2f}", _number(timed["peak_mib"], 1, ".0f")


def _failures(record: Record, pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    for piece in pieces:
        if (status := record.status(piece)) in ("failed", "cut"):
            yield f"{piece.group}: {piece.name}", f"{status}: {record.pieces[piece.key]['error']}"
        for way, error in (record.result(piece) or {}).get("errors", {}).items():
            yield f"{piece.group}: {piece.name}, {way}", f"failed: {error}"


def _left_out(record: Record, pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    for piece in pieces:
        if piece.key in record.left_out:
            yield f"{piece.group}: {piece.name}", f"left out: {record.left_out[piece.key]}"
