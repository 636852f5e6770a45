"""Shows a page whose control pair is a socket at one moment and a file of its own file system at the next.

pair_of_files.py FD DIRECTORY: see silent_files.py. To close a copy of that file waits for an answer (FLUSH) that only this
process itself is given.
"""

import ctypes
import os
import socket
import sys
import threading

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))

import presenter
import silent_files

FLUSH = 25


def serve(fd):
    """Answer all but the flushes of others, which the requesting thread signals (struct fuse_in_header)."""

    def answer(code, node, body, asker):
        if code == FLUSH:
            return (0, b"") if os.path.exists(f"/proc/self/task/{asker[1]}") else None
        return silent_files.answer(code, node, body)

    silent_files.serve(fd, answer)


def exchange(socket_fd, file_fd, number):
    while True:
        os.dup2(file_fd, number)
        os.dup2(socket_fd, number)


def main():
    fd, path = int(sys.argv[1]), os.path.join(sys.argv[2], silent_files.NAME.decode())
    threading.Thread(target=serve, args=(fd,), daemon=True).start()
    inner, outer = socket.socketpair()
    number = os.dup(outer.fileno())
    page = presenter._real_page(f"@{number}:{os.fstat(number).st_ino}")
    file = os.open(path, os.O_RDONLY)
    threading.Thread(target=exchange, args=(outer.fileno(), file, number), daemon=True).start()
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).pause()
    del page, inner


if __name__ == "__main__":
    main()
