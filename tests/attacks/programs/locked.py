"""Forks processes whose address space stays locked: one thread reads a page that never comes, another one maps memory.

locked.py FD DIRECTORY: see silent_files.py. A line on stdin says how many there are to be; the answer is that number.
"""

import ctypes
import mmap
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))

import silent_files

libc = ctypes.CDLL(None)


def lock(path):
    file = os.open(path, os.O_RDONLY)
    silent = mmap.mmap(file, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(silent))
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    threading.Thread(target=os.pread, args=(memory, 16, at), daemon=True).start()
    time.sleep(0.1)
    threading.Thread(target=mmap.mmap, args=(-1, mmap.PAGESIZE), daemon=True).start()
    while True:
        libc.pause()


def main():
    fd, path = int(sys.argv[1]), os.path.join(sys.argv[2], silent_files.NAME.decode())
    threading.Thread(target=silent_files.serve, args=(fd,), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            if os.fork() == 0:
                os.close(fd)
                lock(path)
        time.sleep(1)
        print(int(line), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
