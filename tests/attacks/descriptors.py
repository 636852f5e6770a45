"""Descriptors, paths and sockets of a target that lead root's daemon to something else.

An object counts as opened if the kernel says so: inotify's IN_OPEN, which O_PATH does not cause, or a connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import Control, discover
from hookd.tool.inject.remote_debug import ScriptFolder
from hookd.tool.linux import proc
from tests.attacks.attack import ATTACKER, VICTIM, Impossible, Result, attack
from tests.attacks.people import APART, folder_of, process_of
from tests.support.daemon import Daemon
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import HOOKD

if TYPE_CHECKING:
    from collections.abc import Iterator

PRESENTER = Path(__file__).with_name("presenter.py")
HOLDER = REPOSITORY / "tests" / "support" / "page_holder.py"
SECRET = "the-secret-of-root"
_IN_OPEN, _IN_CREATE = 0x20, 0x100


class Watch:
    """Counts the files that are opened, and those created in directories, as inotify(7) reports them."""

    def __init__(self, *paths: Path, mask: int = _IN_OPEN) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._paths = {libc.inotify_add_watch(self._fd, os.fsencode(path), mask): path for path in paths}
        if -1 in self._paths:
            raise Impossible("inotify has no watch left")

    def seen(self) -> list[Path]:
        """Return the paths of all events since the last call; equal paths in succession count once."""
        found, data = [], b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._fd, 1 << 16):
                data += part
        while data:
            number, _, _, length = struct.unpack_from("iIII", data)
            found.append(self._paths.get(number, Path()))
            data = data[16 + length :]
        return found

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def _watching(*paths: Path, mask: int = _IN_OPEN) -> Iterator[Watch]:
    watch = Watch(*paths, mask=mask)
    try:
        if mask == _IN_OPEN:
            os.close(os.open(paths[0], os.O_PATH))
            if watch.seen():
                raise Impossible("this kernel reports O_PATH as an open (Linux before 6.10)")
        yield watch
    finally:
        watch.close()


@contextlib.contextmanager
def _traps() -> Iterator[list[Path]]:
    """Make a pipe and a terminal of the attacker's, and a file of root's."""
    master, slave = os.openpty()
    try:
        with folder_of(ATTACKER) as folder:
            terminal, pipe, secret = Path(os.ttyname(slave)), folder / "pipe", folder / "secret"
            os.close(slave)
            os.chown(terminal, ATTACKER, ATTACKER)
            os.mkfifo(pipe)
            os.chown(pipe, ATTACKER, ATTACKER)
            secret.write_text(f'{{"it": "{SECRET}"}}')
            secret.chmod(0o600)
            yield [pipe, terminal, secret]
    finally:
        os.close(master)


@contextlib.contextmanager
def _presenter(*arguments: str | Path, apart: bool = False) -> Iterator[Process]:
    with process_of(ATTACKER, [*(APART if apart else ()), sys.executable, PRESENTER, *arguments]) as process:
        process.expect("^ready$")
        yield process


@contextlib.contextmanager
def _daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(Path(folder))
        with daemon.process:
            yield daemon


def _look_around(daemon: Daemon) -> None:
    """List the processes as root, and wait until the daemon has looked for targets: until it has found a newer one."""
    with Process([*HOOKD, "ps"], env=tool_environment()) as listing:
        listing.wait()
    with process_of(VICTIM, [sys.executable, HOLDER]) as holder:
        holder.expect("^ready$")
        wait_until(lambda: any(row["pid"] == holder.pid for row in daemon.client.targets()), what="the later target")


@attack(
    "another user",
    "show a pipe, a terminal and a file of root's under the name of a page, to have root open them",
    tries=20,
)
def page_of_another_kind(tries: int) -> Result:
    opened = []
    with _traps() as traps, _watching(*traps) as watch, _daemon() as daemon:
        for _ in range(tries):
            with contextlib.ExitStack() as stack:
                for trap in traps:
                    stack.enter_context(_presenter("page", trap, apart=True))
                _look_around(daemon)
            opened += watch.seen()
    kinds = sorted({path.name if path.parent.name != "pts" else "terminal" for path in opened})
    return Result(
        tries * len(traps), len(opened), f"`ps` and `serve` of root opened {', '.join(kinds) or 'none of them'}"
    )


@attack("another user", "exchange a page for a file of root's while root opens it", tries=2000, short=100)
def page_exchanged(tries: int) -> Result:
    found = opened = 0
    with _traps() as traps, _watching(traps[2]) as watch, _presenter("swap", traps[2], apart=True) as process:
        for _ in range(tries):
            fd = discover.find_page(process.pid)
            if fd is not None:
                found += 1
                os.close(fd)
            opened += len(watch.seen())
    return Result(tries, opened, f"the true page was found {found} times, the file opened {opened} times")


class Service:
    """A service of root's that nobody else can reach; it counts its clients."""

    def __init__(self, folder: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        self.path = folder / "service.sock"
        self.visits = 0
        self._socket = socket.socket(socket.AF_UNIX, kind)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600 if kind == socket.SOCK_STREAM else 0o666)  # like those of journald and systemd
        if kind == socket.SOCK_STREAM:
            self._socket.listen(128)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        threading.Thread(target=self._stream if kind == socket.SOCK_STREAM else self._datagrams, daemon=True).start()

    def _stream(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()
                self.visits += 1

    def _datagrams(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, rights, _, _ = self._socket.recvmsg(64, 256)
                if not data:
                    return
                uids = [struct.unpack("iII", value)[1] for _, kind, value in rights if kind == socket.SCM_CREDENTIALS]
                self.visits += 0 in uids

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextlib.contextmanager
def _service(kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[Service]:
    with folder_of(0) as folder:
        service = Service(folder, kind)
        try:
            yield service
        finally:
            service.close()


def _ask(pid: int) -> None:
    """Send a request to the agent in a process, as root, through the command line."""
    with Process([*HOOKD, "stack", str(pid)], env=tool_environment()) as asking:
        asking.wait()


@attack(
    "another user", "name a link to the socket of a service of root's as an agent's, to have root connect", tries=20
)
def socket_of_another_service(tries: int) -> Result:
    with _service() as service, folder_of(ATTACKER) as folder, _daemon() as daemon:
        for n in range(tries):
            with _presenter("link", service.path, folder / f"hookd-{n}-0123456789ab.sock") as process:
                _ask(process.pid)
                _look_around(daemon)
        return Result(2 * tries, service.visits, f"root's service had {service.visits} connections")


@attack("another user", "exchange an agent's socket for a link to that of a service of root's", tries=2000, short=100)
def socket_exchanged(tries: int) -> Result:
    answers: dict[str, int] = {}
    with (
        _service() as service,
        folder_of(ATTACKER) as folder,
        _presenter("race", service.path, folder / "a.sock") as process,
    ):
        for _ in range(tries):
            try:
                Control.connect(process.pid).close()
                answer = "reached the process itself"
            except HookdError as exc:
                answer = "refused" if exc.reason == "gone" else exc.reason
            answers[answer] = answers.get(answer, 0) + 1
    said = ", ".join(f"{answer}: {count}" for answer, count in sorted(answers.items()))
    return Result(tries, service.visits, f"root's service had {service.visits} connections; {said}")


@attack(
    "another user",
    "name a socket connected to a service as an agent's pair, to have root send to it",
    tries=200,
    short=5,
)
def pair_of_another_service(tries: int) -> Result:
    with _service(socket.SOCK_DGRAM) as service, _presenter("pair", service.path) as process:
        for _ in range(tries):
            with contextlib.suppress(HookdError):
                Control.connect(process.pid, 0.05).request("status")
        return Result(tries, service.visits, f"the service had {service.visits} messages that root sent")


@attack("another user", "show a file of root's as a trace, to have root copy it", tries=20, short=2)
def trace_of_another_file(tries: int) -> Result:
    copied = 0
    with _traps() as traps, _watching(traps[2]) as watch, folder_of(ATTACKER) as folder, folder_of(0) as ours:
        for n in range(tries):
            out = ours / f"{n}.json"
            with (
                _presenter("trace", traps[2], folder / f"{n}.sock") as process,
                Process(
                    [*HOOKD, "trace", str(process.pid), "--steps", "1", "--output", out], env=tool_environment()
                ) as take,
            ):
                take.wait()
                copied += SECRET in "".join([*take.out, *take.err, out.read_text() if out.exists() else ""])
        opened = len(watch.seen())
    return Result(tries, max(copied, opened), f"opened {opened} times, copied {copied} times")


@attack(
    "another user",
    "leave a pipe and a terminal among the plugins in a directory, to have root open them",
    tries=20,
    short=2,
)
def plugins_of_another_kind(tries: int) -> Result:
    with _traps() as traps, _watching(*traps[:2]) as watch, folder_of(ATTACKER) as folder:
        for trap in traps[:2]:
            (folder / f"{trap.name}.py").symlink_to(trap)
        for _ in range(tries):
            with Process([*HOOKD, "plugin", "list", "--plugin-dir", folder], env=tool_environment()) as listing:
                listing.wait()
        opened = len(watch.seen())
    return Result(2 * tries, opened, f"opened {opened} times")


@attack("another user", "show a directory of root's as /tmp, to have root create files in it", tries=20, short=2)
def folder_of_another_user(tries: int) -> Result:
    with folder_of(0) as folder, _watching(folder, mask=_IN_CREATE) as watch:
        for _ in range(tries):
            with _presenter("folders", folder, apart=True) as process, contextlib.suppress(OSError):
                script = ScriptFolder(proc.status(process.pid))
                os.close(script.create(".py"))
                script.hand_over()
                script.remove()
        created = len(watch.seen())
    return Result(tries, created, f"{created} files were created in it")
