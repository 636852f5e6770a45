"""Run a DDP script, whose ranks end only when gloo's thread has destroyed the last collective: `settled.py SCRIPT ARGUMENTS`.

torch 2.13 keeps a copy of the Python context for a backward (`_engine_run_backward` in torch/autograd/graph.py). The last
`ProcessGroupGloo::AsyncWork` of it may be the last owner of that copy, and destroys it in the thread `pt_gloo_runloop`, which
needs the GIL for that. Where the main thread meanwhile ends, either the process aborts with `terminate called without an active
exception`, or `~ProcessGroupGloo` joins that thread with the GIL held, for ever. Without hookd it does so as well.
"""

import contextvars
import gc
import os
import runpy
import sys
import time

import torch.distributed as dist

PATIENCE_S = 120.0
OWN = 1  # the main thread's own context


def settle() -> None:
    """Wait, without the GIL, until no other thread holds a copy of a context."""
    until = time.monotonic() + PATIENCE_S
    while sum(type(one) is contextvars.Context for one in gc.get_objects()) > OWN:
        assert time.monotonic() < until, "gloo's thread still holds a context"
        time.sleep(0.001)


def main() -> None:
    destroy = dist.destroy_process_group

    def settled(*given: object, **named: object) -> None:
        settle()
        destroy(*given, **named)

    dist.destroy_process_group = settled
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
