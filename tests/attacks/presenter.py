"""A hostile process: shows root things under names that hookd believes in. Run as an unprivileged user.

    python presenter.py page PATH      in `people.APART`: PATH under the name of a page
    python presenter.py swap PATH      the same, exchanged with a true page as fast as it can
    python presenter.py folders PATH   in `people.APART`: PATH, a directory, as /tmp, /var/tmp and /dev/shm
    python presenter.py link PATH SOCKET   a page whose control socket SOCKET is a link to PATH
    python presenter.py race PATH SOCKET   the same, exchanged with a socket of its own as fast as it can
    python presenter.py pair PATH      a page whose pair of sockets is a datagram socket connected to PATH
    python presenter.py trace PATH SOCKET  an agent that shows the file PATH as its trace

It prints "ready" and lives until its stdin ends. What it prints later says that a trap has gone off.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from hookd.wire.page import NAME, PageWriter

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def main():
    kind, *arguments = sys.argv[1:]
    keep = globals()[kind](*map(Path, arguments))
    print("ready", flush=True)
    sys.stdin.read()
    del keep


def page(path):
    """Hold a descriptor that does not open `path`, for we may not, but names it; the link of it reads as a page's."""
    shown = _under_the_name(path)
    real = os.memfd_create(NAME)
    os.ftruncate(real, mmap.PAGESIZE)
    return shown, mmap.mmap(real, mmap.PAGESIZE)  # hookd looks into the maps first


def swap(path):
    writer = _real_page("")
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500) for fd in (writer.fd, _under_the_name(path))]
    threading.Thread(target=_exchange, args=(*high, writer.fd), daemon=True).start()  # hookd takes the lowest first
    return writer


def _exchange(one, other, number):
    while True:
        os.dup2(other, number)
        os.dup2(one, number)


def folders(path):
    for place in ("/var/tmp", "/dev/shm", "/tmp"):  # in /tmp is `path` itself
        subprocess.run(["mount", "--bind", path, place], check=True)


def link(path, name):
    name.symlink_to(path)
    return _real_page(str(name))


def race(path, name):
    listener = socket.socket(socket.AF_UNIX)
    own, other = f"{name}.own", f"{name}.link"
    listener.bind(own)
    listener.listen(128)
    os.symlink(path, other)
    os.link(own, name)
    threading.Thread(target=_accept_all, args=(listener,), daemon=True).start()
    threading.Thread(target=_turn, args=(own, other, str(name)), daemon=True).start()
    return listener, _real_page(str(name))


def _turn(own, other, name):
    """Turn the name from the socket to the link and back: rename does it in one step."""
    while True:
        for source in (other, own):
            with contextlib.suppress(FileExistsError):
                os.link(source, f"{name}.new", follow_symlinks=False)
            os.rename(f"{name}.new", name)
            with contextlib.suppress(FileNotFoundError):  # of two links to one file rename leaves both
                os.unlink(f"{name}.new")


def _accept_all(listener):
    while True:
        listener.accept()[0].close()


def pair(path):
    outer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    outer.connect(str(path))
    return outer, _real_page(f"@{outer.fileno()}:{os.fstat(outer.fileno()).st_ino}")


def trace(path, name):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(name))
    listener.listen(16)
    number = os.open(path, os.O_PATH)
    threading.Thread(target=_answer_all, args=(listener, number), daemon=True).start()
    return listener, _real_page(str(name))


def _answer_all(listener, number):
    done = {"ok": True, "state": "done", "fd": number, "steps": 1, "first": 1, "pause_s": 0.0, "all_threads": True}
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb", 0) as stream:
            for _ in stream:
                stream.write(json.dumps(done).encode() + b"\n")


def _real_page(control):
    status = Path("/proc/self/stat")  # gone where the root is another
    ticks = int(status.read_text().rpartition(")")[2].split()[19]) if status.exists() else 0
    writer = PageWriter.create({
        "agent_version": "0", "protocol": 1, "pid": os.getpid(), "ppid": os.getppid(), "start_ticks": ticks, "started": 0.0,
        "attached": 0.0, "python": "3.11.9", "torch": "2.13.0", "script": "train.py", "run": "train.py", "is_named": True, "rank": 0,
        "local_rank": 0, "world_size": 1, "control": control, "method": "attach", "uid": os.getuid(), "step_offset": None,
        "keep": False,
    })  # fmt: skip
    writer.set_state("running")
    return writer


def _under_the_name(path):
    """Bind `path` as a file in the root of a file system that is nobody else's, so that nothing stands before its name."""
    root = tempfile.mkdtemp(prefix="attack-root-")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    name = f"/memfd:{NAME} (deleted)"
    Path(root + name).touch()
    subprocess.run(["mount", "--bind", path, root + name], check=True)
    old = f"{root}/old"
    os.mkdir(old)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(PIVOT_ROOT[platform.machine()], root.encode(), old.encode()):
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    os.rmdir("/old" + root)  # nothing is mounted there any more
    return os.open(name, os.O_PATH)


if __name__ == "__main__":
    main()
