"""Whether each pytest-xdist worker may have a PID namespace of its own."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

WORKER = Path(__file__).with_name("worker-python")


@functools.cache
def unshare_options() -> str | None:
    """Return the options of unshare(1) that it takes beside those in `worker-python`.

    Returns:
        None where neither root nor a user namespace may make a PID namespace with a /proc of its own.
    """
    options = "" if os.geteuid() == 0 else "--user --map-current-user"
    environment = {**os.environ, "WORKER_PYTHON": "true", "WORKER_UNSHARE": options}
    try:
        done = subprocess.run([WORKER], env=environment, stderr=subprocess.DEVNULL, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return options if done.returncode == 0 else None
