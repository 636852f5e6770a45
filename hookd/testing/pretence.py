"""Simulate what a test machine may lack: a device, large outputs, other ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def pretending(*, device: bool, large: bool, ranks: tuple[int, int] | None) -> contextlib.ExitStack:
    """Start the simulation of `FakeTarget.pretend`; closing the returned stack ends it."""
    from hookd.target.boot import identity, lifecycle
    from hookd.target.events import batching
    from hookd.target.tensors import statistics

    with contextlib.ExitStack() as stack:
        if device:
            stack.enter_context(_replaced(statistics, "on_host", lambda _tensor: False))
        if device or large:
            stack.enter_context(_replaced(statistics, "LOOKS_IN_C", False))
        if large:
            stack.enter_context(_replaced(batching, "KEPT", 0))
        if ranks is not None:
            for module in (identity, lifecycle):  # lifecycle imports it by name
                stack.enter_context(_replaced(module, "ranks", lambda: ranks))
        return stack.pop_all()


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    was = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, was)
