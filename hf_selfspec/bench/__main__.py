"""``python -m hf_selfspec.bench FIGURE``: the same as ``hf-selfspec measure FIGURE``."""

from __future__ import annotations

import sys

from ..errors import SelfSpecError
from .figures import PROGRAM, main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SelfSpecError as error:
        sys.exit(f"{PROGRAM}: {error}")
