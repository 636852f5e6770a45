"""A server that forks processes with finished imports: importing torch, or a command, takes longer than most of them run.

`python forkserver.py FD MODULE…`, in the environment of its later children, imports these modules, and all below those that
end with `.*`. It receives one JSON object for each process on a socket, with its stdin, stdout and stderr, and answers with
its pid, its pidfd, and later its exit status. It ends when the other end of the socket closes. A forked process is like any
other, except for its hash seed and its parent; and its command line, if the kernel does not allow changing that.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import sys
import time
import types

PR_SET_MM, PR_SET_MM_MAP = 35, 14  # linux/prctl.h


def main(fd, modules):
    link = socket.socket(fileno=fd)
    sys.path.pop(0)  # the directory of this file
    load(modules)
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


def load(modules):
    """Import modules; optional ones may lack their dependencies."""
    for name in modules:
        whole = importlib.import_module(name.removesuffix(".*"))
        if name.endswith(".*"):
            for found in pkgutil.walk_packages(whole.__path__, f"{whole.__name__}."):
                with contextlib.suppress(ImportError):
                    importlib.import_module(found.name)


def reap(running):
    """Write the exit statuses of the children that have ended, in the form that `subprocess` uses."""
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
    """Run the program, the module or the code in this process, as Python would have started it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    os.chdir(task["cwd"])
    command, env = task["command"], task["env"]
    try:
        show(command, env)
    except OSError:
        os.execve(command[0], command, env)
    # Files know whether they are seekable: the server's own may be, pipes are not.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    option, *rest = command[1:]
    if option == "-c":
        sys.argv = [option, *rest[1:]]
        sys.path.insert(0, "")
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main_module))
    elif option == "-m":
        sys.argv = rest
        sys.path.insert(0, task["cwd"])
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        sys.path.insert(0, os.path.dirname(option))
        runpy.run_path(option, run_name="__main__")
    sys.exit()


def show(command, env):
    """Make /proc show this command line and this environment.

    Raises:
        OSError: the kernel was built without CONFIG_CHECKPOINT_RESTORE.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = ctypes.create_string_buffer(words + variables)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # for as long as the process lives
    begin = ctypes.addressof(memory)
    middle, end = begin + len(words), begin + len(words) + len(variables)
    with open("/proc/self/stat") as file:
        fields = [int(field) for field in file.read().rpartition(") ")[2].split()[1:]]
    start_code, end_code, start_stack = fields[22:25]  # numbers 26 to 28 of proc_pid_stat(5)
    if len(fields) < 44:  # noqa: PLR2004  qemu-user makes a file without them, and shows its own command line anyway
        return
    start_data, end_data, start_brk = fields[41:44]  # 45 to 47
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    places = (start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0), start_stack)
    # struct prctl_mm_map: neither another auxiliary vector nor another executable.
    new = struct.pack("=11QQIi", *places, begin, middle, middle, end, 0, 0, -1)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, new, len(new), 0):
        raise OSError(ctypes.get_errno(), "PR_SET_MM_MAP")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
