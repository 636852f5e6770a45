"""The daemon's messages to the service manager, on a real socket like systemd's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from hookd.tool.daemon import notify


@pytest.fixture(params=["file", "abstract"])
def manager(request, tmp_path):
    """Listen as a service manager; yield the socket, and the environment with which it starts its services."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@hookd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if request.param == "abstract" else name)
        listener.settimeout(10)
        yield listener, {"NOTIFY_SOCKET": name}


def drain(listener):
    """Read what has arrived already."""
    listener.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while listener.recv(100):
            pass


def test_a_manager_hears_when_it_serves_and_when_it_stops(manager):
    listener, environ = manager

    async def serve():
        async with notify.serving(environ):
            assert await asyncio.to_thread(listener.recv, 100) == b"READY=1"
        assert listener.recv(100) == b"STOPPING=1"

    asyncio.run(serve())


def test_a_watchdog_hears_of_a_loop_that_turns_and_of_none_that_hangs(manager):
    listener, environ = manager

    async def serve():
        async with notify.serving({**environ, "WATCHDOG_USEC": "20000"}):
            reported = [await asyncio.to_thread(listener.recv, 100) for _ in range(4)]
            assert reported == [b"READY=1", *[b"WATCHDOG=1"] * 3]
            drain(listener)
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError):  # this loop does not run while it waits here
                listener.recv(100)

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("environ", "limit_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_asked_for_by_the_environment(environ, limit_s):
    assert notify.watchdog_s(environ) == limit_s


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "relative", "vsock:2:1"])
def test_where_nobody_listens_nothing_is_reported_and_nothing_fails(address):
    assert not notify.send("READY=1", {"NOTIFY_SOCKET": address} if address else {})
