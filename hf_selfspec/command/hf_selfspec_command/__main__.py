"""``python -m hf_selfspec_command``."""

import sys

from . import main

sys.exit(main())
