"""Attacks of a network peer: whoever can connect to the port, and a web page in a browser that can."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import itertools
import multiprocessing
import random
import re
import socket
import statistics
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import bcrypt

from tests.attacks.attack import Result, attack
from tests.attacks.peers import TLS, become_attacker, node, withstand
from tests.support import served
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from pathlib import Path

GUARDED = "basic_auth_users:\n  prometheus: {}\n"
PASSWORD = "correct horse battery staple"
ROUTES = ("/metrics", "/", "/sd", "/-/ready", "/-/healthy", "/api/v1/targets", "/api/v1/incidents", "/api/v1/panels")
_ASK = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


# ---- a browser


@attack(
    "a network peer",
    "DNS rebinding: a page at evil.example that has its name lead to the daemon reads it",
    tries=176,
    short=40,
)
def dns_rebinding(tries: int) -> Result:
    names = (
        "evil.example", "evil.example:80", "EVIL.EXAMPLE", "evil.example.", "127.0.0.1.evil.example", "localhost.evil.example",
        "localhost@evil.example", "evil.example:localhost", "127.0.0.1:80.evil.example", "[::1].evil.example", "127.1.evil.example",
        "rebind", "localhost evil.example", "xn--e1aybc.example", "_.evil.example", "127.0.0.1#.evil.example", "0x7f.1.evil.example",
    )  # fmt: skip
    heads = [f"Host: {name}" for name in names]
    heads += ["Host: localhost\r\nHost: evil.example", "Host: evil.example\r\nHost: localhost", "Host : evil.example"]
    asked = [f"GET {path} HTTP/1.1\r\n{head}\r\n" for head, path in itertools.product(heads, ROUTES)]
    asked += [f"GET http://evil.example{path} HTTP/1.1\r\nHost: localhost\r\n" for path in ROUTES]
    asked += [f"HEAD {path} HTTP/1.0\r\nHost: evil.example\r\n" for path in ROUTES]
    random.Random(1).shuffle(asked)
    with node() as daemon:
        return _answered(daemon.url, asked[:tries])


@attack(
    "a network peer",
    "Have a browser that can reach the daemon ask it from a page of another site, and read or order",
    tries=40,
    short=24,
)
def cross_site_requests(tries: int) -> Result:
    heads = [
        f"Host: localhost\r\nOrigin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: {mode}\r\n"
        for mode in ("cors", "no-cors", "websocket")
    ]
    asked = [f"GET {path} HTTP/1.1\r\n{head}" for head, path in itertools.product(heads, ROUTES)]
    for path in ("/v1/attach", "/v1/detach", "/v1/targets/1/eval", "/metrics"):
        form = "Content-Type: text/plain\r\nContent-Length: 0\r\n"
        asked += [f"{method} {path} HTTP/1.1\r\n{heads[1]}{form}" for method in ("POST", "PUT", "DELETE")]
        asked += [f"OPTIONS {path} HTTP/1.1\r\n{heads[0]}Access-Control-Request-Method: POST\r\n"]
    with node() as daemon:
        return _answered(daemon.url, [*asked[-16:], *asked[:-16]][:tries])


def _answered(url: str, asked: list[str], succeeds: str = r" (1|2|3)\d\d |Access-Control-Allow") -> Result:
    """Send requests one after the other; one succeeds if its answer holds what the attacker wants."""
    answers = [served.exchange(url, f"{one}Connection: close\r\n\r\n".encode("latin-1")) for one in asked]
    through = [one for one in answers if re.search(succeeds.encode(), one.partition(b"\r\n\r\n")[0])]
    statuses = sorted({one.split(b" ", 2)[1].decode() for one in answers if one.startswith(b"HTTP/")})
    return Result(len(asked), len(through), f"answered with {', '.join(statuses)} or not at all")


@attack(
    "another user",
    "Read what the daemon keeps of everybody's runs, in a directory that is open to all",
    tries=1000,
    short=100,
)
def reading_state(tries: int) -> Result:
    with node(holders=2) as daemon:
        directory = daemon.client.path.parent / "state"
        wait_until((directory / "held.json").exists, what="the note of who is alive")
        for one in (directory.parent, directory):
            one.chmod(0o755)
        with multiprocessing.get_context("fork").Pool(1, become_attacker) as attacker:
            tried, read = attacker.apply(_read_all, (directory, tries))
        files = len(list(directory.iterdir()))
    return Result(tried, len(read), f"of {files} files {', '.join(sorted(read)) or 'none'} could be read")


def _read_all(directory: Path, rounds: int) -> tuple[int, set[str]]:
    tried, read = 0, set()
    for _ in range(rounds):
        for path in directory.iterdir():
            tried += 1
            with contextlib.suppress(OSError):
                path.read_bytes()
                read.add(path.name)
        time.sleep(0.02)
    return tried, read


# ---- bypasses of the web configuration


@functools.cache
def _guarded(*costs: int) -> str:
    hashes = [bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(cost)).decode() for cost in costs or (10,)]
    return GUARDED.format(hashes[0]) + "".join(f"  user{n}: {one}\n" for n, one in enumerate(hashes[1:]))


@attack(
    "a network peer",
    "Go round --web-config without a password: case, dot segments, encodings, absolute forms, HEAD, upgrades, smuggled requests",
    tries=4000,
    short=400,
)
def around_web_config(tries: int) -> Result:
    choice = random.Random(18)
    asked = [_disguised(choice) for _ in range(tries)]
    with node(_guarded()) as daemon:
        assert served.get(daemon.url, "/metrics")[0] == 401
        assert served.get(daemon.url, "/metrics", headers=[_basic("prometheus", PASSWORD)])[0] == 200
        answers = [served.exchange(daemon.url, one) for one in asked]
        through = [one for one in answers if re.search(rb"HTTP/1\.\d (101|[23]\d\d) |hookd_", one)]
        assert served.get(daemon.url, "/metrics", headers=[_basic("prometheus", PASSWORD)])[0] == 200
    statuses = sorted({found.decode() for one in answers for found in re.findall(rb"HTTP/1\.\d (\d+) ", one)})
    return Result(
        tries, len(through), f"answered with {', '.join(statuses)} or not at all; the password still opens it"
    )


def _basic(name: str, password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def _disguised(choice: random.Random) -> bytes:
    """Return a request for a route, in one of the forms that have bypassed checks in other servers."""
    path = choice.choice(ROUTES)
    path = choice.choice([
        path, path.upper(), f"/.{path}", f"/x/..{path}", f"//{path}", path.replace("/", "%2f"), f"{path}%00", f"{path}/", f"{path}/.",
        f"/static/..%2f{path}", f"{path};x", f"{path}?a=1", f"{path}#", f"http://localhost{path}", f"http://u:p@localhost{path}",
        f"\\{path}", path.replace("m", "%6d"), f"/%2e{path}", f"{path}%20", f"*{path}", f"/-/healthy/..{path}", f"/-/healthy;{path}",
    ])  # fmt: skip
    method = choice.choice(
        ["GET", "HEAD", "GET", "get", "POST", "OPTIONS", "TRACE", "CONNECT", "PRI", "GET\t", " GET", "DEBUG"]
    )
    version = choice.choice(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "http/1.1", ""])
    inner = f"GET {choice.choice(ROUTES)} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head, body = choice.choice([
        ("", ""),
        ("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", inner),
        ("Authorization: Basic Og==\r\nAuthorization: Basic cHJvbWV0aGV1czo=\r\n", ""),
        (f"{_basic('prometheus', '')}\r\n", ""),
        ("Authorization: Bearer prometheus\r\n", ""),
        ("authorization:\tbasic\r\n cHJvbWV0aGV1czo=\r\n", ""),
        ("Authorization: Basic " + "A" * 8000 + "\r\n", ""),
        ("Proxy-Authorization: Basic cHJvbWV0aGV1czo=\r\nX-Forwarded-User: prometheus\r\n", ""),
        ("X-Forwarded-For: 127.0.0.1\r\nX-Original-URL: /metrics\r\nX-Rewrite-URL: /metrics\r\n", ""),
        ("X-HTTP-Method-Override: GET\r\n", ""),
        (f"Content-Length: {len(inner)}\r\nTransfer-Encoding: chunked\r\n", f"0\r\n\r\n{inner}"),
        (f"Transfer-Encoding : chunked\r\nContent-Length: {len(inner)}\r\n", f"0\r\n\r\n{inner}"),
        ("Transfer-Encoding: xchunked\r\n", f"0\r\n\r\n{inner}"),
        (f"Content-Length: 0\r\nContent-Length: {len(inner)}\r\n", inner),
        ("Content-Length: +5\r\n", inner),
        ("X: 1\n\nGET /metrics HTTP/1.1\nHost: localhost\n\n", inner),
        ("X: a\r\n folded: b\r\n", inner),
        ("X: \x00\r\n", inner),
        ("Expect: 100-continue\r\nContent-Length: 9\r\n", inner),
        ("", inner * 5),
    ])  # fmt: skip
    first = f"{method} {path} {version}".strip(" " if method.strip() == method else "")
    return f"{first}\r\nHost: localhost\r\n{head}\r\n{body}".encode("latin-1")


@attack(
    "a network peer",
    "Guess a password from one address, also under names of other addresses (X-Forwarded-For)",
    tries=1000,
    short=200,
)
def guessing(tries: int) -> Result:
    with node(_guarded(4)) as daemon:
        begun = time.monotonic()
        statuses = [
            served.get(
                daemon.url,
                "/metrics",
                headers=[_basic("prometheus", f"guess {n}"), f"X-Forwarded-For: 10.0.{n % 256}.{n // 256}"],
            )[0]
            for n in range(tries)
        ]
        allowed = 10 + (time.monotonic() - begun) + 1
        known = served.get(daemon.url, "/metrics", headers=[_basic("prometheus", PASSWORD)])[0]
    judged = statuses.count(401)
    seen = f"{judged} guesses were judged in {allowed - 11:.1f} s, {statuses.count(429)} refused unheard (429)"
    return Result(tries, max(0, round(judged - allowed)) + (known not in (200, 429)), seen)


@attack(
    "a network peer",
    "Tell from the time of an answer whether a name is a user's, where passwords are hashed at several costs",
    tries=400,
    short=60,
    is_long=True,
)
def password_timing(tries: int) -> Result:
    """Compare one known and one unknown name in each pair, in random order: a sign test, which no outlier moves."""
    choice = random.Random(7)
    slower = 0
    took: dict[str, list[float]] = {"user0": [], "nobody": []}
    with node(_guarded(10, 5)) as daemon:
        for n in range(tries):
            pair = ["user0", "nobody"]
            choice.shuffle(pair)
            for name in pair:
                took[name].append(_judged_s(daemon.url, name, f"127.1.{n // 200}.{1 + n % 200}"))
            slower += took["user0"][-1] > took["nobody"][-1]
    score = abs(slower - tries / 2) / (tries / 4) ** 0.5
    known, unknown = (1e3 * statistics.median(took[name]) for name in ("user0", "nobody"))
    seen = f"a user's name takes {known:.1f} ms, any other {unknown:.1f} ms (medians); sign test: {score:.1f} standard deviations"
    return Result(tries, tries if score > 4 else 0, seen)


def _judged_s(url: str, name: str, source: str) -> float:
    """Return how long a wrong password takes; each comes from an address of its own, so that guessing is not limited."""
    port = urlsplit(url).port
    with socket.create_connection(("127.0.0.1", port), 30, source_address=(source, 0)) as connection:
        begun = time.perf_counter()
        connection.sendall(_ASK + f"{_basic(name, 'wrong')}\r\n\r\n".encode())
        assert b" 401 " in connection.recv(4096)
        return time.perf_counter() - begun


# ---- a crowd


@attack(
    "a network peer",
    "Send headers a byte at a time on many connections, so that scrapes fail",
    tries=3000,
    short=300,
    is_long=True,
)
def slow_headers(tries: int) -> Result:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_ASK + b"A: ")
        while not reader.at_eof():
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.2)

    with node() as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer", "Send bodies a byte at a time, with every method, so that scrapes fail", tries=3000, short=500
)
def slow_bodies(tries: int) -> Result:
    methods = itertools.cycle((b"GET", b"POST", b"PUT", b"HEAD"))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(next(methods) + b" /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.1)

    with node() as daemon:
        return withstand(daemon, tries, talk)


@attack("a network peer", "Send bodies that unpack to 10 GiB each, to fill the memory", tries=2000, short=100)
def compressed_bodies(tries: int) -> Result:
    bomb = gzip.compress(gzip.compress(bytes(10 << 20), 9) * 1024, 9)
    kinds = itertools.cycle((b"Content-Length: %d\r\n" % len(bomb), b"Transfer-Encoding: chunked\r\n"))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = next(kinds)
        writer.write(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n" + kind + b"\r\n")
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(bomb), bomb) if b"chunked" in kind else bomb)
        await reader.read()

    with node() as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer",
    "Send a thousand requests at once on each connection, and read none of the answers",
    tries=300,
    short=30,
    is_long=True,
)
def pipelining(tries: int) -> Result:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        writer.write((_ASK + b"\r\n") * 1000)
        await writer.wait_closed()

    with node(holders=4) as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer",
    "Ask for the metrics of many modules on many connections, and never read them",
    tries=2000,
    short=200,
    is_long=True,
)
def never_reading(tries: int) -> Result:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        writer.write(_ASK + b"\r\n")
        await writer.wait_closed()

    with node(holders=4) as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer",
    "Ask for ever other parts of the metrics (name[]) on many connections, to have other scrapes sent away",
    tries=5000,
    short=500,
)
def unusual_scrapes(tries: int) -> Result:
    numbers = itertools.count()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /metrics?name[]=hookd_steps&name[]=x%d HTTP/1.0\r\n\r\n" % next(numbers))
        await reader.read()

    with node(holders=4) as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer",
    "Ask for pages and all incidents on many connections, so that scrapes fail",
    tries=5000,
    short=300,
)
def asking_for_pages(tries: int) -> Result:
    paths = itertools.cycle((b"/", b"/run/herd-1", b"/api/v1/incidents?limit=1000", b"/incident/1", b"/api/v1/targets"))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET " + next(paths) + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await reader.read()

    with node(holders=4) as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer", "Open 500 connections at a time, and say nothing on them", tries=20000, short=1000, is_long=True
)
def silent_connections(tries: int) -> Result:
    async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    with node() as daemon:
        return withstand(daemon, tries, talk)


@attack(
    "a network peer",
    "Send something that is not TLS, or half a handshake, to a port that has it, so that scrapes fail",
    tries=5000,
    short=500,
)
def tls_garbage(tries: int) -> Result:
    choice = random.Random(5)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + choice.randbytes(32)
        writer.write(
            choice.choice(
                [
                    hello,
                    choice.randbytes(2000),
                    b"\x16\x03\x01\xff\xff" + choice.randbytes(9000),
                    _ASK + b"\r\n",
                    b"\x15\x03\x03\x00\x02\x02\x28",
                ]
            )
        )
        await reader.read()

    with node(TLS + _guarded(4)) as daemon:
        context = served.client_context(daemon.client.path.parent)
        return withstand(daemon, tries, talk, context, [_basic("prometheus", PASSWORD)])
