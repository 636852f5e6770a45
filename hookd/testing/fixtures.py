"""Pytest fixtures, found by the entry point `pytest11`. Importing this module does not load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.testing.daemon import FakeDaemon
    from hookd.testing.process import SubprocessTarget
    from hookd.testing.target import FakeTarget


@pytest.fixture
def fake_target() -> Iterator[FakeTarget]:
    """Yield a target in this process, not started yet; fail the test if a hook has raised."""
    from hookd.testing.target import FakeTarget

    with FakeTarget() as target:
        yield target
        target.stop_clean()


@pytest.fixture
def fake_daemon() -> Iterator[FakeDaemon]:
    """Yield a daemon in this process, not started yet; fail the test if a hook of its plugins has raised."""
    from hookd.testing.daemon import FakeDaemon

    with FakeDaemon() as daemon:
        yield daemon
        daemon.stop_clean()


@pytest.fixture
def subprocess_target() -> Iterator[Callable[..., SubprocessTarget]]:
    """Yield a function that starts a training in its own process and attaches hookd to it; both end with the test."""
    import contextlib

    from hookd.testing.process import SubprocessTarget

    with contextlib.ExitStack() as stack:
        yield lambda *words, **how: stack.enter_context(SubprocessTarget(*words, **how))
