"""`python -m mla_rt`: the same as the command `mla-rt`."""

import sys

from .cli import main

sys.exit(main())
