"""``python -m hf_selfspec``, the command line."""

import sys

from hf_selfspec_command import main

sys.exit(main())
