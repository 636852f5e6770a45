"""A server in a thread of this process, and its certificates."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.processes import PATIENCE_S

WEB = Path(__file__).parents[2] / "deploy" / "web"


@contextlib.contextmanager
def in_thread(make):
    """Enter an asynchronous context in an event loop of its own; yield its value."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    async def make_it():
        context = make()
        return context, await context.__aenter__()

    async def end_it():
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        context, value = run(make_it())
        try:
            yield value
        finally:
            run(context.__aexit__(None, None, None))
    finally:
        run(end_it())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def certificates(directory, *names):
    """Make, or renew, an authority and its certificates, as docs/security.md says."""
    subprocess.run(
        ["sh", WEB / "certificates.sh", directory, *(names or ("127.0.0.1", "localhost"))], check=True, timeout=60
    )
    return directory


def web_config(directory, text):
    """Write a web configuration into a directory with certificates."""
    path = directory / "web-config.yml"
    path.write_text(text)
    return path


def client_context(directory, *, has_certificate=False):
    """Return the TLS context of a client that trusts the authority, with or without a certificate."""
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    if has_certificate:
        context.load_cert_chain(directory / "prometheus.crt", directory / "prometheus.key")
    return context


def connected(url, context=None, timeout_s=PATIENCE_S):
    """Open a connection to a URL."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
    return connection if context is None else context.wrap_socket(connection, server_hostname=parts.hostname)


def exchange(url, data, context=None, timeout_s=PATIENCE_S):
    """Send bytes; return everything that comes back until the other side closes."""
    with contextlib.closing(connected(url, context, timeout_s)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                received += data
        return received


def get(url, path="/", context=None, headers=()):
    """Request a path; return the status and the whole answer."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    answer = exchange(url, "\r\n".join(lines).encode(), context)
    return int(answer.split(b" ", 2)[1]) if answer else None, answer


def has(program):
    return shutil.which(program) is not None
