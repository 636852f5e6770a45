"""The cost of TLS and passwords for a scrape of 100 kB on a new connection, and of 500 stuck connections for the others.

`python -m tests.bench.port` prints milliseconds; docs/security.md quotes them.
"""

from __future__ import annotations

import base64
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import bcrypt
from aiohttp import web

from hookd.tool.config import Address
from hookd.tool.daemon.web import tcp
from tests.support import served

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MTLS = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n"
SCRAPES, STUCK = 100, 500


async def page(_):
    return web.Response(body=b"x" * 100_000)


def serving(path=None):
    app = web.Application()
    app.router.add_get("/", page)
    return served.in_thread(lambda: tcp.serving(app, Address("127.0.0.1", 0), path))


def scrape_ms(url, context=None, headers=()):
    begun = time.perf_counter()
    assert served.get(url, "/", context, headers)[0] == 200
    return (time.perf_counter() - begun) * 1e3


def main():
    directory = served.certificates(Path(tempfile.mkdtemp()))
    with_one, without = (served.client_context(directory, has_certificate=one) for one in (True, False))
    users = f"basic_auth_users:\n  p: {bcrypt.hashpw(b'p', bcrypt.gensalt(10)).decode()}\n"
    headers = ["Authorization: Basic " + base64.b64encode(b"p:p").decode()]
    for name, text, *how in (
        ("unencrypted", None), ("TLS", TLS, without), ("mTLS", MTLS, with_one), ("mTLS and password", MTLS + users, with_one, headers),
    ):  # fmt: skip
        with serving(served.web_config(directory, text) if text else None) as url:
            first, *others = [scrape_ms(url, *how) for _ in range(SCRAPES)]
            print(f"{name}: first {first:.1f}, then {statistics.median(others):.1f}")
    with serving() as url, contextlib.ExitStack() as stack:
        for _ in range(STUCK):
            stuck = stack.enter_context(served.connected(url))
            with contextlib.suppress(ConnectionError):
                stuck.sendall(b"GET / HTTP/1.1\r\n")
        times = [scrape_ms(url) for _ in range(SCRAPES)]
        print(f"beside {STUCK} that never end a request: {statistics.median(times):.1f}, longest {max(times):.1f}")


if __name__ == "__main__":
    main()
