"""Forks processes that do not end to become another program: to close a file at exec (FLUSH) is not answered.

endless_exec.py FD DIRECTORY: see silent_files.py. A line on stdin says how many processes there are to be, each with a page, and a
second one that they are to become another program; the answer is the line. The kernel holds a lock meanwhile for which everybody waits who opens the
process's mappings, memory, environment or auxiliary vector: `ps` of the whole machine, too. So it ends by itself after HELD_S,
whatever becomes of the attack.
"""

import os
import struct
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))

import silent_files

from tests.support import page_holder

FLUSH = 25
HELD_S = 30


def serve(fd):
    def answer(code, node, body, asker):
        if code != FLUSH:
            return silent_files.answer(code, node, body, asker)
        threading.Timer(HELD_S, os.write, (fd, struct.pack("<IiQ", 16, 0, asker[0]))).start()
        return None

    silent_files.serve(fd, answer)


def become_another(path, reader):
    os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    holder = page_holder.Holder({"run": f"endless-{os.getpid()}"})
    os.read(reader, 1)  # until the last who could write has closed its end
    holder.event()
    os.execv(sys.executable, [sys.executable, "-c", "input()"])


def main():
    fd, path = int(sys.argv[1]), os.path.join(sys.argv[2], silent_files.NAME.decode())
    threading.Thread(target=serve, args=(fd,), daemon=True).start()
    print("ready", flush=True)
    reader, tells = os.pipe()
    count = int(sys.stdin.readline())
    for _ in range(count):
        if os.fork() == 0:
            os.close(fd)
            os.close(tells)
            become_another(path, reader)
    print(count, flush=True)
    line = sys.stdin.readline()
    os.close(tells)
    time.sleep(1)
    print(line, end="", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
