"""Forks training processes that have torch already: importing it and its compiler takes longer than most of them run.

`python forkserver.py FD` in the targets' environment takes one JSON object for each process on a socket, with its stdin,
stdout and stderr, and answers with its pid, its pidfd, and later its exit status; it ends with the socket's other end.
What it forks is a process like any other, but for its command line, its hash seed and who its parent is.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys


def main(fd):
    link = socket.socket(fileno=fd)
    for name in ("numpy", "torch", "torch._dynamo"):
        importlib.import_module(name)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running = {}
    while True:
        ready, _, _ = select.select([link, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            reap(running)
        if link in ready:
            data, fds, _, _ = socket.recv_fds(link, 1 << 20, 4)
            if not data:
                return
            running.update(fork(link, json.loads(data), fds))


def reap(running):
    """Tell the exit statuses of those that have ended, as `subprocess` counts them."""
    for pid, status in list(running.items()):
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
            os.close(running.pop(pid))


def fork(link, task, fds):
    *streams, status = fds
    pid = os.fork()
    if not pid:
        become(link, task, streams)
    for stream in streams:
        os.close(stream)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(link, [str(pid).encode()], [pidfd])
    os.close(pidfd)
    return {pid: status}


def become(link, task, streams):
    """Run the program in this process, as Python would have begun it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    sys.argv = task["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
