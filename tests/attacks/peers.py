"""Peers on the network: many connections of another user's process, and the scrapes of Prometheus beside them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from tests.attacks.attack import ATTACKER, Result
from tests.support import served
from tests.support.daemon import Daemon
from tests.support.herd import Herd

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
SLOW_S = 5.0
"""A scrape that takes longer counts as failed: Prometheus gives up after 10 s, and the next one may be as slow."""
GROWN_MB = 200
"""By how much a crowd may increase the daemon's memory: its pod may use 1 GiB."""
AT_ONCE = 500
TALK_S = 8.0
"""How long a peer keeps a connection that is neither answered nor closed before it opens the next."""


class Node(Daemon):
    """A `hookd serve` whose port may be protected, so that only its control socket shows whether it is ready."""

    def is_ready(self) -> bool:
        return bool(self.url)


@contextlib.contextmanager
def node(web_config: str = "", *arguments: str, holders: int = 0) -> Iterator[Node]:
    """Run a daemon for the duration of a block.

    Args:
        web_config: the text of the web configuration; the certificates are beside it.
        arguments: for `hookd serve`.
        holders: processes with a page of 1,000 modules, so that there is much to scrape.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if web_config:
            served.certificates(directory)
            arguments = ("--web-config", str(served.web_config(directory, web_config)), *arguments)
        if holders:
            herd = stack.enter_context(contextlib.closing(Herd()))
            herd.start(holders, "herd", modules=1000)
        daemon = Node(directory, *arguments)
        stack.enter_context(daemon.process)
        yield daemon
        assert daemon.process.popen.poll() is None, f"the daemon has ended: {daemon.process.describe()}"


@dataclass
class Scrapes:
    """The results of Prometheus scrapes: the seconds of each, and how many failed."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    def make(self, url: str, context: ssl.SSLContext | None, headers: Sequence[str]) -> None:
        """Scrape once, on a connection of its own."""
        begun = time.monotonic()
        status = None
        with contextlib.suppress(OSError):
            status, _ = served.get(url, "/metrics", context, headers)
        self.seconds.append(time.monotonic() - begun)
        self.failed += status != 200 or self.seconds[-1] > SLOW_S

    def __str__(self) -> str:
        median, longest = (f"{1e3 * one:.0f} ms" for one in (statistics.median(self.seconds), max(self.seconds)))
        return f"median {median}, longest {longest}"


def withstand(
    daemon: Node, tries: int, talk: Talk, context: ssl.SSLContext | None = None, headers: Sequence[str] = ()
) -> Result:
    """Scrape while a crowd makes connections.

    Args:
        daemon: the one that is attacked.
        tries: the number of connections, AT_ONCE at a time.
        talk: what each connection does.
        context: the scraper's, for TLS.
        headers: the scraper's.

    Returns:
        The result: scrapes that failed or took too long, and memory that grew too much, count as successes of the attacker.
    """
    alone, beside = Scrapes(), Scrapes()
    for _ in range(20):
        alone.make(daemon.url, context, headers)
    assert not alone.failed, "a scrape fails although nobody attacks"
    process = psutil.Process(daemon.process.pid)
    before = largest = process.memory_info().rss
    peer = multiprocessing.get_context("fork").Process(target=_attack, args=(daemon.url, tries, talk))
    peer.start()
    try:
        while peer.is_alive() or len(beside.seconds) < 20:
            beside.make(daemon.url, context, headers)
            largest = max(largest, process.memory_info().rss)
            time.sleep(0.05)
    finally:
        peer.kill()
        peer.join()
    assert peer.exitcode == 0, "the attacker itself has failed"
    grown = (largest - before) / 1e6
    seen = f"{len(beside.seconds)} scrapes beside it: {beside}; alone {alone}; the daemon grew by {grown:.0f} MB"
    return Result(tries, beside.failed + (grown > GROWN_MB), seen)


def become_attacker() -> None:
    """Drop root for good."""
    os.setgroups([])
    os.setgid(ATTACKER)
    os.setuid(ATTACKER)


def _attack(url: str, tries: int, talk: Talk) -> None:
    """Make connections as another user, until all tries are done."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * AT_ONCE, 2 * AT_ONCE))
    become_attacker()
    asyncio.run(_crowd(urlsplit(url).port or 0, tries, talk))


async def _crowd(port: int, tries: int, talk: Talk) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with room:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), TALK_S)
                try:
                    await asyncio.wait_for(talk(reader, writer), TALK_S)
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(tries)))
