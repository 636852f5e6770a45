"""What hookd's own threads do, none of which may be under way when the interpreter ends. Runs in the target.

A thread that comes back from C++ code of torch while the interpreter ends is ended by CPython with `pthread_exit`, which
unwinds the stack through functions that allow no exception: `terminate called without an active exception`, SIGABRT, and a
training that was over has failed. Source: CPython Python/ceval_gil.c `take_gil`, 3.10 to 3.13 (3.14 lets such a thread hang).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Work:
    """Counts the pieces of work that are under way in hookd's own threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._under_way = 0
        self._is_over = False

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Do one piece of work; once the process ends, wait for that end instead."""
        with self._changed:
            while self._is_over:
                self._changed.wait()  # in code of CPython's own, which may be unwound
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def go_on(self) -> None:
        """Begin pieces again, after an `end`."""
        with self._changed:
            self._is_over = False
            self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """Begin no piece any more, and wait until those under way are over, or for so long."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._under_way, timeout_s)
