"""A training job that knows nothing of hookd: the target of the measurements.

    python trainer.py FILE [--beside KIND] [--width N] [--depth N]

It trains the same rounds of 50 steps again and again, each from the same parameters, and compares the parameters at
the end of every round bit by bit with those of the first. Its measurements go into FILE, which is mapped and never
blocks it: 64-bit words, `STEPS` (taken so far), `STOP` (set by the bench), `ROUNDS`, `WRONG` (rounds with another
result), then from `TIMES` on two for each step: its end in ns of the monotonic clock, and for how many ns the thread
has waited for a processor so far (`/proc/PID/task/TID/schedstat`): in that time other processes had it.

Its stdout says "ready" after the first round, and at the end the checksum, which a run without any tool must repeat.
"""

import argparse
import copy
import ctypes
import hashlib
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import torch
from torch import nn

STEPS, STOP, ROUNDS, WRONG, TIMES = 0, 1, 2, 3, 8
WORDS = 1 << 21
ROUND = 50


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--beside", choices=sorted(BESIDE), default="nothing")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=1, help="so many pairs of inner layers")
    arguments = parser.parse_args()
    words = open_words(arguments.file)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = arguments.width
    inner = [layer for _ in range(arguments.depth) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), *inner, nn.Linear(width, 1))
    data = torch.randn(ROUND, 64, 64)
    first = copy.deepcopy(model.state_dict())
    expected = train(model, data, first, words)
    BESIDE[arguments.beside]()
    print("ready", flush=True)
    while not words[STOP]:
        words[WRONG] += train(model, data, first, words) != expected
        words[ROUNDS] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)  # else it would kill us when the handler goes
    print("done", expected, flush=True)


def open_words(path):
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, 8 * WORDS)
    return memoryview(mmap.mmap(file, 8 * WORDS)).cast("q")


def train(model, data, first, words):
    """Take one round's steps; return the checksum of the parameters."""
    model.load_state_dict(first)
    waited = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        n = words[STEPS]
        at = TIMES + 2 * n % (WORDS - TIMES)
        words[at], words[at + 1] = time.monotonic_ns(), int(os.pread(waited, 100, 0).split()[1])
        words[STEPS] = n + 1
    os.close(waited)
    return checksum(model)


def checksum(model):
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(ctypes.string_at(value.data_ptr(), value.nbytes))
    return digest.hexdigest()


# What else goes on in the process, so that an attach finds it in every state.


def nothing():
    pass


def forever(work):
    def loop():
        while True:
            work()

    threading.Thread(target=loop, daemon=True).start()


def fight_for_the_lock():
    for _ in range(2):
        forever(lambda: (sum(range(20_000)), time.sleep(0.0005)))


def tick():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


def spawn():
    forever(lambda: (subprocess.run(["/bin/true"], check=True), time.sleep(0.02)))


def allocate():
    forever(lambda: ([bytearray(n * 97) for n in range(100)], time.sleep(0.001)))


def fork():
    def one():
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.05)

    forever(one)


def native():
    libc = ctypes.CDLL(None)
    forever(lambda: libc.usleep(3000))


def count():
    numbers = itertools.count()
    event = threading.Event()
    forever(lambda: (next(numbers), event.set(), event.clear(), event.wait(0.001)))


BESIDE = {
    "nothing": nothing, "threads": fight_for_the_lock, "itimer": tick, "subprocess": spawn, "malloc": allocate,
    "fork": fork, "native": native, "events": count,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
