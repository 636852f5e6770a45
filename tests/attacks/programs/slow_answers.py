"""Forks processes whose address space is locked for 0.4 s at a time, and waits for them as the parent of ranks does.

slow_answers.py FD DIRECTORY: see silent_files.py. A line on stdin says how many there are to be; the answer is that number.
Whoever asks for the command line or the mappings of one is answered, after a while. The parent has an empty page, so that it is
looked at again and again.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))

import silent_files

DELAY_S = 0.4
READ_AHEAD = 16
libc = ctypes.CDLL(None)


def serve(fd):
    def answer(code, node, body, asker):
        if code != silent_files.READ:
            return silent_files.answer(code, node, body, asker)
        size = struct.unpack_from("<QQI", body)[2]
        written = struct.pack("<IiQ", 16 + size, 0, asker[0]) + bytes(size)
        timer = threading.Timer(DELAY_S, os.write, (fd, written))
        timer.daemon = True
        timer.start()
        return None

    silent_files.serve(fd, answer)


def read_pages(memory, address):
    """Read one page after the other; for each, the kernel asks the server."""
    for number in range(os.getpid() % 100 * READ_AHEAD, silent_files.SIZE // mmap.PAGESIZE):
        os.pread(memory, 1, address + number * mmap.PAGESIZE)


def change(address):
    """Ask for the lock of the address space all the time, so that who reads has to wait behind us."""
    access = 0
    while True:
        access ^= mmap.PROT_WRITE
        libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | access)


def lock(path):
    file = os.open(path, os.O_RDONLY)
    slow = mmap.mmap(file, silent_files.SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    other = mmap.mmap(-1, mmap.PAGESIZE)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (slow, other)]
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    time.sleep(1)  # until all are there
    threading.Thread(target=read_pages, args=(memory, addresses[0]), daemon=True).start()
    threading.Thread(target=change, args=(addresses[1],), daemon=True).start()
    while True:
        libc.pause()


def main():
    silent_files.SIZE = 1 << 30
    fd, path = int(sys.argv[1]), os.path.join(sys.argv[2], silent_files.NAME.decode())
    threading.Thread(target=serve, args=(fd,), daemon=True).start()
    print("ready", flush=True)
    count = int(sys.stdin.readline())
    page = os.memfd_create("hookd-page")
    os.ftruncate(page, mmap.PAGESIZE)
    kept = mmap.mmap(page, mmap.PAGESIZE)
    for _ in range(count):
        if os.fork() == 0:
            os.close(fd)
            lock(path)
    time.sleep(2)
    print(count, flush=True)
    os.wait()
    kept.close()


if __name__ == "__main__":
    main()
