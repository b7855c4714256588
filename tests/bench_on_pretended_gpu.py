"""The run on an accelerator, on the pretended GPU; a process of its own.

Prints what torch would raise in rounds as they are, and in rounds that wait once more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretend_gpu import DEVICE, Counts, pretended

from hf_selfspec.bench.gpu import checks, command, speed
from hf_selfspec.bench.gpu.shapes import SHAPES
from hf_selfspec.bench.synthetic import Damping
from hf_selfspec.decoding import Decoder

_OPTIONS = "--shapes tiny --check-shape tiny --dtype float32 --repeats 1 --rows 2 --tokens 6"
_modes = ["default"]


def _read(counts: Counts, name: str) -> None:
    """What torch does in a mode where waits are errors."""
    if _modes[-1] == "error":
        raise RuntimeError(f"called a synchronizing operation: {name}")


def _waiting_commit(decoder: Decoder, *given: Any) -> None:
    decoder.text.ids.tolist()
    _commit(decoder, *given)


_commit = Decoder._commit


def _raised(drafts: str) -> str | None:
    try:
        for do_sample in (False, True):
            checks._waits(SHAPES["tiny"].on(str(DEVICE), torch.float32), drafts, do_sample)
    except RuntimeError as error:
        return str(error)
    return None


def main(out: Path) -> None:
    modes = {"get_sync_debug_mode": lambda: _modes[-1], "set_sync_debug_mode": _modes.append}
    with (
        patch.object(speed, "exit_damping", lambda *_: Damping(0.3, 0.8)),
        patch.multiple(torch.cuda, **modes),
        pretended(),
    ):
        status = command.main([*_OPTIONS.split(), "--device", str(DEVICE), "--out", str(out)])
        with patch.object(Counts, "read", _read):
            names = ("early exit, stop rule", "skip set", "lookup", "early exit, tree")
            rounds = {name: _raised(name) for name in names}
            with patch.object(Decoder, "_commit", _waiting_commit):
                rounds["waiting"] = _raised("skip set")
    found = {"rounds": rounds, "left in": _modes[-1], "status": status}
    print(json.dumps(found | {"strict rounds": _modes.count("error")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
