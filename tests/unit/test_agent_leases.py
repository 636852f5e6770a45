"""For how long an agent stays: its control socket, served in this process, and clients that hold it and leave."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time

import pytest

from hookd.agent.control import Control
from hookd.agent.work import Work
from hookd.errors import PluginError
from tests.support.processes import wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def serve():
    """Serve a socket; give the control and the moments at which its time was over."""
    with contextlib.ExitStack() as held:

        def start(lease_s, handle=lambda _: {}):
            ends = []
            control = Control(handle, lambda _: None, lease_s, lambda: ends.append(time.monotonic()), Work())
            held.callback(control.end)
            control.start()
            return control, ends

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
    control, ends = serve(0.1)
    long, short = Client(control), Client(control)
    assert long.ask("lease", seconds=3)["leases"] == 1
    assert short.ask("lease", seconds=0.1)["leases"] == 2
    assert control.holders == [os.getpid()] * 2
    left = time.monotonic()
    long.close()
    wait_until(lambda: control.leases == 1)
    short.close()
    wait_until(lambda: ends, what="the end")
    assert ends[0] - left >= 3


def test_nobody_leaves_while_one_lease_is_there(serve):
    control, ends = serve(0.1)
    holder, other = Client(control), Client(control)
    holder.ask("lease", seconds=0)
    other.ask("lease", seconds=0)
    other.close()
    wait_until(lambda: control.leases == 1)
    wait_until(lambda age=control.age_s: control.age_s > age + 2.5, what="two ticks")
    assert not ends
    holder.close()
    wait_until(lambda: ends, what="the end")


def test_one_that_is_kept_stays_without_a_lease_until_it_is_orphaned(serve):
    control, ends = serve(0.1)
    control.keep()
    holder = Client(control)
    holder.ask("lease", seconds=0.1)
    holder.close()
    wait_until(lambda age=control.age_s: control.age_s > age + 2.5, what="two ticks")
    assert not ends
    control.stay(0.1)
    wait_until(lambda: ends, what="the end")


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan, "long", None])
def test_a_lease_that_is_none_is_refused(serve, seconds):
    control, _ = serve(60)
    client = Client(control)
    assert client.ask("lease", seconds=seconds)["reason"] in ("bad-request", "internal")
    assert control.leases == 0
    client.close()


def test_a_refusal_tells_what_kind_it_is(serve):
    def refuse(_request):
        raise PluginError("not like this", reason="some-reason", hint="like that")

    control, _ = serve(60, refuse)
    client = Client(control)
    told = {"ok": False, "kind": "PluginError", "reason": "some-reason", "error": "not like this", "hint": "like that"}
    assert client.ask("load") == told
    client.close()


def test_a_client_that_asks_and_does_not_read_keeps_nobody_waiting(serve):
    control, _ = serve(None)
    with socket.socket(socket.AF_UNIX) as flood:
        flood.connect("\0" + control.path[1:] if control.path.startswith("@") else control.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            flood.sendall(b"\n" * (1 << 17))
        asked = time.monotonic()
        with contextlib.closing(Client(control)) as client:
            assert client.ask("status")["ok"]
        assert time.monotonic() - asked < 10


def test_requests_that_come_together_are_answered_one_by_one(serve):
    control, _ = serve(None, lambda request: {"n": request["n"]})
    with contextlib.closing(Client(control)) as client:
        client._socket.sendall(b"".join(json.dumps({"op": "x", "n": n}).encode() + b"\n" for n in range(100)))
        assert [json.loads(client._file.readline())["n"] for _ in range(100)] == list(range(100))


def test_descriptors_of_a_client_that_leaves_are_closed(serve):
    control, _ = serve(None)
    reading, writing = os.pipe()
    client = Client(control)
    socket.send_fds(client._socket, [b"{"], [writing])  # half a request: nobody takes the descriptor
    os.close(writing)
    client.close()
    with open(reading, "rb") as pipe:
        wait_until(lambda: select.select([pipe], [], [], 0)[0], what="the end of the pipe")
        assert pipe.read() == b""
