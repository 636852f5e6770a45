"""Forks processes that look like trainings from outside and never answer; each costs its user some hundred kilobytes.

A line on stdin says how many shall live; the answer is that number. The argument is a file in the place of torch's library.
"""

import ctypes
import gc
import mmap
import os
import signal
import sys

libc = ctypes.PyDLL(None)  # calls keep the GIL: no pending call is run


def fork():
    pid = os.fork()
    if pid == 0:
        while True:
            libc.pause()
    return pid


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with open(sys.argv[1], "rb") as file:
        _library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    gc.disable()
    gc.freeze()
    alive = []
    print("ready", flush=True)
    for line in sys.stdin:
        while len(alive) < int(line):
            alive.append(fork())
        while len(alive) > int(line):
            os.kill(alive.pop(0), signal.SIGKILL)
        print(len(alive), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
