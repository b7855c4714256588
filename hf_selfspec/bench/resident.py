"""Measures the peak resident memory of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
# The unit of ``ru_maxrss`` in bytes: a kibibyte, and a byte on macOS.
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_resident_bytes() -> int:
    """Returns the peak resident memory of this process in bytes.

    On Linux, ``ru_maxrss`` starts with the size of the parent process, so the kernel's status file is read if there is
    one.
    """
    found = _PEAK.search(_STATUS.read_text(encoding="ascii")) if _STATUS.exists() else None
    if found is not None:
        return 1024 * int(found[1])
    import resource  # not all systems have it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
