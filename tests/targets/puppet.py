"""Trains for ever, and between steps answers the lines of its stdin: `probe`, `cost`, `step`, `cover`, `uncover`, `use_up`,
`give_back`, `quit`.

`probe` prints one JSON object: all that a guest might have changed in this process, compared with the originals that
were kept at the start. `cost` prints the price of a call of nn.Identity, relative to that of an empty method. `cover`
patches nn.Module.__call__ as another tool would, on top of whatever is there, and `uncover` takes that back. `use_up` opens
files until the process may open no more, and `give_back` closes them.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from types import FunctionType

import torch
import torch.nn.modules.module as registry
import torch.optim.optimizer as optimizers
from torch import nn

entry_of = ctypes.pythonapi.PyVectorcall_Function
entry_of.restype, entry_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def originals():
    return {
        "nn.Module.__call__": nn.Module.__dict__["__call__"],
        "nn.Module._call_impl": nn.Module._call_impl,
        "nn.Module.train": nn.Module.train,
        "nn.Module.__setattr__": nn.Module.__setattr__,
        "nn.Module.add_module": nn.Module.add_module,
        "torch.autograd.backward": torch.autograd.backward,
        "torch.Tensor.backward": torch.Tensor.backward,
        "torch.autograd.grad": torch.autograd.grad,
        "Optimizer.step": torch.optim.AdamW.step,
        "Optimizer.__init__": torch.optim.Optimizer.__init__,
        "Optimizer.zero_grad": torch.optim.Optimizer.zero_grad,
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "builtins.__import__": __import__,
        "os.fork": os.fork,
    }


def probe():
    gc.collect()
    parameters = list(model.parameters())
    dynamo = sys.modules.get("torch._dynamo.utils")
    now = originals()
    return {
        "replaced": sorted(name for name, value in ORIGINALS.items() if now[name] is not value),
        "entered": entry_of(ORIGINALS["nn.Module.__call__"]) != entry_of(originals),
        "module attributes": sorted(set(vars(nn.Module)) ^ module_attributes),
        "dynamo": dynamo is None or dynamo.unpatched_nn_module_call is ORIGINALS["nn.Module.__call__"],
        "global hooks": {
            k: len(v) for k, v in vars(registry).items() if k.startswith("_global") and hasattr(v, "keys")
        },
        "sticky": registry._global_is_full_backward_hook,
        "module state": sorted({key for m in model.modules() for key in vars(m)}),
        "module hooks": sum(len(v) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks")),
        "optimizer hooks": {k: len(v) for k, v in vars(optimizers).items() if k.startswith("_global_optimizer")},
        "own optimizer hooks": sum(len(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")),
        "optimizer state": sorted(vars(optimizer)),
        "parameter hooks": sum(len(p._backward_hooks or ()) for p in parameters)
        + sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in parameters),
        "grad enabled": torch.is_grad_enabled(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": sorted(filter(None, map(name_of, Path("/proc/self/task").iterdir()))),
        "fds": sorted(filter(None, map(link, Path("/proc/self/fd").iterdir()))),
        "maps": sorted(
            {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line}
        ),
        "sys.path": list(sys.path),
        "sys.meta_path": [getattr(finder, "__name__", repr(finder)) for finder in sys.meta_path],
        "sys.path_hooks": len(sys.path_hooks),
        "path importer cache": sorted(sys.path_importer_cache),
        "modules": sorted(sys.modules),
        "builtins": sorted(dir(__builtins__)),
        "__main__": sorted(globals()),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": wakeup_fd(),
        "trace": [repr(sys.gettrace()), repr(sys.getprofile()), repr(threading.gettrace())],
        "gc": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count()],
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "cwd": str(Path.cwd()),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "objects": objects_of_hookd(),
    }


def link(fd):
    try:
        return str(fd.readlink())
    except OSError:
        return None  # that of the listing itself


def name_of(task):
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return None  # it has just ended


def wakeup_fd():
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def objects_of_hookd():
    """Return the names of the guest's objects that the garbage collector still knows: classes, functions, instances."""
    found = set()
    for thing in gc.get_objects():
        kind = type(thing)
        is_own_name = kind is type or kind is FunctionType  # an instance's home is that of its class
        home = thing.__module__ if is_own_name else getattr(kind, "__module__", "")
        if isinstance(home, str) and home.partition(".")[0].startswith(("hookd", "_hookd")):
            found.add(f"{home}.{thing.__qualname__ if is_own_name else kind.__qualname__}")
    return sorted(found)


def cost():
    """Return the ratio of a call of nn.Identity to a call of an empty method: the median of many short turns."""
    identity, x = nn.Identity(), torch.zeros(1)

    class Plain:
        def __call__(self, x):
            return x

    def seconds(callee, calls=2000):
        begun = time.thread_time_ns()
        for _ in range(calls):
            callee(x)
        return time.thread_time_ns() - begun

    plain = Plain()
    ratios = [seconds(identity) / seconds(plain) for _ in range(41)]
    return statistics.median(ratios)


def memory():
    """Return the resident bytes that are in use: what malloc only keeps (its per-thread arenas fragment) is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def answer(line):
    if line == "probe":
        print("probe", json.dumps(probe()), flush=True)
    elif line == "cost":
        print("cost", cost(), flush=True)
    elif line == "memory":
        print("memory", memory(), flush=True)
    elif line == "step":
        print("stepped", steps, flush=True)
    elif line == "cover":
        covered.append(nn.Module.__call__)
        nn.Module.__call__ = lambda self, *args, **kwargs: covered[-1](self, *args, **kwargs)  # noqa: PLW0108
        print("covered", flush=True)
    elif line == "use_up":
        with contextlib.suppress(OSError):
            while True:
                used_up.append(os.dup(0))
        print("used up", flush=True)
    elif line == "give_back":
        while used_up:
            os.close(used_up.pop())
        print("given back", flush=True)
    elif line == "uncover":
        nn.Module.__call__ = covered[-1]
        print("uncovered", flush=True)
    return line != "quit"


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
module_attributes = set(vars(nn.Module))
ORIGINALS = originals()  # now that torch has wrapped the optimizer's step
covered, used_up = [], []
steps = 0
running = True
print("ready", flush=True)
while running:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    steps += 1
    if select.select([sys.stdin], [], [], 0.005)[0]:  # most of the processor is for the tests
        running = answer(sys.stdin.readline().strip() or "quit")
