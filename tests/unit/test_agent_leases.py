"""For how long an agent stays: its control socket, served in this process, and clients that hold it and leave."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket

import pytest

from hookd.errors import PluginError
from hookd.target.boot.work import Work
from hookd.target.remote.control import Control
from tests.support.processes import wait_until


class Served:
    """A control socket that is served by a clock that stands still until the test moves it.

    Attributes:
        ends: an entry for each tick at which the agent's time was over.
    """

    def __init__(self, handle, lease_s):
        self.ends = []
        self._now_s, self._ticks = 1e6, []
        expire = lambda: self.ends.append(None)  # noqa: E731
        clock = lambda: self._now_s  # noqa: E731
        self.control = Control(
            handle, self._ticks.append, lease_s, expire, Work(), closed_by_program=expire, clock=clock
        )

    def advance(self, seconds):
        """Move the clock by more than a tick, and wait until the leases have been checked."""
        ticks = len(self._ticks)
        self._now_s += seconds
        wait_until(lambda: len(self._ticks) > ticks, what="a tick")
        with contextlib.closing(Client(self.control)) as client:
            client.ask("status")  # answered when the thread has come round


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(lease_s, handle=lambda _: {}):
            served = Served(handle, lease_s)
            stack.callback(served.control.end)
            served.control.start()
            return served

        yield start


class Client:
    def __init__(self, control):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect("\0" + control.path[1:] if control.path.startswith("@") else control.path)
        self._file = self._socket.makefile("rb")

    def ask(self, op, **arguments):
        self._socket.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
        return json.loads(self._file.readline())

    def close(self):
        self._file.close()
        self._socket.close()


def test_of_two_leases_that_are_gone_the_longer_counts_whoever_left_last(serve):
    served = serve(0.1)
    control = served.control
    long, short = Client(control), Client(control)
    assert long.ask("lease", seconds=3)["leases"] == 1
    assert short.ask("lease", seconds=0.1)["leases"] == 2
    assert control.holders == [os.getpid()] * 2
    long.close()
    wait_until(lambda: control.leases == 1)
    short.close()
    wait_until(lambda: control.leases == 0)
    served.advance(2.9)
    assert not served.ends
    served.advance(1.1)
    assert served.ends


def test_nobody_leaves_while_one_lease_is_there(serve):
    served = serve(0.1)
    control = served.control
    holder, other = Client(control), Client(control)
    holder.ask("lease", seconds=0)
    other.ask("lease", seconds=0)
    other.close()
    wait_until(lambda: control.leases == 1)
    served.advance(1000)
    served.advance(1000)
    assert not served.ends
    holder.close()
    wait_until(lambda: control.leases == 0)
    served.advance(1.1)
    assert served.ends


def test_one_that_is_kept_stays_without_a_lease_until_it_is_orphaned(serve):
    served = serve(0.1)
    control = served.control
    control.keep()
    holder = Client(control)
    holder.ask("lease", seconds=0.1)
    holder.close()
    wait_until(lambda: control.leases == 0)
    served.advance(1000)
    served.advance(1000)
    assert not served.ends
    control.stay(0.1)
    served.advance(1.1)
    assert served.ends


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan, "long", None])
def test_a_lease_that_is_none_is_refused(serve, seconds):
    control = serve(60).control
    client = Client(control)
    assert client.ask("lease", seconds=seconds)["reason"] in ("bad-request", "internal")
    assert control.leases == 0
    client.close()


def test_a_refusal_tells_what_kind_it_is(serve):
    def refuse(_request):
        raise PluginError("not like this", reason="some-reason", hint="like that")

    control = serve(60, refuse).control
    client = Client(control)
    answer = {
        "ok": False,
        "kind": "PluginError",
        "reason": "some-reason",
        "error": "not like this",
        "hint": "like that",
    }
    assert client.ask("load") == answer
    client.close()


def test_a_client_that_asks_and_does_not_read_keeps_nobody_waiting(serve):
    control = serve(None).control
    with socket.socket(socket.AF_UNIX) as flood:
        flood.connect("\0" + control.path[1:] if control.path.startswith("@") else control.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            flood.sendall(b"\n" * (1 << 17))
        with contextlib.closing(Client(control)) as client:
            assert client.ask("status")["ok"]


def test_requests_that_come_together_are_answered_one_by_one(serve):
    control = serve(None, lambda request: {"n": request["n"]}).control
    with contextlib.closing(Client(control)) as client:
        client._socket.sendall(b"".join(json.dumps({"op": "x", "n": n}).encode() + b"\n" for n in range(100)))
        assert [json.loads(client._file.readline())["n"] for _ in range(100)] == list(range(100))


def test_descriptors_of_a_client_that_leaves_are_closed(serve):
    control = serve(None).control
    reading, writing = os.pipe()
    client = Client(control)
    socket.send_fds(client._socket, [b"{"], [writing])  # half a request: nobody takes the descriptor
    os.close(writing)
    client.close()
    with open(reading, "rb") as pipe:
        wait_until(lambda: select.select([pipe], [], [], 0)[0], what="the end of the pipe")
        assert pipe.read() == b""
