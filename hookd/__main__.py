"""Run the command line as `python -m hookd`, for environments without the console script on the path."""

import sys

from hookd.tool.cli import main

sys.exit(main())
