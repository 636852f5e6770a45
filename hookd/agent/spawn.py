"""Start hookd's own threads in somebody else's process. Runs in the target."""

from __future__ import annotations

import threading


def start(thread: threading.Thread) -> None:
    """Start a thread with the usual stack: what the program has chosen for its own threads may be too little for us."""
    before = threading.stack_size(0)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
