"""Hosts made of namespaces: each has a network, processes and a /run of its own, and a cable to a common switch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tests.support.environment import target_environment
from tests.support.processes import PATIENCE_S, Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"
SWITCH = f"{NETWORK}.254"


class Host:
    """One host; `number` is the last part of its address. It ends with all its processes."""

    def __init__(self, number: int, switch: Host | None = None) -> None:
        self.number = number
        self.address = f"{NETWORK}.{number}"
        words = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        self._holder = Process(words, env=target_environment())
        self.pid = wait_until(self._first, what="its first process")
        _run(*self.inside("mount", "-t", "tmpfs", "tmpfs", "/run"))
        self.ip("link", "set", "lo", "up")
        self._switch = switch
        if switch is None:
            self.ip("link", "add", "eth0", "type", "bridge")
        else:
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
            switch.ip("link", "add", f"host{number}", *pair)
            switch.ip("link", "set", f"host{number}", "master", "eth0", "up")
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")

    def _first(self) -> int | None:
        assert self._holder.popen.poll() is None, self._holder.describe()
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        is_ready = children and Path(f"/proc/{children[0]}/comm").read_text() == "sleep\n"
        return int(children[0]) if is_ready else None

    def inside(self, *command: str | Path) -> list[str | Path]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-n", "--", *command]

    def ip(self, *words: str) -> None:
        """Change its network; pids are those that we see."""
        _run("nsenter", "-t", str(self.pid), "-n", "--", "ip", *words)

    def cut(self) -> None:
        """Pull its cable."""
        self._cable("down")

    def join(self) -> None:
        """Plug its cable in again."""
        self._cable("up")

    def _cable(self, state: str) -> None:
        assert self._switch is not None
        self._switch.ip("link", "set", f"host{self.number}", state)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread that is in this host's network."""
        with ThreadPoolExecutor(1, initializer=self._enter) as thread:
            return thread.submit(function).result()

    def _enter(self) -> None:
        fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(fd, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(fd)

    def close(self) -> None:
        """Kill the first process of its namespace, which ends all others with it."""
        self._holder.close()


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def why_not() -> str:
    """Return why no hosts can be made here, or "" if they can."""
    if os.geteuid() != 0:
        return "needs root: network namespaces"
    first = None
    try:
        first = Host(254)
        first.ip("link", "add", "probe", "type", "veth", "peer", "name", "other")
    except (AssertionError, FileNotFoundError) as error:
        return f"namespaces, bridges or veth pairs are not allowed here: {error}"
    finally:
        if first is not None:
            with contextlib.suppress(AssertionError):
                first.close()
    return ""
