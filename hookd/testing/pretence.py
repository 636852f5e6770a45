"""What a machine of tests lacks, in the part of what it has: a device, outputs of any size, other ranks."""

from __future__ import annotations

import contextlib
from unittest import mock


def pretending(*, device: bool, large: bool, ranks: tuple[int, int] | None) -> contextlib.ExitStack:
    """Put it in place; it is taken back when the stack that this gives is closed. See `FakeTarget.pretend`."""
    from hookd.agent import identity, lifecycle, numeric, portions

    with contextlib.ExitStack() as stack:
        if device:
            stack.enter_context(mock.patch.object(numeric, "on_host", lambda _tensor: False))
        if large:
            stack.enter_context(mock.patch.object(portions, "KEPT", 0))
        if ranks is not None:
            for module in (identity, lifecycle):  # which imports it by name
                stack.enter_context(mock.patch.object(module, "ranks", lambda: ranks))
        return stack.pop_all()
