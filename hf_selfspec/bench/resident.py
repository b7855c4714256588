"""Peak resident memory of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
# Bytes of a unit of ``ru_maxrss``: kibibytes, and bytes on macOS.
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_resident_bytes() -> int:
    """Bytes that this process held at most.

    On Linux ``ru_maxrss`` of a program that another process has started begins with that process's own size, so the
    kernel's status is read where there is one.
    """
    found = _PEAK.search(_STATUS.read_text(encoding="ascii")) if _STATUS.exists() else None
    if found is not None:
        return 1024 * int(found[1])
    import resource  # which not all systems have

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
