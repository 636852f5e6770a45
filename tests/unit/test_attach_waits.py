"""Processes that only wait for others, as far as that can be seen from outside."""

from __future__ import annotations

import platform

import pytest

from hookd.tool.attach import discover

# The number of a system call and its six arguments, as /proc/PID/syscall has them (Documentation/filesystems/proc.rst).
FOREVER = {
    "wait4(-1, 0, 0, 0)": "61 0xffffffffffffffff 0x0 0x0 0x0 0x0 0x0",
    "poll(fds, 1, -1)": "7 0x7ffd5a0 0x1 0xffffffff 0x0 0x0 0x0",
    "epoll_wait(3, events, 64, -1)": "232 0x3 0x7ffd5a0 0x40 0xffffffff 0x0 0x0",
    "pselect6(4, fds, 0, 0, NULL, NULL)": "270 0x4 0x7ffd5a0 0x0 0x0 0x0 0x0",
}
OTHERWISE = {
    "poll(fds, 1, 1000)": "7 0xffffffff 0xffffffff 0x3e8 0x0 0x0 0x0",
    "epoll_wait(3, events, 64, 1000)": "232 0x3 0xffffffff 0xffffffff 0x3e8 0x0 0x0",
    "pselect6(4, fds, 0, 0, time, NULL)": "270 0x0 0x0 0x0 0x0 0x7ffd5a0 0x0",
    "read(0, buffer, 1)": "0 0x0 0x7ffd5a0 0x1 0x0 0x0 0x0",
    "running": "running",
}


@pytest.fixture(autouse=True)
def x86_64(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize("call", FOREVER)
def test_a_call_without_a_timeout_may_wait_for_ever(call):
    assert discover._waits_for_ever(f"{FOREVER[call]} 0x7ffd5a0 0x7f0012".encode().split())


@pytest.mark.parametrize("call", OTHERWISE)
def test_any_other_call_does_not(call):
    assert not discover._waits_for_ever(f"{OTHERWISE[call]} 0x7ffd5a0 0x7f0012".encode().split())
