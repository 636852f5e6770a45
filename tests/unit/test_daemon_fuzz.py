"""Anything may come to a daemon's port and to its control socket: it answers, logs no error of its own, and goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import string
import struct
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hookd.tool.config import load
from hookd.tool.daemon.client import DaemonClient
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.service import Service
from tests.support import served

FAST = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
ROUTES = ["/", "/metrics", "/-/healthy", "/-/ready", "/sd", "/api/v1/targets", "/api/v1/incidents", "/api/v1", "/none"]
CONTROL = [
    "/v1/version", "/v1/status", "/v1/targets", "/v1/incidents", "/v1/attach", "/v1/detach", "/v1/targets/9999999/report",
    "/v1/targets/9999999/plugins", "/v1/targets/9999999/eval", "/v1/targets/999999999999999999999/report", "/v1/none",
]  # fmt: skip
NOBODY = st.sampled_from([1 << 23, (1 << 31) - 1, 1 << 31, 1 << 63, 10**400, 0, -1, "8388608", "x", True, 1.5, None])
"""Numbers that no process has: the daemon must not meet one of this machine."""


class Errors(logging.Handler):
    """Keeps what would be a traceback in the log, or an error."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.seen = []

    def emit(self, record):
        if record.exc_info or record.levelno >= logging.ERROR:
            self.seen.append(self.format(record))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Yield a daemon with some incidents and no target, and its control socket."""
    directory = tmp_path_factory.mktemp("d")
    store = IncidentStore.open(directory)
    store.add(
        (1, 2, 3), "run <b>", "0", [{"seq": n, "kind": "nan", "message": "\x1b[31m<script>"} for n in range(1, 9)]
    )
    store.close()
    flags = {"listen": "127.0.0.1:0", "control": directory / "sock", "state_dir": directory, "eval_allow": True}
    errors = Errors()
    logging.getLogger().addHandler(errors)
    with served.in_thread(lambda: Service(load(flags, {}), only=frozenset())) as service:
        service.errors = errors
        yield service
    logging.getLogger().removeHandler(errors)


def answers(daemon, data, path=None, *, is_whole=False):
    """Send bytes to the port, or to a Unix socket; return the statuses of all answers.

    Closing our end ends a wait for more, but may lose the answer; so it stays open after a whole request.
    """
    if path is None:
        connection = served.connected(daemon.url, timeout_s=15)  # longer than the daemon waits
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(15)
        connection.connect(str(path))
    with connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            if not is_whole:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 16):
                received += chunk
    return [int(status) for status in STATUS.findall(received)]


def assert_well(daemon, statuses):
    assert all(status < 500 or status == 503 for status in statuses), statuses
    assert not daemon.errors.seen


@pytest.fixture(autouse=True)
def _answers_afterwards(daemon):
    yield
    assert served.get(daemon.url, "/-/healthy")[0] == 200
    assert DaemonClient(daemon.control).version()["pid"]
    assert served.get(daemon.url, "/metrics")[0] == 200
    assert not daemon.errors.seen


@given(data=st.binary(max_size=300))
@FAST
def test_bytes_to_the_port(daemon, data):
    assert_well(daemon, answers(daemon, data))


@given(data=st.binary(max_size=300))
@settings(FAST, max_examples=60)
def test_bytes_to_the_control_socket(daemon, data):
    assert_well(daemon, answers(daemon, data, daemon.control))


tokens = st.text(string.ascii_letters + string.digits + "-_!#$%&'*+.^`|~", min_size=1, max_size=12)
methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI"]) | tokens
names = st.sampled_from([
    "Host", "Accept", "Accept-Encoding", "Content-Length", "Content-Type", "Transfer-Encoding", "Content-Encoding", "Expect",
    "Upgrade", "Authorization", "Range", "Cookie", "If-Modified-Since", "X-Forwarded-For", "Sec-WebSocket-Key", "TE", "HTTP2-Settings",
])  # fmt: skip
values = st.sampled_from([
    "", "0", "1", "-1", "99999999999999999999", "chunked", "gzip, deflate, br, zstd", "100-continue", "websocket", "h2c", "*/*",
    "application/openmetrics-text; version=1.0.0; q=x", "text/plain;version=1.0.0;escaping=allow-utf-8", "Basic Og==", "bytes=0-",
    "application/json; charset=none", "[::1", "a" * 8000,
]) | st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=20)  # fmt: skip
headers = st.lists(st.tuples(names | tokens, values), max_size=6)
words = st.sampled_from(
    [
        "nan",
        "inf",
        "-1",
        "0",
        "1",
        "9" * 30,
        "9" * 5000,
        "1e400",
        "id",
        "time",
        "",
        "\0",
        "%",
        "\u0661",
        "../..",
        "'\"<",
    ]
)
queries = st.lists(
    st.tuples(
        st.sampled_from(["run", "pid", "kind", "since", "limit", "id", "after", "order", "name[]", "curve"]) | tokens,
        words | st.text(max_size=8),
    ),
    max_size=4,
)


def request(method, path, query, lines, *, body=b""):
    asked = "&".join(f"{quote(name)}={quote(value, errors='replace')}" for name, value in query)
    head = [f"{method} {path}{'?' if asked else ''}{asked} HTTP/1.1", "Connection: close"]
    head += [f"{name}: {value}" for name, value in lines]
    return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + body


paths = st.sampled_from(ROUTES) | st.text(st.characters(codec="latin-1", exclude_characters="\r\n "), max_size=30).map(
    "/{}".format
)


@given(sent=st.builds(request, methods, paths, queries, headers, body=st.binary(max_size=20)))
@settings(FAST, max_examples=250)
def test_requests_to_the_port(daemon, sent):
    assert_well(daemon, answers(daemon, sent, is_whole=True))


@given(path=st.sampled_from(ROUTES), query=queries, lines=headers)
@settings(FAST, max_examples=200)
@example(path="/sd", query=[], lines=[])
@example(path="/none", query=[], lines=[("Expect", "\x80")])
@example(path="/", query=[], lines=[("Expect", "\x80")])
@example(path="/api/v1/incidents", query=[("limit", "9" * 4000)], lines=[])
@example(path="/api/v1/incidents", query=[("since", "nan")], lines=[])
def test_questions_to_the_port(daemon, path, query, lines):
    assert_well(daemon, answers(daemon, request("GET", path, query, lines), is_whole=True))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["nan", "load", "unload", "configure", "a:b=c", "1+1", "/dev/zero", "/nonexistent", "\0", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
keys = st.sampled_from(
    "plugins timeout_s keep force run plugin_dirs only_trainers all op plugin expression name options by_name".split()
)
bodies = st.builds(
    lambda pid, rest: {**rest, **({} if pid is None else {"pid": pid})},
    NOBODY,
    st.dictionaries(keys, json_values, max_size=5),
)
texts = (
    bodies.map(json.dumps)
    | json_values.map(json.dumps)
    | st.sampled_from(["", "[" * 50_000, '{"a":' * 9000, "NaN", "\ufeff{}"])
)


def posted(path, text, lines=(), method="POST"):
    body = text.encode("utf-8", "surrogatepass")
    given = [("Host", "x"), ("Content-Length", str(len(body))), *lines]
    return request(method, path, [], given, body=body)


@given(path=st.sampled_from(CONTROL), text=texts)
@settings(FAST, max_examples=300)
@example(path="/v1/attach", text='{"pid": 8388608, "timeout_s": NaN}')
@example(path="/v1/attach", text='{"pid": 8388608, "timeout_s": Infinity}')
@example(path="/v1/detach", text='{"pid": 8388608, "timeout_s": 1e308}')
@example(path="/v1/attach", text='{"pid": 8388608, "plugins": ["x"], "plugin_dirs": ["\\u0000", "/dev/zero"]}')
@example(path="/v1/targets/9999999/plugins", text='{"op": "load", "plugin": "x", "plugin_dirs": ["\\u0000"]}')
@example(path="/v1/targets/9999999/plugins", text='{"op": [], "plugin": {"name": "x", "options": {"a": [1]}}}')
def test_orders_to_the_control_socket(daemon, path, text):
    statuses = answers(daemon, posted(path, text), daemon.control, is_whole=True)
    assert len(statuses) == 1
    assert_well(daemon, statuses)


texts_of_few_bytes = texts.map(lambda text: text.encode("utf-8", "surrogatepass")[:2000])


@given(sent=st.builds(request, methods, st.sampled_from(CONTROL), queries, headers, body=texts_of_few_bytes))
@settings(FAST, max_examples=150)
@example(sent=posted("/v1/attach", "{}", [("Content-Type", "application/json; charset=none")]))
@example(sent=posted("/v1/attach", "{}", [("Expect", "\x80")]))
def test_requests_to_the_control_socket(daemon, sent):
    assert_well(daemon, answers(daemon, sent, daemon.control))


def test_an_order_that_is_too_large_is_not_read(daemon):
    large = posted("/v1/attach", "[" + " " * (1 << 20) + "]")
    assert answers(daemon, large, daemon.control, is_whole=True) == [413]
    head = b"POST /v1/attach HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 99999999999\r\n\r\n"
    assert answers(daemon, head + b"x" * (2 << 20), daemon.control, is_whole=True) in ([413], [])


def test_a_request_without_a_host_asks_no_name_service(daemon, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getfqdn", lambda *names: asked.append(names) or "elsewhere")
    answer = served.exchange(daemon.url, b"GET /sd HTTP/1.0\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])[0]["targets"] == [daemon.url.removeprefix("http://")]
    assert not asked


def test_who_leaves_before_the_end_leaves_no_error(daemon):
    cut = posted("/v1/attach", '{"pid": 8388608}')[:-5]
    for _ in range(30):
        assert_well(daemon, answers(daemon, cut, daemon.control))
        for path in ("/metrics", "/", "/api/v1/incidents"):
            with served.connected(daemon.url) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                connection.sendall(request("GET", path, [], []))
    assert not daemon.errors.seen
