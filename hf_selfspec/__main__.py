"""``python -m hf_selfspec``, the command line."""

import sys

from .cli import main

sys.exit(main())
