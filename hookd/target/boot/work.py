"""The work of hookd's own threads.

It must not be in progress when the interpreter ends. If a thread returns from torch's C++ code while the interpreter ends,
CPython ends it with `pthread_exit`. That unwinds the stack through functions that do not allow exceptions: `terminate
called without an active exception`, SIGABRT, and a completed training counts as failed. Source: CPython Python/ceval_gil.c
`take_gil`, 3.10 to 3.13 (3.14 lets such a thread hang).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hookd.wire.originals import Event, Lock

if TYPE_CHECKING:
    from collections.abc import Iterator


class Work:
    """Counts the pieces of work in progress in hookd's own threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._under_way = 0
        self._may_begin, self._is_idle = Event(), Event()
        self._may_begin.set()

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Enclose one piece of work; once the process ends, wait for its end instead."""
        while not self._begins():
            self._may_begin.wait()  # CPython's own code, which may be unwound
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._is_idle.set()

    def _begins(self) -> bool:
        with self._lock:
            if self._may_begin.is_set():
                self._under_way += 1
                self._is_idle.clear()
                return True
            return False

    def go_on(self) -> None:
        """Allow pieces of work again, after an `end`."""
        self._may_begin.set()

    def end(self, timeout_s: float) -> None:
        """Allow no further work, and wait up to `timeout_s` until none is in progress."""
        with self._lock:
            self._may_begin.clear()
            is_idle = not self._under_way
        if not is_idle:
            self._is_idle.wait(timeout_s)
