"""Forks processes with command lines of 520,000 words, whose size changes all the time. The argument says how many.

Each says `on` when it has begun.
"""

import os
import resource
import signal
import sys

CODE = """
import mmap, os, time
os.write(1, b"on\\n")
while True:
    region = mmap.mmap(-1, 1 << 20)
    time.sleep(0.3)
    region.close()
    time.sleep(0.3)
"""


def main():
    resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY,) * 2)  # the words may take a quarter of it
    words = [chr(97 + n % 26) + chr(97 + n // 26 % 26) for n in range(520_000)]
    children = []
    for _ in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", CODE, *words])
        children.append(child)
    sys.stdin.readline()
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
