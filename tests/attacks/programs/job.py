"""A small training that follows commands on its stdin, and answers each with a line of JSON.

`ask`: ask for hookd; its environment has HOOKD=1 from then on, as if from its start. `probe`: report its own work, and
what hookd has left behind. `block S`: wait for S seconds in uninterruptible sleep, as the parent of a vfork. `quit`: end.
"""

import ctypes
import json
import mmap
import os
import select
import signal
import sys
import threading
import time

import torch

SYS_CLONE, CLONE_VFORK = 56, 0x4000
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_void_p
entry_of = ctypes.pythonapi.PyVectorcall_Function  # of a function that is entered in C it is another
entry_of.restype, entry_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)

torch.set_num_threads(1)
CALL = torch.nn.Module.__call__
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
steps = 0


def step():
    global steps
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    steps += 1


def ask():
    ctypes.memset(libc.getenv(b"HOOKD"), ord("1"), 1)
    kept.append(mmap.mmap(-1, 1 << 20))  # the daemon looks at a process again when its size has changed


def probe():
    pages = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            if "hookd-page" in os.readlink(f"/proc/self/fd/{number}"):
                pages.add(os.stat(int(number)).st_ino)
        except OSError:  # that of the list itself
            continue
    return {
        "steps": steps,
        "is_watched": torch.nn.Module.__call__ is not CALL or entry_of(CALL) != entry_of(step),
        "pages": len(pages),
        "threads": threading.active_count(),
        "weight": model.weight.detach().double().sum().item(),
    }


def block(seconds):
    child = libc.syscall(SYS_CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        time.sleep(float(seconds))
        os._exit(0)
    os.waitpid(child, 0)


def main():
    step()
    print("ready", flush=True)
    while True:
        step()
        if select.select([0], [], [], 0.002)[0]:
            verb, *words = sys.stdin.readline().split() or ["quit"]
            if verb == "quit":
                break
            print(json.dumps({"ask": ask, "probe": probe, "block": block}[verb](*words)), flush=True)


if __name__ == "__main__":
    main()
