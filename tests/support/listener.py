"""Another program that listens on a port of its own."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from tests.support.environment import target_environment
from tests.support.processes import Process

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, int]]:
    """Start the program; yield its pid and its port."""
    with Process([sys.executable, "-c", PROGRAM], env=target_environment(), stdin=True) as process:
        yield process.pid, int(process.expect(r"^(\d+)$")[1])
