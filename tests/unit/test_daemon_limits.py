"""The time, connections and bytes that one scraper, or many, may take of the port."""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import threading

import pytest
from aiohttp import web

from hookd.tool.config import Address
from hookd.tool.daemon.web import tcp
from hookd.tool.daemon.web.access import Access
from tests.support import served
from tests.support.processes import wait_until

HOURS = {"handshake_s": 3600, "header_s": 3600, "idle_s": 3600, "sending_s": 3600}
"""Each of these timeouts is longer than a test may take."""
USUAL = tcp.Limits(**{**HOURS, "connections": 8, "idle_s": 0.4})
ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"


async def hello(_):
    return web.Response(text="hello\n")


async def large(_):
    return web.Response(body=b"x" * (32 << 20))


async def waits(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"begun")
    await asyncio.Event().wait()


async def fails(_):
    raise RuntimeError("the inside of the daemon")


@pytest.fixture
def serve(stack):
    def start(path=None, limits=USUAL, **more):
        app = web.Application()
        for name, handler in (("", hello), ("large", large), ("waits", waits), ("fails", fails), *more.items()):
            app.router.add_get(f"/{name}", handler)
        return stack.enter_context(served.in_thread(lambda: tcp.serving(app, Address("127.0.0.1", 0), path, limits)))

    return start


def require_end(connection):
    """Read until the other side has closed; return the bytes."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 20):
            received += data
    return bytes(received)


@pytest.mark.parametrize(
    "beginning", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"\x16\x03\x01\x02\x00\x01"]
)
def test_who_never_ends_a_request_is_cut_off(serve, beginning):
    with served.connected(serve(limits=tcp.Limits(**{**HOURS, "header_s": 0.4}))) as connection:
        connection.sendall(beginning)
        require_end(connection)


def test_a_byte_now_and_then_gives_no_more_time(serve):
    with served.connected(serve(limits=tcp.Limits(**{**HOURS, "header_s": 0.4}))) as connection:
        connection.sendall(ASK[:-2] + b"A: ")
        with contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], 0.02)[0]:
                connection.sendall(b"b")
        assert require_end(connection) == b"", "cut off, not refused for its size"


def test_a_handshake_that_never_ends_is_cut_off_and_counted(serve, tmp_path):
    config = served.web_config(served.certificates(tmp_path), TLS)
    with served.connected(serve(config, tcp.Limits(**{**HOURS, "handshake_s": 0.4}))) as stuck:
        require_end(stuck)
    url = serve(config, tcp.Limits(**{**HOURS, "connections": 8}))
    with contextlib.ExitStack() as stack:
        stuck = [stack.enter_context(served.connected(url)) for _ in range(16)]
        assert served.get(url, context=served.client_context(tmp_path))[0] == 200
        require_end(stuck[0])


def test_an_idle_connection_is_kept_for_a_while(serve):
    url = serve(limits=tcp.Limits(**{**HOURS, "header_s": 0.2}))
    with served.connected(url) as connection:
        for _ in range(2):
            connection.sendall(ASK)
            assert b"hello" in connection.recv(4096)
            with served.connected(url) as other:
                require_end(other)  # for longer than a request may take to come
    with served.connected(serve(limits=tcp.Limits(**{**HOURS, "idle_s": 0.2}))) as connection:
        connection.sendall(ASK)
        assert b"hello" in require_end(connection)


def test_who_reads_nothing_is_cut_off(serve):
    is_cut_off = threading.Event()

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * (1 << 20))
        finally:
            is_cut_off.set()

    with served.connected(serve(limits=tcp.Limits(**{**HOURS, "sending_s": 0.4}), endless=endless)) as connection:
        connection.sendall(ASK.replace(b"/", b"/endless", 1))
        wait_until(is_cut_off.is_set, what="the end of the answer")
        require_end(connection)


class Taken(asyncio.Transport):
    is_cut_off = False

    def abort(self):
        self.is_cut_off = True


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_reader_that_reads_on_in_time_is_not_cut_off_later(reads_on):
    async def is_cut_off():
        transport = Taken()
        connection = tcp.Connection(asyncio.Protocol(), tcp.Port(Access(None), tcp.Limits(sending_s=0.0)))
        connection.connection_made(transport)
        connection.pause_writing()
        if reads_on:
            connection.resume_writing()
        for _ in range(3):  # the timer of no time at all would run in these
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return transport.is_cut_off

    assert asyncio.run(is_cut_off()) is not reads_on


def test_connections_that_ask_nothing_give_way_to_one_that_does(serve):
    url = serve(limits=tcp.Limits(**{**HOURS, "connections": 8}))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(served.connected(url)) for _ in range(50)]
        assert served.get(url)[0] == 200
        require_end(idle[0])  # the oldest ends, long before its time
        idle[-1].sendall(ASK)
        assert b"hello" in idle[-1].recv(4096)


def test_where_all_connections_are_busy_the_next_is_asked_to_come_again(serve):
    url = serve(limits=tcp.Limits(connections=4))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            busy = stack.enter_context(served.connected(url))
            busy.sendall(ASK.replace(b"/", b"/waits", 1))
            assert busy.recv(1)
        status, answer = served.get(url)
        assert (status, b"Retry-After: 1" in answer) == (503, True)
    wait_until(lambda: served.get(url)[0] == 200, what="room again")


def test_readers_that_do_not_read_give_way_to_one_that_asks(serve):
    url = serve(limits=tcp.Limits(**{**HOURS, "connections": 4}))
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            reader = stack.enter_context(served.connected(url))
            reader.sendall(ASK.replace(b"/", b"/large", 1))
            assert reader.recv(1)
            wait_until(lambda: served.get(url)[0] == 200, what="an answer")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_only_reading_methods_are_answered(serve, method):
    url = serve()
    for path in ("/", "/none"):
        answer = served.exchange(url, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.split(b" ")[1] in (b"405", b"400"), answer
    assert served.get(url)[0] == 200


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {b"400"}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 9000 + b"\r\n\r\n", {b"400"}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5000 + b"\r\n", {b"400"}),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(5000)) + b"\r\n",
            {b"400"},
        ),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999\r\n\r\nx", {b"413"}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\nx", {b"413"}),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
            {b"413"},
        ),
    ],
    ids=["line", "field", "fields", "names", "length", "chunked", "gzip"],
)
def test_what_is_too_large_is_refused_and_the_connection_ends(serve, sent, statuses):
    url = serve()
    answer = served.exchange(url, sent)
    assert answer.split(b" ", 2)[1] in statuses, answer[:200]
    assert served.get(url)[0] == 200


SMUGGLED = b"GET /fails HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(SMUGGLED)),
        b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED),
        b"Content-Length: +0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\n\r\nhello",
        b"A: b\nContent-Length: 0\n\n",
        b" folded: x\r\n\r\n",
    ],
)
def test_nothing_that_comes_behind_a_body_is_taken_for_a_request(serve, head, caplog):
    answer = served.exchange(serve(), b"GET / HTTP/1.1\r\nHost: localhost\r\n" + head + SMUGGLED)
    assert len(re.findall(rb"HTTP/1\.[01] \d{3} ", answer)) == 1, answer
    assert answer.split(b" ", 2)[1] in (b"400", b"413")
    assert not caplog.text


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/%00",
        "/%",
        "http://other/",
        "*",
        "/\u00fc",
        "/;/..",
        "/%0d%0aA: b",
    ],
)
def test_a_path_leads_nowhere_else(serve, path):
    answer = served.exchange(serve(), f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    status = answer.split(b" ", 2)[1]
    assert status in (b"400", b"404", b"421") or (status == b"200" and b"hello" in answer)
    assert b"root:" not in answer
    assert b"\r\nA: b" not in answer.partition(b"\r\n\r\n")[0]


def test_an_error_of_ours_is_logged_and_not_shown(serve, caplog):
    url = serve()
    status, answer = served.get(url, "/fails?%1b%5b31m")
    assert status == 500
    assert b"inside" not in answer
    assert "the inside of the daemon" in caplog.text
    assert served.get(url)[0] == 200
