"""Targets that start in a moment: Python with a package called torch that has only the parts that an attach needs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hookd.errors import AttachError
from hookd.target.boot import loader
from hookd.tool.attach import live, payload, target
from hookd.tool.attach.payload import Payload
from hookd.tool.attach.request import AttachRequest
from hookd.tool.linux import proc
from hookd.tool.linux.memory import Opened
from tests.support.environment import target_environment
from tests.support.processes import Process, wait_until

if TYPE_CHECKING:
    from hookd.tool.attach.delivery import Delivery
    from tests.support.interpreters import Interpreter

TORCH = """
import mmap, os
file = os.open(os.path.join(os.path.dirname(__file__), "libtorch_stub.so"), os.O_RDONLY)
library = mmap.mmap(file, 0, prot=mmap.PROT_READ)
from torch import nn
"""
TRAIN = """
import ctypes, hashlib, os, signal, sys, threading, time
import torch
def done(value):
    print("done", hashlib.sha256(repr(value).encode()).hexdigest(), flush=True)
def until_stopped(step):
    '''Work until a line arrives on stdin, then close with the checksum of a fixed amount of work.'''
    asked = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
    print("ready", flush=True)
    while not asked.is_set():
        step()
    done([i * i / 3.7 for i in range(1000)])
"""
COUNTS = b"""
import sys
def start(config, loader=None):
    sys.hookd_starts = getattr(sys, "hookd_starts", 0) + 1
"""
LEAVES_AT_ONCE = b"""
def start(config, loader=None, begin=start):
    begin(config, loader)
    from hookd.target.boot import loader as agent_lock
    agent_lock.release()
def stop():
    pass
def orphan():
    pass
"""

# A target computes this; the result must be the same, whatever is done to the target.
queued = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="a script is run there, and no call is queued by a stop"
)
"""For tests of events around a stop and the call that it queues."""
EXACT = """
values = [i * 0.37 for i in range(300)]
wanted = sum(v * v / 3.1 for v in values)
def step():
    assert sum(v * v / 3.1 for v in values) == wanted
"""


def torch_directory(directory: Path) -> Path:
    """Write the package; return the entry for PYTHONPATH."""
    home = directory / "stub"
    modules = home / "torch" / "nn" / "modules"
    modules.mkdir(parents=True)
    (home / "torch" / "__init__.py").write_text(TORCH)
    (home / "torch" / "libtorch_stub.so").write_bytes(bytes(4096))
    (home / "torch" / "nn" / "__init__.py").write_text("from torch.nn.modules.module import Module\n")
    (modules / "__init__.py").write_text("")
    (modules / "module.py").write_text("class Module:\n    def __call__(self):\n        return None\n")
    return home


def start(directory: Path, body: str, python: Interpreter | None = None, **extra: str) -> Process:
    """Start a target and wait until it works.

    Args:
        directory: for the package, in the target's file system.
        body: its code, with `until_stopped` or `done` of TRAIN at its end.
        python: its interpreter, this test's own if None.
    """
    home = directory / "stub" if (directory / "stub").exists() else torch_directory(directory)
    command = python.command if python else [sys.executable]
    env = target_environment(PYTHONPATH=python.inside(home) if python else home, **extra)
    process = Process([*command, "-c", TRAIN + body], env=env, cwd=directory, stdin=True)
    process.expect("^ready$")
    return process


def finish(process: Process) -> None:
    """Send a target the word to end, and check that it ends as if nobody had attached."""
    process.send("end")
    assert process.finish()[-1] == checksum(), process.describe()
    assert process.err == [], process.describe()


def checksum() -> str:
    """Return the closing line of a target that was not harmed."""
    return "done " + hashlib.sha256(repr([i * i / 3.7 for i in range(1000)]).encode()).hexdigest()


def stub_payload(bootstrap: bytes = COUNTS) -> Payload:
    """Return a payload whose agent is `bootstrap` alone; the agent makes room for the next one when it has started."""
    files = {
        "hookd/__init__.py": b"",
        "hookd/target/__init__.py": b"",
        "hookd/target/boot/__init__.py": b"",
        "hookd/target/boot/loader.py": Path(loader.__file__).read_bytes(),
    }
    files["hookd/target/boot/bootstrap.py"] = bootstrap + LEAVES_AT_ONCE
    return Payload(payload._pack(files), "", (), ())


def inject(pid: int, bootstrap: bytes = COUNTS, request: AttachRequest | None = None) -> Delivery:
    """Attach as `attach` does, up to the agent's answer, with a stub as the agent; wait until an earlier one has gone."""
    request = request or AttachRequest(plugins=(), timeout_s=60)

    def injected() -> Delivery | None:
        try:
            return _inject(pid, bootstrap, request)
        except AttachError as exc:
            if exc.reason != "already-attached":
                raise
            return None

    return wait_until(injected, what="the end of the one before")


def _inject(pid: int, bootstrap: bytes, request: AttachRequest) -> Delivery:
    with target.inspect(pid, is_forced=request.force) as found:
        delivery, data = live._prepare(found, request, stub_payload(bootstrap))
        try:
            live._deliver(found, request, delivery, data, time.monotonic() + request.timeout_s)
        finally:
            delivery.finish()
    return delivery


@functools.cache
def own_memory() -> Opened:
    """Open the memory of this very process, which does not become another program."""
    return Opened(os.getpid(), proc.program(os.getpid()))


_STATEMENT = b"__import__('builtins').exec("
"""The beginning of the mailbox's code. Only `__import__` is also in the loader's source, of which freed memory keeps a copy."""


def mailboxes(pid: int) -> int:
    """Count the pages of a process that begin like a mailbox, with its code at offset 128."""
    found = 0
    with Opened(pid, proc.program(pid)) as opened:
        for mapping in opened.mappings():
            if mapping.access == "rw-p" and not mapping.path and mapping.end - mapping.start < 1 << 24:
                with contextlib.suppress(OSError):  # it works meanwhile, and may have freed this
                    memory = opened.read(mapping.start, mapping.end - mapping.start)
                    found += sum(memory.startswith(_STATEMENT, page + 128) for page in range(0, len(memory), 4096))
    return found


def size(pid: int) -> int:
    """Return the size of a process's address space, in pages: a mailbox makes it larger."""
    return int(proc.read(pid, "statm").split()[0])


def threads(pid: int) -> int:
    return proc.status(pid).threads
