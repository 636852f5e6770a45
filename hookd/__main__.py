"""`python -m hookd`, for where no console script is on the path."""

import sys

from hookd.tool.cli import main

sys.exit(main())
