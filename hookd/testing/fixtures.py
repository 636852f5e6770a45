"""The fixtures, which pytest finds by the entry point `pytest11`. Loading them loads no torch."""

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
    """Give a target in this process, not started yet; after the test no hook may have raised anything."""
    from hookd.testing.target import FakeTarget

    with FakeTarget() as target:
        yield target
        target.stop_clean()


@pytest.fixture
def fake_daemon() -> Iterator[FakeDaemon]:
    """Give a daemon in this process, not started yet; after the test no hook of its plugins may have raised anything."""
    from hookd.testing.daemon import FakeDaemon

    with FakeDaemon() as daemon:
        yield daemon
        daemon.stop_clean()


@pytest.fixture
def subprocess_target() -> Iterator[Callable[..., SubprocessTarget]]:
    """Give what starts targets in processes of their own, with hookd attached by its real way; they end with the test."""
    import contextlib

    from hookd.testing.process import SubprocessTarget

    with contextlib.ExitStack() as stack:
        yield lambda *words, **how: stack.enter_context(SubprocessTarget(*words, **how))
